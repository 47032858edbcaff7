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
    """One client in one round: all that a plan may depend on.

    `round` counts from 1. `phase` is the phase that the server announced, or empty. `traits` are
    the client's own declarations, such as capacity. `scores` are the block scores of its probe, or
    None where no probe has run.
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
    """True while the server has announced this phase."""

    name: str

    @property
    def text(self) -> str:
        return f"phase({quote_string(self.name)})"

    def holds(self, subject: Turn) -> bool:
        return subject.phase == self.name


@dataclass(frozen=True)
class ClientIn(ConditionAtom):
    """True for the named clients."""

    names: tuple[str, ...]

    @property
    def text(self) -> str:
        return f"client_in({format_values(self.names)})"

    def holds(self, subject: Turn) -> bool:
        return subject.client in self.names


@dataclass(frozen=True)
class Trait(ConditionAtom):
    """True for clients whose trait `name` has the value `value`."""

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
    """True while the server has announced this phase."""
    return Phase(require_string(name, "phase"))


def client_in(*names: str) -> Condition:
    """True for the clients of these names; raises PlanError if there are none."""
    if not names:
        raise PlanError('client_in takes one or more names, as in client_in("north")')
    return ClientIn(tuple(sorted({require_string(n, "client_in") for n in names})))


def trait(name: str, value: str) -> Condition:
    """True for clients whose trait has this value: `trait("capacity", "small")`."""
    return Trait(require_string(name, "trait"), require_string(value, "trait"))
