# SPDX-License-Identifier: Apache-2.0
"""Plans: which role each param has, for one client in one round."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from fedplan.errors import PlanError
from fedplan.language.parts import Part, a_part, body, everything
from fedplan.language.predicates import a_string, a_whole, quoted
from fedplan.language.turn import Condition, Turn, a_condition
from fedplan.models.params import Param

LANGUAGE = 1
"""The version of the plan language: part of every fingerprint."""


class Role(Enum):
    """Whether a param is trained, and whose value it is."""

    SHARE = "share"
    KEEP = "keep"
    FREEZE = "freeze"
    HOLD = "hold"

    @property
    def word(self) -> str:
        """What a param of this role is: shared, kept, frozen or held."""
        return {"share": "shared", "keep": "kept", "freeze": "frozen", "hold": "held"}[self.value]

    @property
    def trained(self) -> bool:
        """Whether the client trains it this turn."""
        return self in (Role.SHARE, Role.KEEP)

    @property
    def own(self) -> bool:
        """Whether it is the client's own value: then it never goes up."""
        return self in (Role.KEEP, Role.HOLD)

    @property
    def awake(self) -> Role:
        """The role of the same owner that is trained."""
        return Role.KEEP if self.own else Role.SHARE


Roles = Mapping[Param, Role]


class Plan(ABC):
    """A pure step from roles to roles, for one turn. Its text is the plan.

    Plans are data: two with the same text are equal, `parse(plan.text)` gives the plan back, and
    the fingerprint of the text tells two ends of a network whether they run the same one.
    """

    @property
    @abstractmethod
    def text(self) -> str:
        """The plan in the plan language."""

    @abstractmethod
    def settle(self, turn: Turn) -> tuple[Step, ...]:
        """What it says this turn, in order, with every condition decided."""

    def within(self) -> Iterator[Plan]:
        """Itself and every plan that it is made of."""
        yield self

    @property
    def fingerprint(self) -> str:
        """Sixteen hex digits that tell this plan from every other."""
        return hashlib.sha256(f"fedplan {LANGUAGE}\n{self.text}".encode()).hexdigest()[:16]

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Assign(Plan):
    """Give a part a role."""

    role: Role
    part: Part

    @property
    def text(self) -> str:
        return f"{self.role.value}({'' if self.part == everything else self.part.text})"

    def settle(self, turn: Turn) -> tuple[Step, ...]:
        return (self,)


@dataclass(frozen=True)
class Best(Plan):
    """Train a part in the blocks with the highest scores; whose value it is does not change."""

    count: int
    part: Part

    @property
    def text(self) -> str:
        return f"best({self.count}{'' if self.part == body else ', ' + self.part.text})"

    def settle(self, turn: Turn) -> tuple[Step, ...]:
        return (self,)


Step = Assign | Best


@dataclass(frozen=True)
class Chain(Plan):
    """One plan after another: the later is heard."""

    steps: tuple[Plan, ...]

    @property
    def text(self) -> str:
        return f"chain({', '.join(step.text for step in self.steps)})"

    def settle(self, turn: Turn) -> tuple[Step, ...]:
        return tuple(said for step in self.steps for said in step.settle(turn))

    def within(self) -> Iterator[Plan]:
        yield self
        for step in self.steps:
            yield from step.within()


@dataclass(frozen=True)
class When(Plan):
    """One plan while a condition holds, another while it does not."""

    condition: Condition
    then: Plan
    otherwise: Plan

    @property
    def text(self) -> str:
        tail = "" if self.otherwise == chain() else f", {self.otherwise.text}"
        return f"when({self.condition.text}, {self.then.text}{tail})"

    def settle(self, turn: Turn) -> tuple[Step, ...]:
        return (self.then if self.condition.holds(turn) else self.otherwise).settle(turn)

    def within(self) -> Iterator[Plan]:
        yield self
        yield from self.then.within()
        yield from self.otherwise.within()


