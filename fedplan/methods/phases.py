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

    `phase`: the current phase, or empty. `drift`: by kind of param, of the last round, the mean
    squared distance of the clients' changes from their mean, and the squared norm of that mean.
    `sizes`: by kind, the squared norm of the global values. All are computed from aggregated sums.
    """

    round: int
    phase: str = ""
    drift: Mapping[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])
    sizes: Mapping[str, float] = field(default_factory=dict[str, float])


class PhaseRule(Protocol):
    """A rule that names the phase of each round; the server stores the phase in its state."""

    @property
    def phases(self) -> tuple[str, ...]:
        """All phases that the rule may name, in order; a phase never returns after a later one."""
        ...

    def __call__(self, context: PhaseContext) -> str:
        """The phase of round `context.round`."""
        ...


@dataclass(frozen=True)
class PlannedPhases:
    """Phases that begin after fixed numbers of rounds, given by phase name in `after`.

    Raises FedplanError for a negative number, and for two phases that begin in the same round.

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
        """Canonical text."""
        return format_call("planned", self.after)

    def __call__(self, context: PhaseContext) -> str:
        """The last phase that has begun, or the empty string."""
        begun = [name for name in self.phases if self.after[name] < context.round]
        return begun[-1] if begun else ""


_SETTLING_RULES: Mapping[str, Callable[[float, float, float], float]] = {
    "bend": lambda drift, step, size: step * size / drift**2,
    "chance": lambda drift, step, size: step / drift,
}
"""By rule: the statistic compared with `SettledPhase.share`, from drift, step and size."""


@dataclass(frozen=True)
class SettledPhase:
    """A phase that begins once some kinds of params move no more than client drift explains.

    Let `drift`, `step` and `size` be the sums, over `kinds`, of the drift, the squared mean step
    and the squared norm of the last round. By "bend" the phase begins when
    `step * size <= share * drift ** 2`: diverging clients push their mean by an amount of second
    order. By "chance" it begins when `step <= share * drift`: even unrelated changes have a mean,
    of squared norm `drift / (M - 1)` for M clients of equal weight.

    The phase begins after at least `least` rounds and then stays. A round in which no client sent
    these kinds, or in which all changes were equal, never starts it; with one local step there is
    no drift, so use neither rule. Raises FedplanError for settings out of range.

    >>> rule = SettledPhase("frozen", least=2)
    >>> rule(PhaseContext(3, drift={"query": (0.5, 1e-4)}, sizes={"query": 10.0}))
    'frozen'
    """

    phase: str
    kinds: tuple[str, ...] = ("query", "key")
    share: float = 0.02
    least: int = 10
    by: str = "bend"

    def __post_init__(self) -> None:
        if not self.kinds:
            raise FedplanError(f"phase {self.phase!r} has no kinds: give some, as ('query',)")
        if not self.share > 0:
            raise FedplanError(
                f"phase {self.phase!r} has a share of {self.share:g}: give a number above 0"
            )
        if self.least < 0:
            raise FedplanError(
                f"phase {self.phase!r} begins after {self.least} rounds: give 0 or more"
            )
        if self.by not in _SETTLING_RULES:
            raise FedplanError(
                f"phase {self.phase!r} has the rule {self.by!r}: use {' or '.join(_SETTLING_RULES)}"
            )

    @property
    def phases(self) -> tuple[str, ...]:
        """The single phase."""
        return (self.phase,)

    @property
    def text(self) -> str:
        """Canonical text."""
        return format_dataclass("settled", self)

    def __call__(self, context: PhaseContext) -> str:
        """The phase if it has begun or begins now, or the empty string."""
        begun = context.phase == self.phase or (
            context.round > self.least and self._has_settled(context)
        )
        return self.phase if begun else ""

    def _has_settled(self, context: PhaseContext) -> bool:
        """Whether the last round fulfils the rule; False if it had no drift in these kinds."""
        kinds = [kind for kind in self.kinds if kind in context.drift]
        drift, step = (fsum(context.drift[kind][index] for kind in kinds) for index in (0, 1))
        if not drift > 0:  # no client sent these kinds, or all changes were equal
            return False
        size = fsum(context.sizes[kind] for kind in kinds)
        return _SETTLING_RULES[self.by](drift, step, size) <= self.share
