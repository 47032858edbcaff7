# SPDX-License-Identifier: Apache-2.0
"""Turns (one client in one round) and the conditions that a plan can set on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fedplan.errors import PlanError
from fedplan.language.predicates import (
    Predicate,
    format_values,
    quote_string,
    require_int,
    require_string,
)
from fedplan.models.params import Block


@dataclass(frozen=True)
class Turn:
    """One client in one round: everything that a plan may depend on.

    `round`: from 1. `client`: name. `phase`: the phase of the round, which the server names by the
    method's phase rule; empty before the first phase. `traits`: properties that the client
    declares, for example capacity. `scores`: the score of each block, by the client's probe or
    summed over all clients; None if there are none.
    """

    round: int = 1
    client: str = ""
    phase: str = ""
    traits: Mapping[str, str] = field(default_factory=dict[str, str])
    scores: Mapping[Block, float] | None = None


Condition = Predicate[Turn]
"""A predicate on turns."""


class ConditionAtom(Predicate[Turn]):
    """An elementary condition: one without `&`, `|` or `~`."""

    @property
    def subject_type(self) -> str:
        return "condition"


@dataclass(frozen=True)
class After(ConditionAtom):
    """True in all rounds after the first `rounds`."""

    rounds: int

    @property
    def text(self) -> str:
        return f"after({self.rounds})"

    def holds(self, subject: Turn) -> bool:
        return subject.round > self.rounds


@dataclass(frozen=True)
class Phase(ConditionAtom):
    """True in the rounds of the phase `name` (see Turn)."""

    name: str

    @property
    def text(self) -> str:
        return f"phase({quote_string(self.name)})"

    def holds(self, subject: Turn) -> bool:
        return subject.phase == self.name


@dataclass(frozen=True)
class ClientIn(ConditionAtom):
    """True for the clients in `names`."""

    names: tuple[str, ...]

    @property
    def text(self) -> str:
        return f"client_in({format_values(self.names)})"

    def holds(self, subject: Turn) -> bool:
        return subject.client in self.names


@dataclass(frozen=True)
class Trait(ConditionAtom):
    """True for clients that have the trait `name` with the value `value`."""

    name: str
    value: str

    @property
    def text(self) -> str:
        return f"trait({format_values((self.name, self.value))})"

    def holds(self, subject: Turn) -> bool:
        return subject.traits.get(self.name) == self.value


def require_condition(value: Any, name: str) -> Condition:
    """Return `value` if it is a condition; otherwise raise PlanError, naming function `name`."""
    if not isinstance(value, Predicate) or value.subject_type != "condition":
        raise PlanError(f"{name} takes a condition such as after(20), not {value!s}")
    return value  # pyright: ignore[reportUnknownVariableType]


def after(rounds: int) -> Condition:
    """True in all rounds after the first `rounds`: `after(20)` begins with round 21."""
    return After(require_int(rounds, "after", least=0))


def phase(name: str) -> Condition:
    """True in the rounds of the phase `name`, which the server names by the method's phase rule."""
    return Phase(require_string(name, "phase"))


def client_in(*names: str) -> Condition:
    """True for the clients of these names; raises PlanError if there are none."""
    if not names:
        raise PlanError('client_in takes one or more names, as in client_in("north")')
    return ClientIn(tuple(sorted({require_string(n, "client_in") for n in names})))


def trait(name: str, value: str) -> Condition:
    """True for clients whose trait has this value: `trait("capacity", "small")`."""
    return Trait(require_string(name, "trait"), require_string(value, "trait"))
