# SPDX-License-Identifier: Apache-2.0
"""Predicates: what parts and conditions have in common, `& | ~` and a text that reads back."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from fedplan.errors import PlanError

S = TypeVar("S")

BINDS = {"|": 0, "&": 1, "~": 2}
"""How tightly the signs bind; a predicate without one binds as tightly as `~`."""


class Predicate(ABC, Generic[S]):
    """A named truth about a subject. Two predicates with the same text are the same."""

    @property
    @abstractmethod
    def about(self) -> str:
        """What it is: a "part" speaks of params, a "condition" of turns."""

    @abstractmethod
    def holds(self, subject: S) -> bool:
        """Whether it is true of the subject."""

    @property
    @abstractmethod
    def text(self) -> str:
        """The predicate in the plan language."""

    def doubtful(self, subject: S) -> bool:
        """Whether nobody knows if it is true of the subject."""
        return False

    def __and__(self, other: Predicate[S]) -> Predicate[S]:
        return _joined("&", self, other)

    def __or__(self, other: Predicate[S]) -> Predicate[S]:
        return _joined("|", self, other)

    def __invert__(self) -> Predicate[S]:
        return self.inner if isinstance(self, Opposite) else Opposite(self)

    def atoms(self) -> Iterator[Predicate[S]]:
        """The predicates that it is joined from."""
        yield self

    def alternatives(self) -> tuple[Predicate[S], ...]:
        """Those of which any must hold: one, but for a union."""
        return (self,)

    @property
    def binds(self) -> int:
        """How tightly its text holds together."""
        return BINDS["~"]

    def __str__(self) -> str:
        return self.text

    def __bool__(self) -> bool:
        raise PlanError(
            f"write `|`, `&` and `~` for or, and, not: {self.text} is not true or false"
        )

    def within(self, binds: int) -> str:
        """Its text as the operand of an operator that binds so tightly."""
        return self.text if self.binds >= binds else f"({self.text})"


@dataclass(frozen=True)
class Joined(Predicate[S]):
    """Several, of which all must hold, or any."""

    sign: str
    of: tuple[Predicate[S], ...]

    def __post_init__(self) -> None:
        for each in self.of:
            require_alike(self.of[0], each)

    @property
    def about(self) -> str:
        return self.of[0].about

    @property
    def binds(self) -> int:
        return BINDS[self.sign]

    @property
    def text(self) -> str:
        return f" {self.sign} ".join(each.within(self.binds) for each in self.of)

    def holds(self, subject: S) -> bool:
        said = (each.holds(subject) for each in self.of)
        return all(said) if self.sign == "&" else any(said)

    def doubtful(self, subject: S) -> bool:
        """Some are doubtful, and no other one settles it: a false one of `&`, a true one of `|`."""
        doubts = [each.doubtful(subject) for each in self.of]
        sure = (e.holds(subject) for e, doubt in zip(self.of, doubts, strict=True) if not doubt)
        return any(doubts) and (all(sure) if self.sign == "&" else not any(sure))

    def atoms(self) -> Iterator[Predicate[S]]:
        return (atom for each in self.of for atom in each.atoms())

    def alternatives(self) -> tuple[Predicate[S], ...]:
        return self.of if self.sign == "|" else (self,)


@dataclass(frozen=True)
class Opposite(Predicate[S]):
    """Not another one."""

    inner: Predicate[S]

    @property
    def about(self) -> str:
        return self.inner.about

    @property
    def text(self) -> str:
        return f"~{self.inner.within(BINDS['~'])}"

    def holds(self, subject: S) -> bool:
        return not self.inner.holds(subject)

    def doubtful(self, subject: S) -> bool:
        return self.inner.doubtful(subject)

    def atoms(self) -> Iterator[Predicate[S]]:
        return self.inner.atoms()


def _joined(sign: str, left: Predicate[S], right: Any) -> Joined[S]:
    if not isinstance(right, Predicate):
        raise PlanError(f"{left.text} can be joined with a {left.about}, not with {right!r}")
    return joined(sign, (left, right))  # pyright: ignore[reportUnknownArgumentType]


def joined(sign: str, sides: Iterable[Predicate[S]]) -> Joined[S]:
    """All of them at once, with joins of the same sign taken apart: `a | (b | c)` is `a | b | c`.

    To join them one by one would copy and check the first ones again for each of the others.
    """
    of: list[Predicate[S]] = []
    for side in sides:
        of += side.of if isinstance(side, Joined) and side.sign == sign else (side,)
    return Joined(sign, tuple(of))


def a_predicate(value: Any) -> Predicate[Any]:
    """The value, if it is a part or a condition."""
    if not isinstance(value, Predicate):
        raise PlanError(f"parts and conditions can be joined, and this is {value!s}")
    return value  # pyright: ignore[reportUnknownVariableType]


def require_alike(first: Any, other: Any) -> None:
    """Raise unless both speak of params, or both of turns."""
    if a_predicate(other).about != a_predicate(first).about:
        raise PlanError(
            f"{first.text} is a {first.about} and {other.text} is a {other.about}: "
            "they cannot be joined"
        )


def a_whole(value: Any, name: str, *, least: int) -> int:
    """The value, if it is a whole number that plans can hold."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 10**9:
        raise PlanError(f"{name} takes a whole number from {least} to 999999999, not {value!r}")
    return value


def a_string(value: Any, name: str) -> str:
    """The value, if it is a string that can be written down."""
    if not isinstance(value, str) or not value:
        raise PlanError(f"{name} takes text in quotes, not {value!r}")
    if not value.isprintable():
        raise PlanError(f"{name} takes text of printable characters, not {value!r}")
    return value


def quoted(value: str) -> str:
    """A string as the plan language writes it."""
    return json.dumps(value, ensure_ascii=False)


def listed(values: tuple[int | str, ...]) -> str:
    """Numbers or strings as the plan language writes them between commas."""
    return ", ".join(quoted(v) if isinstance(v, str) else str(v) for v in values)
