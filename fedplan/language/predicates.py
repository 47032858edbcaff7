# SPDX-License-Identifier: Apache-2.0
"""Predicates combined with `& | ~`, and the conditions on a turn that plans use."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from fedplan.errors import PlanError
from fedplan.models.params import Block

S = TypeVar("S")

PRECEDENCE = {"|": 0, "&": 1, "~": 2}
"""Precedence of the operators; a predicate without one has the precedence of `~`."""


class Predicate(ABC, Generic[S]):
    """A yes-or-no property of a subject, either of params (a part) or of turns (a condition).

    Predicates are immutable, and combine with `&`, `|` and `~`; `and`, `or` and `not` raise
    PlanError. Main members: `holds(subject)`, `is_uncertain(subject)`, and `text` in the plan
    language. Equal texts mean equal predicates.
    """

    @property
    @abstractmethod
    def subject_type(self) -> str:
        """\"part\" for predicates on params, \"condition\" for predicates on turns."""

    @abstractmethod
    def holds(self, subject: S) -> bool:
        """Whether the predicate is true of the subject."""

    @property
    @abstractmethod
    def text(self) -> str:
        """The predicate in the plan language."""

    def is_uncertain(self, subject: S) -> bool:
        """Whether it is unknown if the predicate is true of the subject."""
        return False

    def __and__(self, other: Predicate[S]) -> Predicate[S]:
        return _join_pair("&", self, other)

    def __or__(self, other: Predicate[S]) -> Predicate[S]:
        return _join_pair("|", self, other)

    def __invert__(self) -> Predicate[S]:
        return self.operand if isinstance(self, Negation) else Negation(self)

    def atoms(self) -> Iterator[Predicate[S]]:
        """Yield the elementary predicates that it is built from."""
        yield self

    def alternatives(self) -> tuple[Predicate[S], ...]:
        """The operands of a union; for any other predicate, itself."""
        return (self,)

    @property
    def precedence(self) -> int:
        """Precedence of the outermost operator of its text."""
        return PRECEDENCE["~"]

    def __str__(self) -> str:
        return self.text

    def __bool__(self) -> bool:
        raise PlanError(
            f"write `|`, `&` and `~` for or, and, not: {self.text} is not true or false"
        )

    def text_as_operand(self, precedence: int) -> str:
        """Its text as an operand of an operator of this precedence, in parentheses if needed."""
        return self.text if self.precedence >= precedence else f"({self.text})"


@dataclass(frozen=True)
class Junction(Predicate[S]):
    """Predicates (`operands`) joined by the `operator` "&" (all must hold) or "|" (any must hold).

    The constructor raises PlanError if operands mix parts and conditions.
    """

    operator: str
    operands: tuple[Predicate[S], ...]

    def __post_init__(self) -> None:
        for each in self.operands:
            require_same_subject(self.operands[0], each)

    @property
    def subject_type(self) -> str:
        return self.operands[0].subject_type

    @property
    def precedence(self) -> int:
        return PRECEDENCE[self.operator]

    @property
    def text(self) -> str:
        return f" {self.operator} ".join(
            each.text_as_operand(self.precedence) for each in self.operands
        )

    def holds(self, subject: S) -> bool:
        results = (each.holds(subject) for each in self.operands)
        return all(results) if self.operator == "&" else any(results)

    def is_uncertain(self, subject: S) -> bool:
        """Some operand is uncertain, and no certain one decides (a false of `&`, a true of `|`)."""
        certain = [each for each in self.operands if not each.is_uncertain(subject)]
        results = (each.holds(subject) for each in certain)
        undecided = all(results) if self.operator == "&" else not any(results)
        return len(certain) < len(self.operands) and undecided

    def atoms(self) -> Iterator[Predicate[S]]:
        return (atom for each in self.operands for atom in each.atoms())

    def alternatives(self) -> tuple[Predicate[S], ...]:
        return self.operands if self.operator == "|" else (self,)


@dataclass(frozen=True)
class Negation(Predicate[S]):
    """The negation of the predicate `operand`; uncertain where the operand is uncertain."""

    operand: Predicate[S]

    @property
    def subject_type(self) -> str:
        return self.operand.subject_type

    @property
    def text(self) -> str:
        return f"~{self.operand.text_as_operand(PRECEDENCE['~'])}"

    def holds(self, subject: S) -> bool:
        return not self.operand.holds(subject)

    def is_uncertain(self, subject: S) -> bool:
        return self.operand.is_uncertain(subject)

    def atoms(self) -> Iterator[Predicate[S]]:
        return self.operand.atoms()


def _join_pair(operator: str, left: Predicate[S], right: Any) -> Junction[S]:
    if not isinstance(right, Predicate):
        raise PlanError(f"{left.text} can be joined with a {left.subject_type}, not with {right!r}")
    return join_predicates(operator, (left, right))  # pyright: ignore[reportUnknownArgumentType]


def join_predicates(operator: str, predicates: Iterable[Predicate[S]]) -> Junction[S]:
    """Return all predicates joined by the operator "&" or "|" as one Junction.

    Nested joins by the same operator are flattened: `a | (b | c)` is `a | b | c`. Raises PlanError
    if parts and conditions are mixed.
    """
    # Joining one by one would copy and check the first operands again for each of the others.
    operands: list[Predicate[S]] = []
    for each in predicates:
        if isinstance(each, Junction) and each.operator == operator:
            operands += each.operands
        else:
            operands.append(each)
    return Junction(operator, tuple(operands))


def require_predicate(value: Any) -> Predicate[Any]:
    """Return `value` if it is a part or a condition; otherwise raise PlanError."""
    if not isinstance(value, Predicate):
        raise PlanError(f"only parts and conditions can be joined with | & ~, not {value!s}")
    return value  # pyright: ignore[reportUnknownVariableType]


def require_same_subject(first: Any, other: Any) -> None:
    """Raise PlanError if `first` and `other` are not both parts or both conditions."""
    if require_predicate(other).subject_type != require_predicate(first).subject_type:
        raise PlanError(
            f"{first.text} is a {first.subject_type} and {other.text} is a {other.subject_type}: "
            "they cannot be joined"
        )


def require_int(value: Any, name: str, *, least: int) -> int:
    """Return `value` if it is an int from `least` to 999999999; otherwise raise PlanError.

    A bool is refused. `name`: function of the plan language, for the message.
    """
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 10**9:
        raise PlanError(f"{name} takes a whole number from {least} to 999999999, not {value!r}")
    return value


def require_string(value: Any, name: str) -> str:
    """Return `value` if it is a non-empty printable string; otherwise raise PlanError.

    `name`: function of the plan language, for the message.
    """
    if not isinstance(value, str) or not value:
        raise PlanError(f"{name} takes text in quotes, not {value!r}")
    if not value.isprintable():
        raise PlanError(f"{name} takes text of printable characters, not {value!r}")
    return value


def quote_string(value: str) -> str:
    """Return a string as a literal of the plan language."""
    return json.dumps(value, ensure_ascii=False)


def format_values(values: tuple[int | str, ...]) -> str:
    """Return numbers and strings as literals of the plan language, separated by commas."""
    return ", ".join(quote_string(v) if isinstance(v, str) else str(v) for v in values)


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
