# SPDX-License-Identifier: Apache-2.0
"""Predicates: what parts and conditions have in common, `& | ~` and a text that reads back."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from fedplan.errors import PlanError

S = TypeVar("S")

LOWEST, MIDDLE, HIGHEST = range(3)
"""How tightly `|`, `&` and everything else bind."""


class Predicate(ABC, Generic[S]):
    """A named truth about a subject. Two predicates with the same text are the same."""

    binds: ClassVar[int] = HIGHEST

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

    def __and__(self, other: Predicate[S]) -> Predicate[S]:
        return Both(_flat(Both, self, other))

    def __or__(self, other: Predicate[S]) -> Predicate[S]:
        return Either(_flat(Either, self, other))

    def __invert__(self) -> Predicate[S]:
        return self.inner if isinstance(self, Opposite) else Opposite(self)

    def atoms(self) -> Iterator[Predicate[S]]:
        """The predicates that it is joined from."""
        yield self

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
class Both(Predicate[S]):
    """All of several."""

    of: tuple[Predicate[S], ...]
    binds: ClassVar[int] = MIDDLE

    def __post_init__(self) -> None:
        _one_sort(self.of)

    @property
    def about(self) -> str:
        return self.of[0].about

    @property
    def text(self) -> str:
        return " & ".join(each.within(MIDDLE) for each in self.of)

    def holds(self, subject: S) -> bool:
        return all(each.holds(subject) for each in self.of)

    def atoms(self) -> Iterator[Predicate[S]]:
        return (atom for each in self.of for atom in each.atoms())


@dataclass(frozen=True)
class Either(Predicate[S]):
    """Any of several."""

    of: tuple[Predicate[S], ...]
    binds: ClassVar[int] = LOWEST

    def __post_init__(self) -> None:
        _one_sort(self.of)

    @property
    def about(self) -> str:
        return self.of[0].about

    @property
    def text(self) -> str:
        return " | ".join(each.within(LOWEST) for each in self.of)

    def holds(self, subject: S) -> bool:
        return any(each.holds(subject) for each in self.of)

    def atoms(self) -> Iterator[Predicate[S]]:
        return (atom for each in self.of for atom in each.atoms())


@dataclass(frozen=True)
class Opposite(Predicate[S]):
    """Not another one."""

    inner: Predicate[S]

    @property
    def about(self) -> str:
        return self.inner.about

    @property
    def text(self) -> str:
        return f"~{self.inner.within(HIGHEST)}"

    def holds(self, subject: S) -> bool:
        return not self.inner.holds(subject)

    def atoms(self) -> Iterator[Predicate[S]]:
        return self.inner.atoms()


def _flat(
    operator: type[Both[S]] | type[Either[S]], left: Predicate[S], right: Any
) -> tuple[Predicate[S], ...]:
    """Both sides of an operator, with its own kind taken apart: `a | (b | c)` is `a | b | c`."""
    if not isinstance(right, Predicate):
        raise PlanError(f"{left.text} can be joined with a {left.about}, not with {right!r}")
    sides: tuple[Predicate[S], Predicate[S]] = (left, right)  # pyright: ignore[reportUnknownVariableType]
    return tuple(
        each for side in sides for each in (side.of if isinstance(side, operator) else (side,))
    )


def _one_sort(of: tuple[Predicate[S], ...]) -> None:
    for each in of:
        if each.about != of[0].about:
            raise PlanError(
                f"{of[0].text} is a {of[0].about} and {each.text} is a {each.about}: "
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
