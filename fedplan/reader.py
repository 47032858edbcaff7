# SPDX-License-Identifier: Apache-2.0
"""Parser of small call languages such as `chain(share(), keep(head))`; no text is ever evaluated.

Plans and codecs each define a Grammar. Every accepted text is also valid Python for the same value,
and every error points at a character.
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

MAX_DEPTH = 64
"""Maximum nesting depth of a text."""

_TOKEN = re.compile(
    r"\s*(?:(?P<name>[A-Za-z_]\w*)|(?P<number>-?\d[\d.]*(?:e-?\d+)?)"
    r"|(?P<string>\"(?:[^\"\\\n]|\\.)*\"|'[^'\\\n]*')"
    r"|(?P<sign>[(){},:&|~])|(?P<end>\Z)|(?P<wrong>.))",
    re.ASCII | re.DOTALL,
)


@dataclass(frozen=True)
class Grammar:
    """A call language: functions, constants and operators, and the error for invalid texts.

    `read` parses a text. `name`: for messages, such as "the plan language".
    `calls`: functions by name; arguments are positional.
    `error`: a TextError class, raised with the position of the mistake.
    `max_length`: the most characters of a text; `remedy`: advice for a longer text.
    `constants`: values of bare words.
    `prefix`: functions of one-operand operators by sign.
    `infix`: functions of operators by sign, loosest first; each takes the list of operands.
    `check_pair`: called with the first and each other operand of an infix operator; raises `error`
    if these cannot be joined.
    """

    name: str
    calls: Mapping[str, Callable[..., Any]]
    error: type[TextError]
    max_length: int
    remedy: str
    constants: Mapping[str, Any] = field(default_factory=dict[str, Any])
    prefix: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict[str, Any])
    infix: Mapping[str, Callable[[list[Any]], Any]] = field(default_factory=dict[str, Any])
    check_pair: Callable[[Any, Any], None] = lambda _first, _other: None

    def read(self, text: str, convert: Callable[[Any], Any]) -> Any:
        """Parse a text that holds one value, and return `convert(value)`.

        Raises the grammar's error for a text that is too long or has a mistake, or if `convert`
        raises that error.
        """
        self.require_short(text)
        return _Parser(self, text).whole(convert)

    def require_short(self, text: str) -> None:
        """Raise the grammar's error if a text is longer than `max_length` characters."""
        if len(text) > self.max_length:
            raise self.error(
                f"a text of {len(text)} characters is longer than {self.max_length}: {self.remedy}",
                source=text,
                position=0,
            )


