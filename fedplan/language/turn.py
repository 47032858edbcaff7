# SPDX-License-Identifier: Apache-2.0
"""Turns: all that a plan may look at, and the named conditions that look at them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fedplan.errors import PlanError
from fedplan.language.predicates import Predicate, a_string, a_whole, listed, quoted
from fedplan.models.params import Block


@dataclass(frozen=True)
class Turn:
    """One client in one round, counted from 1; the phase is what the server has announced.

    `traits` are what a site says of itself (`capacity`, `site`); `scores` what its probe found.
    """

    round: int = 1
    client: str = ""
    phase: str = ""
    traits: Mapping[str, str] = field(default_factory=dict[str, str])
    scores: Mapping[Block, float] | None = None


Condition = Predicate[Turn]


class ConditionAtom(Predicate[Turn]):
    """A condition that is not joined from others."""

    @property
    def about(self) -> str:
        return "condition"


@dataclass(frozen=True)
class After(ConditionAtom):
    """True once so many rounds are done."""

    rounds: int

    @property
    def text(self) -> str:
        return f"after({self.rounds})"

    def holds(self, subject: Turn) -> bool:
        return subject.round > self.rounds


@dataclass(frozen=True)
class Phase(ConditionAtom):
    """True while the server has announced this phase."""

    name: str

    @property
    def text(self) -> str:
        return f"phase({quoted(self.name)})"

    def holds(self, subject: Turn) -> bool:
        return subject.phase == self.name


@dataclass(frozen=True)
class ClientIn(ConditionAtom):
    """True for the named clients."""

    names: tuple[str, ...]

    @property
    def text(self) -> str:
        return f"client_in({listed(self.names)})"

    def holds(self, subject: Turn) -> bool:
        return subject.client in self.names


@dataclass(frozen=True)
class Trait(ConditionAtom):
    """True for clients that say this of themselves."""

    name: str
    value: str

    @property
    def text(self) -> str:
        return f"trait({listed((self.name, self.value))})"

    def holds(self, subject: Turn) -> bool:
        return subject.traits.get(self.name) == self.value


def a_condition(value: Any, name: str) -> Condition:
    """The value, if it is a condition."""
    if not isinstance(value, Predicate) or value.about != "condition":
        raise PlanError(f"{name} takes a condition such as after(20), not {value!s}")
    return value  # pyright: ignore[reportUnknownVariableType]


def after(rounds: int) -> Condition:
    """True once so many rounds are done: `after(20)` begins with round 21."""
    return After(a_whole(rounds, "after", least=0))


def phase(name: str) -> Condition:
    """True while the server has announced this phase."""
    return Phase(a_string(name, "phase"))


def client_in(*names: str) -> Condition:
    """True for the named clients."""
    if not names:
        raise PlanError('client_in takes one or more names, as in client_in("north")')
    return ClientIn(tuple(sorted({a_string(n, "client_in") for n in names})))


def trait(name: str, value: str) -> Condition:
    """True for clients whose trait has this value: `trait("capacity", "small")`."""
    return Trait(a_string(name, "trait"), a_string(value, "trait"))
