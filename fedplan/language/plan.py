# SPDX-License-Identifier: Apache-2.0
"""Plans: which role each param has, by client and round; and the functions that build them."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from fedplan.errors import PlanError
from fedplan.language.parts import Part, body, everything, require_part
from fedplan.language.predicates import (
    Condition,
    Turn,
    quote_string,
    require_condition,
    require_int,
    require_string,
)
from fedplan.models.params import Param

LANGUAGE = 1
"""Version of the plan language; part of every fingerprint."""


class Role(Enum):
    """Role of a param in a turn: trained or not, and with a global or a personal value.

    SHARE: global, trained and aggregated. KEEP: personal, trained. FREEZE: global, not trained.
    HOLD: personal, not trained. A personal value is the client's own and is never uploaded.
    `is_trained`: whether the client trains the param in this turn. `is_personal`: whether the value
    belongs to the client.
    """

    SHARE = "share"
    KEEP = "keep"
    FREEZE = "freeze"
    HOLD = "hold"

    def __init__(self, value: str) -> None:
        # Plain fields: a turn reads them for each param, many times.
        self.is_trained = value in ("share", "keep")
        self.is_personal = value in ("keep", "hold")

    @property
    def word(self) -> str:
        """The adjective for params of this role: shared, kept, frozen or held."""
        return {"share": "shared", "keep": "kept", "freeze": "frozen", "hold": "held"}[self.value]

    @property
    def trained_role(self) -> Role:
        """KEEP for personal roles, SHARE for the others."""
        return Role.KEEP if self.is_personal else Role.SHARE


Roles = Mapping[Param, Role]
"""The role of each param in one turn."""


class Plan(ABC):
    """A rule that assigns a Role to each param in each turn (one client in one round).

    Build plans with `share`, `keep`, `freeze`, `hold`, `best`, `chain`, `when`, `cycle`, `by`, or
    `parse` a text. Plans are immutable: plans with the same `text` are equal, and
    `parse(plan.text) == plan`. Server and clients compare `fingerprint` to check that both run the
    same plan. `active_steps(turn)` are the assignments of a turn; `walk()` yields nested plans.
    """

    @property
    @abstractmethod
    def text(self) -> str:
        """The plan in the plan language."""

    @abstractmethod
    def active_steps(self, turn: Turn) -> tuple[Step, ...]:
        """The assignments and choices that apply in a turn; later ones take precedence."""

    def walk(self) -> Iterator[Plan]:
        """Yield the plan itself and all plans inside it."""
        yield self

    @property
    def fingerprint(self) -> str:
        """First 16 hex digits of the SHA-256 of the language version and the text."""
        return hashlib.sha256(f"fedplan {LANGUAGE}\n{self.text}".encode()).hexdigest()[:16]

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Assign(Plan):
    """The plan that assigns `role` to the params of `part`, in every turn."""

    role: Role
    part: Part

    @property
    def text(self) -> str:
        return f"{self.role.value}({'' if self.part == everything else self.part.text})"

    def active_steps(self, turn: Turn) -> tuple[Step, ...]:
        return (self,)


@dataclass(frozen=True)
class Best(Plan):
    """The plan that trains `part` in the `count` blocks with the highest scores of the turn.

    A param of `part` in these blocks becomes SHARE if its role was global (SHARE or FREEZE), KEEP
    if its role was personal (KEEP or HOLD). All other params keep their role.
    """

    count: int
    part: Part

    @property
    def text(self) -> str:
        return f"best({self.count}{'' if self.part == body else ', ' + self.part.text})"

    def active_steps(self, turn: Turn) -> tuple[Step, ...]:
        return (self,)


Step = Assign | Best
"""An elementary plan, without conditions."""


@dataclass(frozen=True)
class Chain(Plan):
    """All of `steps` in sequence; a later plan takes precedence over an earlier one."""

    steps: tuple[Plan, ...]

    @property
    def text(self) -> str:
        return f"chain({', '.join(step.text for step in self.steps)})"

    def active_steps(self, turn: Turn) -> tuple[Step, ...]:
        return tuple(active for step in self.steps for active in step.active_steps(turn))

    def walk(self) -> Iterator[Plan]:
        yield self
        for step in self.steps:
            yield from step.walk()


@dataclass(frozen=True)
class When(Plan):
    """`then` in turns where the condition holds, `otherwise` in all other turns."""

    condition: Condition
    then: Plan
    otherwise: Plan

    @property
    def text(self) -> str:
        tail = "" if self.otherwise == chain() else f", {self.otherwise.text}"
        return f"when({self.condition.text}, {self.then.text}{tail})"

    def active_steps(self, turn: Turn) -> tuple[Step, ...]:
        return (self.then if self.condition.holds(turn) else self.otherwise).active_steps(turn)

    def walk(self) -> Iterator[Plan]:
        yield self
        yield from self.then.walk()
        yield from self.otherwise.walk()


@dataclass(frozen=True)
class Cycle(Plan):
    """`plans` in rotation: the first in round 1, the next in round 2, and so on."""

    plans: tuple[Plan, ...]

    @property
    def text(self) -> str:
        return f"cycle({', '.join(plan.text for plan in self.plans)})"

    def active_steps(self, turn: Turn) -> tuple[Step, ...]:
        return self.plans[(turn.round - 1) % len(self.plans)].active_steps(turn)

    def walk(self) -> Iterator[Plan]:
        yield self
        for plan in self.plans:
            yield from plan.walk()


@dataclass(frozen=True)
class By(Plan):
    """A plan by the value of a client's `trait`.

    `cases`: pairs (value, plan), sorted. `otherwise`: for clients with another or no value.
    """

    trait: str
    cases: tuple[tuple[str, Plan], ...]
    otherwise: Plan

    @property
    def text(self) -> str:
        cases = ", ".join(f"{quote_string(value)}: {plan.text}" for value, plan in self.cases)
        tail = "" if self.otherwise == chain() else f", {self.otherwise.text}"
        return f"by({quote_string(self.trait)}, {{{cases}}}{tail})"

    def active_steps(self, turn: Turn) -> tuple[Step, ...]:
        plan = dict(self.cases).get(turn.traits.get(self.trait, ""), self.otherwise)
        return plan.active_steps(turn)

    def walk(self) -> Iterator[Plan]:
        yield self
        for _, plan in self.cases:
            yield from plan.walk()
        yield from self.otherwise.walk()


def share(part: Part = everything) -> Plan:
    """Assign SHARE: clients train the part, the server averages it."""
    return Assign(Role.SHARE, require_part(part, "share"))


def keep(part: Part = everything) -> Plan:
    """Assign KEEP: each client trains its personal values, which never leave it."""
    return Assign(Role.KEEP, require_part(part, "keep"))


def freeze(part: Part = everything) -> Plan:
    """Assign FREEZE: the part has the global values and is not trained."""
    return Assign(Role.FREEZE, require_part(part, "freeze"))


def hold(part: Part = everything) -> Plan:
    """Assign HOLD: the part has the client's personal values and is not trained."""
    return Assign(Role.HOLD, require_part(part, "hold"))