class _Parser:
    """Recursive-descent parser of one text in a grammar; each method consumes the tokens it parses.

    `kind`, `token` and `start` are kind, text and offset of the current token, `at` the offset
    after that token. Call `whole` once. All methods raise the grammar's error at a mistake.
    """

    def __init__(self, grammar: Grammar, text: str) -> None:
        self.grammar, self.text, self.at, self.depth = grammar, text, 0, 0
        self.kind, self.token, self.start = "", "", 0
        self.step()

    def step(self) -> None:
        """Move to the next token; fail at a character that starts no token."""
        match = _TOKEN.match(self.text, self.at)
        assert match is not None and match.lastgroup is not None
        self.kind, self.token = match.lastgroup, match[match.lastgroup]
        self.start, self.at = match.start(match.lastgroup), match.end()
        if self.kind == "wrong":
            unclosed = "this string is never closed"
            strange = f"{self.token!r} is not part of {self.grammar.name}"
            self.fail(unclosed if self.token in "'\"" else strange)

    def sees(self, sign: str) -> bool:
        """Return whether the current token is this sign."""
        return self.kind == "sign" and self.token == sign

    def fail(self, message: str, at: int | None = None) -> NoReturn:
        """Raise the grammar's error at an offset, by default at the current token."""
        position = self.start if at is None else at
        raise self.grammar.error(message, source=self.text, position=position)

    def whole(self, convert: Callable[[Any], Any]) -> Any:
        """Parse the whole text as one value, and return `convert(value)`."""
        value = self.value()
        if self.kind != "end":
            self.fail(f"nothing may follow here, and there is {self.token!r}")
        return self.build(convert, (value,), at=0)

    def build(self, function: Callable[..., Any], args: Iterable[Any], *, at: int) -> Any:
        """Return `function(*args)`; a grammar error without a position gets the position `at`."""
        try:
            return function(*args)
        except self.grammar.error as error:
            if error.position is None:
                self.fail(error.message, at)
            raise

    def value(self, level: int = 0) -> Any:
        """Parse operands joined by the infix sign of this level, and return the joined value.

        Level 0 is the loosest operator; the level after the last is a single operand.
        """
        if level == len(self.grammar.infix):
            return self.single()
        sign, join = [*self.grammar.infix.items()][level]
        operands = [self.value(level + 1)]
        while self.sees(sign):
            at = self.start
            self.step()
            operands.append(self.value(level + 1))
            self.build(self.grammar.check_pair, (operands[0], operands[-1]), at=at)
        return join(operands) if len(operands) > 1 else operands[0]

    def single(self) -> Any:
        """Parse one operand; fail if the operand is nested deeper than MAX_DEPTH."""
        self.depth += 1
        if self.depth > MAX_DEPTH:
            self.fail(f"nested more than {MAX_DEPTH} deep")
        value = self.operand()
        self.depth -= 1
        return value

    def operand(self) -> Any:
        """Parse a constant, call, number, string, prefix operator, bracketed value or cases."""
        kind, token, start = self.kind, self.token, self.start
        if kind == "end":
            self.fail("the text ends here, but a value is expected")
        self.step()
        if kind == "name" and self.sees("("):
            return self.call(token, start)
        if kind == "name":
            if token not in self.grammar.constants:
                self.unknown(token, self.grammar.constants or self.grammar.calls, start)
            return self.grammar.constants[token]
        if kind == "number":
            return self.number(token, start)
        if kind == "string":
            try:
                return json.loads(token) if token[0] == '"' else token[1:-1]
            except ValueError:
                self.fail("this string has an escape that is not JSON's", start)
        if token in self.grammar.prefix:
            return self.build(self.grammar.prefix[token], (self.single(),), at=start)
        if token == "(":
            value = self.value()
            if not self.sees(")"):
                self.missing("')'", start)
            self.step()
            return value
        if token == "{":
            return self.cases(start)
        self.fail(f"{token!r} cannot stand here", start)

    def call(self, token: str, start: int) -> Any:
        """Parse the arguments of the function named `token`, and return the function's value.

        `start`: offset of the name, for errors. Fails if the function is unknown or does not take
        that many arguments.
        """
        if token not in self.grammar.calls:
            self.unknown(token, self.grammar.calls, start)
        function, opening, args = self.grammar.calls[token], self.start, list[Any]()
        self.step()
        while not self.sees(")"):
            args.append(self.value())
            self.comma_or(")", opening)
        self.step()
        try:
            signature(function).bind(*args)
        except TypeError:
            self.fail(f"{token} does not take {len(args)} arguments", start)
        return self.build(function, args, at=start)

    def cases(self, start: int) -> dict[str, Any]:
        """Parse `{"name": value, ...}` after the opening brace at offset `start`; return the dict.

        Fails if a name is not a string, or occurs twice.
        """
        cases = dict[str, Any]()
        while not self.sees("}"):
            name, at = self.operand(), self.start
            if not isinstance(name, str) or name in cases:
                self.fail(f"each case needs a name of its own in quotes, not {name!s}", at)
            if not self.sees(":"):
                self.fail("a colon is missing here, between a case and its value")
            self.step()
            cases[name] = self.value()
            self.comma_or("}", start)
        self.step()
        return cases

    def number(self, token: str, start: int) -> int | float:
        """Return the int or float of a token at offset `start`.

        Fails for an int of more than 10 characters, and for a text such as "1.2.3".
        """
        is_integer = token.lstrip("-").isdigit()
        if is_integer and len(token) > 10:
            self.fail("a number is too long", start)
        try:
            return int(token) if is_integer else float(token)
        except ValueError:
            self.fail(f"{token[:40]!r} is not a number: write such as 20 or 0.1", start)

    def comma_or(self, closing: str, opening: int) -> None:
        """Skip a comma, or stay at the sign `closing`; fail at any other token.

        `opening`: offset of the open bracket, for the error.
        """
        if self.sees(","):
            self.step()
        elif not self.sees(closing):
            self.missing(f"a comma or {closing!r}", opening)

    def missing(self, expected: str, opening: int) -> NoReturn:
        """Fail for a missing sign; at the end of the text, point at the open bracket.

        `expected`: the sign in words. `opening`: offset of the bracket.
        """
        if self.kind == "end":
            closing = {"(": ")", "[": "]", "{": "}"}.get(self.text[opening], "its bracket")
            self.fail(f"this is never closed: {closing} is missing", opening)
        self.fail(f"{expected} is missing before {self.token!r}")

    def unknown(self, token: str, names: Iterable[str], start: int) -> NoReturn:
        """Fail for the unknown name `token` at offset `start`, with the closest names.

        Without a close name, the message lists eight of `names`; the name of a function without
        brackets is reported as such.
        """
        all_names = [*self.grammar.constants, *self.grammar.calls]
        close = get_close_matches(token.lower(), all_names, n=2, cutoff=0.6)
        hint = f"; it has {', '.join(sorted(names)[:8])}, ..."
        if close:
            hint = f": did you mean {' or '.join(close)}?"
        if token in self.grammar.calls:
            hint = f": write {token}(...)"
        self.fail(f"there is no {token!r} in {self.grammar.name}{hint}", start)
