# SPDX-License-Identifier: Apache-2.0
"""The reader of texts: calls, words, numbers, strings and cases, by a table. Nothing is evaluated.

Plans and wires are tables of calls on it. Every text that it reads is also Python that gives the
same value, and every error points at the character.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from inspect import signature
from typing import Any, NoReturn

from fedplan.errors import TextError

DEEPEST = 64
"""How deep a text may be nested."""

_TOKEN = re.compile(
    r"\s*(?:(?P<name>[A-Za-z_]\w*)|(?P<number>-?\d[\d.]*(?:e-?\d+)?)"
    r"|(?P<string>\"(?:[^\"\\\n]|\\.)*\"|'[^'\\\n]*')"
    r"|(?P<sign>[(){},:&|~])|(?P<end>\Z)|(?P<wrong>.))",
    re.ASCII | re.DOTALL,
)


@dataclass(frozen=True)
class Table:
    """A language: what its texts may say, how long they may be, and what is raised otherwise.

    `infix` joins all values between one sign at once, the loosest sign first; `alike` raises for
    a pair that it cannot join.
    """

    name: str
    calls: Mapping[str, Callable[..., Any]]
    error: type[TextError]
    longest: int
    remedy: str
    words: Mapping[str, Any] = field(default_factory=dict[str, Any])
    prefix: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict[str, Any])
    infix: Mapping[str, Callable[[list[Any]], Any]] = field(default_factory=dict[str, Any])
    alike: Callable[[Any, Any], None] = lambda _first, _other: None

    def read(self, text: str, wanted: Callable[[Any], Any]) -> Any:
        """The one value of a text, as `wanted` passes it."""
        self.require_short(text)
        return _Reader(self, text).whole(wanted)

    def require_short(self, text: str) -> None:
        """Raise for a text over the longest length."""
        if len(text) > self.longest:
            raise self.error(
                f"a text of {len(text)} characters is longer than {self.longest}: {self.remedy}",
                source=text,
                position=0,
            )


class _Reader:
    """One pass over a text, a token at a time."""

    def __init__(self, table: Table, text: str) -> None:
        self.table, self.text, self.at, self.depth = table, text, 0, 0
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
            strange = f"{self.token!r} is not part of {self.table.name}"
            self.fail(unclosed if self.token in "'\"" else strange)

    def sees(self, sign: str) -> bool:
        """Whether the token is this sign."""
        return self.kind == "sign" and self.token == sign

    def fail(self, message: str, at: int | None = None) -> NoReturn:
        position = self.start if at is None else at
        raise self.table.error(message, source=self.text, position=position)

    def whole(self, wanted: Callable[[Any], Any]) -> Any:
        """The one value of the text."""
        value = self.value()
        if self.kind != "end":
            self.fail(f"nothing may follow here, and there is {self.token!r}")
        return self.build(wanted, (value,), at=0)

    def build(self, make: Callable[..., Any], args: Iterable[Any], *, at: int) -> Any:
        """Make a value; an error of its own is pointed at where it stands."""
        try:
            return make(*args)
        except self.table.error as error:
            if error.position is None:
                self.fail(error.message, at)
            raise

    def value(self, level: int = 0) -> Any:
        """Values between infix signs, from the loosest sign inwards."""
        if level == len(self.table.infix):
            return self.single()
        sign, join = [*self.table.infix.items()][level]
        found = [self.value(level + 1)]
        while self.sees(sign):
            at = self.start
            self.step()
            found.append(self.value(level + 1))
            self.build(self.table.alike, (found[0], found[-1]), at=at)
        return join(found) if len(found) > 1 else found[0]

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
        if token in self.table.prefix:
            return self.build(self.table.prefix[token], (self.single(),), at=start)
        if token == "(":
            value = self.value()
            if not self.sees(")"):
                self.missing("')'", start)
            self.step()
            return value
        if token == "{":
            return self.cases(start)
        self.fail(f"{token!r} cannot stand here", start)

    def word(self, token: str, start: int) -> Any:
        if token not in self.table.words:
            self.unknown(token, self.table.words or self.table.calls, start)
        return self.table.words[token]

    def call(self, token: str, start: int) -> Any:
        if token not in self.table.calls:
            self.unknown(token, self.table.calls, start)
        make, opening, args = self.table.calls[token], self.start, list[Any]()
        self.step()
        while not self.sees(")"):
            args.append(self.value())
            self.comma_or(")", opening)
        self.step()
        try:
            signature(make).bind(*args)
        except TypeError:
            self.fail(f"{token} does not take {len(args)} arguments", start)
        return self.build(make, args, at=start)

    def cases(self, start: int) -> dict[str, Any]:
        said = dict[str, Any]()
        while not self.sees("}"):
            name, at = self.operand(), self.start
            if not isinstance(name, str) or name in said:
                self.fail(f"each case needs a name of its own in quotes, not {name!s}", at)
            if not self.sees(":"):
                self.fail("a colon is missing here, between a case and its value")
            self.step()
            said[name] = self.value()
            self.comma_or("}", start)
        self.step()
        return said

    def number(self, token: str, start: int) -> int | float:
        whole = token.lstrip("-").isdigit()
        if whole and len(token) > 10:
            self.fail("a number is too long", start)
        try:
            return int(token) if whole else float(token)
        except ValueError:
            self.fail(f"{token[:40]!r} is not a number: write such as 20 or 0.1", start)

    def string(self, token: str, start: int) -> str:
        try:
            return json.loads(token) if token[0] == '"' else token[1:-1]
        except ValueError:
            self.fail("this string has an escape that is not JSON's", start)

    def comma_or(self, closing: str, opening: int) -> None:
        """Pass a comma, or stay at the closing sign."""
        if self.sees(","):
            self.step()
        elif not self.sees(closing):
            self.missing(f"a comma or {closing!r}", opening)

    def missing(self, what: str, opening: int) -> NoReturn:
        if self.kind == "end":
            closing = {"(": ")", "[": "]", "{": "}"}.get(self.text[opening], "its bracket")
            self.fail(f"this is never closed: {closing} is missing", opening)
        self.fail(f"{what} is missing before {self.token!r}")

    def unknown(self, token: str, known: Iterable[str], start: int) -> NoReturn:
        """Fail with the nearest names, or some of those that could stand there."""
        names = [*self.table.words, *self.table.calls]
        close = get_close_matches(token.lower(), names, n=2, cutoff=0.6)
        hint = f"; it has {', '.join(sorted(known)[:8])}, ..."
        if close:
            hint = f": did you mean {' or '.join(close)}?"
        if token in self.table.calls:
            hint = f": write {token}(...)"
        self.fail(f"there is no {token!r} in {self.table.name}{hint}", start)