def best(count: int, part: Part = body) -> Plan:
    """Return a plan that trains a part in the `count` blocks with the highest scores of the turn.

    Raises PlanError if `count` is no positive integer or `part` is no part.
    """
    return Best(require_int(count, "best", least=1), require_part(part, "best"))


def chain(*plans: Plan) -> Plan:
    """Return the plans in sequence as one plan; later ones take precedence.

    `chain()` changes nothing. Nested chains are flattened, and a chain of one plan is that plan.
    Raises PlanError for anything that is no plan.

    >>> chain(share(), chain(), chain(freeze(), share())).text
    'chain(share(), freeze(), share())'
    """
    steps = list[Plan]()
    for plan in plans:
        steps += plan.steps if isinstance(plan, Chain) else (require_plan(plan, "chain"),)
    return steps[0] if len(steps) == 1 else Chain(tuple(steps))


def when(condition: Condition, plan: Plan, otherwise: Plan | None = None) -> Plan:
    """Return `plan` for turns where a condition holds, and `otherwise` (or nothing) for others."""
    other = chain() if otherwise is None else require_plan(otherwise, "when")
    return When(require_condition(condition, "when"), require_plan(plan, "when"), other)


def cycle(*plans: Plan) -> Plan:
    """Return a plan that rotates: the first of `plans` in round 1, the next in round 2, and so on.

    Raises PlanError without plans, or for anything that is no plan.
    """
    if not plans:
        raise PlanError("cycle takes one or more plans")
    return Cycle(tuple(require_plan(plan, "cycle") for plan in plans))


def by(trait: str, cases: Mapping[str, Plan], otherwise: Plan | None = None) -> Plan:
    """Return a plan by a client's trait: `by("capacity", {"small": best(2)}, otherwise=best(6))`.

    `cases`: plan by value of the trait. `otherwise`: for all other clients; None changes nothing.
    Raises PlanError if `cases` is empty or no mapping, or if an argument has a wrong type.
    """
    if not isinstance(cases, Mapping) or not cases:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise PlanError(f'by takes cases such as {{"small": best(2)}}, not {cases!r}')
    pairs = sorted(
        (require_string(value, "by"), require_plan(plan, "by")) for value, plan in cases.items()
    )
    other = chain() if otherwise is None else require_plan(otherwise, "by")
    return By(require_string(trait, "by"), tuple(pairs), other)


def require_plan(value: Any, name: str) -> Plan:
    """Return `value` if it is a plan; otherwise raise PlanError, naming the function `name`."""
    if not isinstance(value, Plan):
        raise PlanError(f"{name} takes a plan such as share(head), not {value!r}")
    return value