@dataclass(frozen=True)
class Cycle(Plan):
    """Plans in turn, one a round."""

    plans: tuple[Plan, ...]

    @property
    def text(self) -> str:
        return f"cycle({', '.join(plan.text for plan in self.plans)})"

    def settle(self, turn: Turn) -> tuple[Step, ...]:
        return self.plans[(turn.round - 1) % len(self.plans)].settle(turn)

    def within(self) -> Iterator[Plan]:
        yield self
        for plan in self.plans:
            yield from plan.within()


@dataclass(frozen=True)
class By(Plan):
    """A plan for each value of a client's trait."""

    trait: str
    cases: tuple[tuple[str, Plan], ...]
    otherwise: Plan

    @property
    def text(self) -> str:
        cases = ", ".join(f"{quoted(value)}: {plan.text}" for value, plan in self.cases)
        tail = "" if self.otherwise == chain() else f", {self.otherwise.text}"
        return f"by({quoted(self.trait)}, {{{cases}}}{tail})"

    def settle(self, turn: Turn) -> tuple[Step, ...]:
        said = dict(self.cases).get(turn.traits.get(self.trait, ""), self.otherwise)
        return said.settle(turn)

    def within(self) -> Iterator[Plan]:
        yield self
        for _, plan in self.cases:
            yield from plan.within()
        yield from self.otherwise.within()


def share(part: Part = everything) -> Plan:
    """Trained by the clients, averaged by the federation."""
    return Assign(Role.SHARE, a_part(part, "share"))


def keep(part: Part = everything) -> Plan:
    """Trained by each client, seen by nobody else."""
    return Assign(Role.KEEP, a_part(part, "keep"))


def freeze(part: Part = everything) -> Plan:
    """The federation's value, trained by nobody."""
    return Assign(Role.FREEZE, a_part(part, "freeze"))


def hold(part: Part = everything) -> Plan:
    """The client's own value, at rest."""
    return Assign(Role.HOLD, a_part(part, "hold"))


def best(count: int, part: Part = body) -> Plan:
    """Train a part in the `count` blocks with the highest scores of this turn."""
    return Best(a_whole(count, "best", least=1), a_part(part, "best"))


def chain(*plans: Plan) -> Plan:
    """One plan after another, the later heard; `chain()` says nothing.

    >>> chain(share(), chain(), chain(freeze(), share())).text
    'chain(share(), freeze(), share())'
    """
    steps = list[Plan]()
    for plan in plans:
        steps += plan.steps if isinstance(plan, Chain) else (a_plan(plan, "chain"),)
    return steps[0] if len(steps) == 1 else Chain(tuple(steps))


def when(condition: Condition, plan: Plan, otherwise: Plan | None = None) -> Plan:
    """A plan while a condition holds, and optionally another while it does not."""
    other = chain() if otherwise is None else a_plan(otherwise, "when")
    return When(a_condition(condition, "when"), a_plan(plan, "when"), other)


def cycle(*plans: Plan) -> Plan:
    """Plans in turn: the first in round 1, the next in round 2, and again from the start."""
    if not plans:
        raise PlanError("cycle takes one or more plans")
    return Cycle(tuple(a_plan(plan, "cycle") for plan in plans))


def by(trait: str, cases: Mapping[str, Plan], otherwise: Plan | None = None) -> Plan:
    """A plan for each value of a client's trait: `by("capacity", {"small": best(2)}, best(6))`."""
    if not isinstance(cases, Mapping) or not cases:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise PlanError(f'by takes cases such as {{"small": best(2)}}, not {cases!r}')
    said = sorted((a_string(value, "by"), a_plan(plan, "by")) for value, plan in cases.items())
    other = chain() if otherwise is None else a_plan(otherwise, "by")
    return By(a_string(trait, "by"), tuple(said), other)


def a_plan(value: Any, name: str) -> Plan:
    """The value, if it is a plan."""
    if not isinstance(value, Plan):
        raise PlanError(f"{name} takes a plan such as share(head), not {value!s}")
    return value
