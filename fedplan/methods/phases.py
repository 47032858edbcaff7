# SPDX-License-Identifier: Apache-2.0
"""Phase rules: how the server names the phase of each round, such as \"frozen\"."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import fsum
from typing import Protocol

from fedplan.errors import FedplanError
from fedplan.language.canonical import format_call, format_dataclass


@dataclass(frozen=True)
class PhaseContext:
    """The input of a phase rule before round `round`.

    `phase`: the phase of the last round, or empty. `drift`: by kind of param, for the last round, a
    pair (mean squared distance of the clients' changes from the mean change, squared norm of the
    mean change). `sizes`: by kind, the squared norm of the global values. The server computes these
    numbers from aggregated sums.
    """

    round: int
    phase: str = ""
    drift: Mapping[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])
    sizes: Mapping[str, float] = field(default_factory=dict[str, float])


class PhaseRule(Protocol):
    """Callable by which the server names the phase of each round: `rule(context)` returns a name.

    The server calls the rule before each round; `context.phase` is the phase of the last round.
    """

    @property
    def phases(self) -> tuple[str, ...]:
        """All phases that the rule may name, in order; a phase never returns after a later one."""
        ...

    def __call__(self, context: PhaseContext) -> str:
        """The phase of round `context.round`."""
        ...


@dataclass(frozen=True)
class PlannedPhases:
    """PhaseRule: phases that begin after fixed numbers of rounds, given by phase name in `after`.

    Before the first one the phase is "". Raises FedplanError for a negative number, and for two
    phases that begin in the same round.

    >>> PlannedPhases({"frozen": 20})(PhaseContext(round=21))
    'frozen'
    """

    after: Mapping[str, int] = field(default_factory=dict[str, int])

    def __post_init__(self) -> None:
        if early := [name for name, number in self.after.items() if number < 0]:
            raise FedplanError(
                f"phase {early[0]!r} begins after {self.after[early[0]]} rounds: give 0 or more"
            )
        if len(set(self.after.values())) < len(self.after):
            raise FedplanError(f"two phases cannot begin in the same round: {dict(self.after)}")

    @property
    def phases(self) -> tuple[str, ...]:
        """The phases in the order in which they begin."""
        return tuple(sorted(self.after, key=lambda name: self.after[name]))

    @property
    def text(self) -> str:
        return format_call("planned", self.after)

    def __call__(self, context: PhaseContext) -> str:
        """The last phase that has begun, or the empty string."""
        begun = [name for name in self.phases if self.after[name] < context.round]
        return begun[-1] if begun else ""


_SETTLING_RULES: Mapping[str, Callable[[float, float, float], float]] = {
    "bend": lambda drift, step, size: step * size / drift**2,
    "chance": lambda drift, step, size: step / drift,
}
"""By rule: the statistic compared with `SettledPhase.threshold`, from drift, step and size."""


@dataclass(frozen=True)
class SettledPhase:
    """PhaseRule: a phase that begins once the mean change of some kinds is small against the drift.

    Let `drift` and `step` be the sums over `kinds` of both numbers of PhaseContext.drift, and
    `size` the sum of PhaseContext.sizes. By "bend" the phase begins when `step * size <=
    threshold * drift ** 2`: diverging clients push their mean by an amount of second order. By
    "chance" the phase begins when `step <= threshold * drift`: even unrelated changes have a mean,
    of squared norm `drift / (M - 1)` for M clients of equal weight.

    `by` names the rule. The phase named `phase` begins after at least `min_rounds` rounds and then
    stays. A round in which no client sent these kinds, or in which all changes were equal, never
    starts the phase. Use neither rule with one local step per round: the differences between
    clients then do not push the mean. Raises FedplanError for empty `kinds`, `threshold` not above
    0, negative `min_rounds`, or an unknown rule.

    >>> rule = SettledPhase("frozen", min_rounds=2)
    >>> rule(PhaseContext(3, drift={"query": (0.5, 1e-4)}, sizes={"query": 10.0}))
    'frozen'
    """

    phase: str
    kinds: tuple[str, ...] = ("query", "key")
    threshold: float = 0.02
    min_rounds: int = 10
    by: str = "bend"

    def __post_init__(self) -> None:
        if not self.kinds:
            raise FedplanError(f"phase {self.phase!r} has no kinds: give some, as ('query',)")
        if not self.threshold > 0:
            raise FedplanError(
                f"phase {self.phase!r} has a threshold of {self.threshold:g}: give a number above 0"
            )
        if self.min_rounds < 0:
            raise FedplanError(
                f"phase {self.phase!r} begins after {self.min_rounds} rounds: give 0 or more"
            )
        if self.by not in _SETTLING_RULES:
            raise FedplanError(
                f"phase {self.phase!r} has the rule {self.by!r}: use {' or '.join(_SETTLING_RULES)}"
            )

    @property
    def phases(self) -> tuple[str, ...]:
        return (self.phase,)

    @property
    def text(self) -> str:
        return format_dataclass("settled", self)

    def __call__(self, context: PhaseContext) -> str:
        """Return the phase if it has begun or begins now, else the empty string."""
        if context.phase == self.phase:
            return self.phase
        kinds = [kind for kind in self.kinds if kind in context.drift]
        drift, step = (fsum(context.drift[kind][index] for kind in kinds) for index in (0, 1))
        if context.round <= self.min_rounds or not drift > 0:
            return ""
        size = fsum(context.sizes[kind] for kind in kinds)
        return self.phase if _SETTLING_RULES[self.by](drift, step, size) <= self.threshold else ""
