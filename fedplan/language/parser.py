# SPDX-License-Identifier: Apache-2.0
"""Text: from the plan language to plans and parts. Nothing is evaluated; errors point."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from inspect import signature
from typing import Any, NoReturn

from fedplan.errors import PlanError
from fedplan.language import parts, plan, turn
from fedplan.language.parts import Part
from fedplan.language.plan import Plan, a_plan
from fedplan.language.predicates import Predicate, joined, require_alike

CALLS: dict[str, Callable[..., Any]] = {
    f.__name__: f
    for f in (
        *(plan.share, plan.keep, plan.freeze, plan.hold, plan.best),
        *(plan.chain, plan.when, plan.cycle, plan.by),
        *(turn.after, turn.phase, turn.client_in, turn.trait),
        *(parts.blocks, parts.first, parts.last, parts.named, parts.on),
    )
}
"""The functions of the language. Every text is also Python that gives the same plan."""

LONGEST, DEEPEST = 50_000, 64
"""Characters of a plan, as it is said and as it is printed, and how deep it may be nested."""

_TOKEN = re.compile(
    r"\s*(?:(?P<name>[A-Za-z_]\w*)|(?P<number>-?\d+)|(?P<string>\"(?:[^\"\\\n]|\\.)*\"|'[^'\\\n]*')"
    r"|(?P<sign>[(){},:&|~])|(?P<end>\Z)|(?P<wrong>.))",
    re.ASCII | re.DOTALL,
)


def parse(text: str) -> Plan:
    """Read a plan.

    >>> parse("chain(share(), when(after(20), freeze(query | key)))").text
    'chain(share(), when(after(20), freeze(query | key)))'
    """
    made = _Reader(text).whole(lambda value: a_plan(value, "a plan"))
    # What is printed is read again elsewhere: it has spaces that what was said may lack.
    _require_short(made.text)
    return made


def parse_part(text: str) -> Part:
    """Read a part, such as `query & ~bias`."""
    return _Reader(text).whole(lambda value: parts.a_part(value, "a part"))


def _require_short(text: str) -> None:
    if len(text) > LONGEST:
        raise PlanError(
            f"a plan of {len(text)} characters is longer than {LONGEST}: name groups of clients by "
            "a trait, and parts by a word or a pattern",
            source=text,
            position=0,
        )


class _Reader:
    """One pass over a text, a token at a time."""

    def __init__(self, text: str) -> None:
        _require_short(text)
        self.text, self.at, self.depth = text, 0, 0
        self.kind, self.token, self.start = "", "", 0
        self.step()

    def step(self) -> None:
        """Move to the next token."""
        match = _TOKEN.match(self.text, self.at)
        assert match is not None and match.lastgroup is not None
        self.kind, self.token = match.lastgroup, match[match.lastgroup]
        self.start, self.at = match.start(match.lastgroup), match.end()
        if self.kind == "wrong":
            unclosed = "this string is never closed"
            strange = f"{self.token!r} is not part of the plan language"
            self.fail(unclosed if self.token in "'\"" else strange)

    def sees(self, sign: str) -> bool:
        """Whether the token is this sign."""
        return self.kind == "sign" and self.token == sign

    def fail(self, message: str, at: int | None = None) -> NoReturn:
        raise PlanError(message, source=self.text, position=self.start if at is None else at)

    def whole(self, as_wanted: Callable[[Any], Any]) -> Any:
        """The one value of the text."""
        value = self.value()
        if self.kind != "end":
            self.fail(f"nothing may follow here, and there is {self.token!r}")
        return self.build(as_wanted, (value,), at=0)

    def build(self, make: Callable[..., Any], args: Iterable[Any], *, at: int) -> Any:
        """Make a value; an error of its own is pointed at where it stands."""
        try:
            return make(*args)
        except PlanError as error:
            if error.position is None:
                self.fail(error.message, at)
            raise

    def value(self) -> Any:
        """Alternatives, by `|`."""
        return self.joined("|", lambda: self.joined("&", self.single))

    def joined(self, sign: str, operand: Callable[[], Any]) -> Any:
        found = [operand()]
        while self.sees(sign):
            at = self.start
            self.step()
            self.need_predicate(found[0], at)
            found.append(operand())
            self.need_predicate(found[-1], at)
            self.build(require_alike, (found[0], found[-1]), at=at)
        return joined(sign, found) if len(found) > 1 else found[0]

    def single(self) -> Any:
        """One operand: a word, a call, a number, a string, cases, or something in brackets."""
        self.depth += 1
        if self.depth > DEEPEST:
            self.fail(f"nested more than {DEEPEST} deep")
        value = self.operand()
        self.depth -= 1
        return value

    def operand(self) -> Any:
        kind, token, start = self.kind, self.token, self.start
        if kind == "end":
            self.fail("the text ends here, and something was expected")
        self.step()
        if kind == "name":
            return self.call(token, start) if self.sees("(") else self.word(token, start)
        if kind == "number":
            return self.number(token, start)
        if kind == "string":
            return self.string(token, start)
        if token == "~":
            inner = self.single()
            self.need_predicate(inner, start)
            return ~inner
        if token == "(":
            value = self.value()
            self.close(")", start)
            return value
        if token == "{":
            return self.cases(start)
        self.fail(f"{token!r} cannot stand here", start)

    def word(self, token: str, start: int) -> Any:
        if token in parts.WORDS:
            return parts.Word(token)
        hint = f": write {token}(...)" if token in CALLS else self.near(token, parts.WORDS)
        self.fail(f"there is no part called {token!r}{hint}", start)

    def call(self, token: str, start: int) -> Any:
        if token not in CALLS:
            self.fail(f"there is no {token!r} in the plan language{self.near(token, CALLS)}", start)
        opening = self.start
        self.step()
        args = list[Any]()
        while not self.sees(")"):
            args.append(self.value())
            self.comma_or(")", opening)
        self.step()
        takes = signature(CALLS[token]).parameters.values()
        most = LONGEST if any(p.kind is p.VAR_POSITIONAL for p in takes) else len(takes)
        least = sum(p.default is p.empty and p.kind is not p.VAR_POSITIONAL for p in takes)
        if not least <= len(args) <= most:
            self.fail(f"{token} does not take {len(args)} arguments", start)
        return self.build(CALLS[token], args, at=start)

    def cases(self, start: int) -> dict[str, Any]:
        said = dict[str, Any]()
        while not self.sees("}"):
            name, at = self.operand(), self.start
            if not isinstance(name, str) or name in said:
                self.fail(f"each case needs a name of its own in quotes, not {name!s}", at)
            if not self.sees(":"):
                self.fail("a colon is missing here, between a case and its plan")
            self.step()
            said[name] = self.value()
            self.comma_or("}", start)
        self.step()
        return said

    def number(self, token: str, start: int) -> int:
        if len(token) > 10:
            self.fail("a number is too long", start)
        return int(token)

    def string(self, token: str, start: int) -> str:
        try:
            return json.loads(token) if token[0] == '"' else token[1:-1]
        except ValueError:
            self.fail("this string has an escape that is not JSON's", start)

    def comma_or(self, closing: str, opening: int) -> None:
        """Pass a comma, or stay at the closing sign."""
        if self.kind == "end":
            self.fail("this is never closed", opening)
        if self.sees(","):
            self.step()
        elif not self.sees(closing):
            self.fail(f"a comma or {closing!r} is missing before {self.token!r}")

    def close(self, sign: str, opening: int) -> None:
        if self.kind == "end":
            self.fail("this is never closed", opening)
        if not self.sees(sign):
            self.fail(f"{sign!r} is missing before {self.token!r}")
        self.step()

    def need_predicate(self, value: Any, at: int) -> None:
        if not isinstance(value, Predicate):
            self.fail(f"parts and conditions can be joined, and this is {value!s}", at)

    def near(self, token: str, names: Iterable[str]) -> str:
        """The nearest known names, as the end of a sentence."""
        close = get_close_matches(token.lower(), [*parts.WORDS, *CALLS], n=2, cutoff=0.6)
        known = close or sorted(names)[:8]
        return (
            f": did you mean {' or '.join(close)}?"
            if close
            else f"; it has {', '.join(known)}, ..."
        )
