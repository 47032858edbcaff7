# SPDX-License-Identifier: Apache-2.0
"""Phases: what the server announces to all clients, such as that the kernel is frozen."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import fsum
from typing import Protocol

from fedplan.errors import FedplanError
from fedplan.language.wording import phrase, spelled_out


@dataclass(frozen=True)
class Sign:
    """What a rule may look at before a round: the phase that holds, and how the last round went.

    `drift` is that of the last round, by kind of param: how far the clients' changes lay apart, and
    the square of their mean step. `sizes` is the squared length of the federation's values, by
    kind. Both follow from sums over clients that were committed.
    """

    round: int
    phase: str = ""
    drift: Mapping[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])
    sizes: Mapping[str, float] = field(default_factory=dict[str, float])


class Announce(Protocol):
    """A rule that names the phase of each round. What it names is kept with the world."""

    @property
    def phases(self) -> tuple[str, ...]:
        """All that it may ever name, in their order: none comes back after a later one."""
        ...

    def __call__(self, sign: Sign) -> str:
        """The phase of the round to come."""
        ...


@dataclass(frozen=True)
class Planned:
    """Phases that begin once so many rounds are done, whatever happens.

    >>> Planned({"frozen": 20})(Sign(round=21))
    'frozen'
    """

    after: Mapping[str, int] = field(default_factory=dict[str, int])

    def __post_init__(self) -> None:
        if early := [name for name, number in self.after.items() if number < 0]:
            raise FedplanError(
                f"phase {early[0]!r} is to begin after {self.after[early[0]]} rounds: 0 is at once"
            )
        if len(set(self.after.values())) < len(self.after):
            raise FedplanError(f"two phases cannot begin in the same round: {dict(self.after)}")

    @property
    def phases(self) -> tuple[str, ...]:
        """The phases from the first to the last."""
        return tuple(sorted(self.after, key=lambda name: self.after[name]))

    @property
    def text(self) -> str:
        """It in one line, for both ends to compare."""
        return phrase("planned", self.after)

    def __call__(self, sign: Sign) -> str:
        """The last phase that has begun."""
        begun = [name for name in self.phases if self.after[name] < sign.round]
        return begun[-1] if begun else ""


_SETTLED: Mapping[str, Callable[[float, float, float], float]] = {
    "bend": lambda apart, step, size: step * size / apart**2,
    "chance": lambda apart, step, size: step / apart,
}
"""How far a mean goes beside what its drift does, from `apart`, `step` and `size`."""


@dataclass(frozen=True)
class Settled:
    """A phase that begins once some kinds of params move no further than their drift moves them.

    By `bend`: clients that go apart push their mean where the loss bends, and a bend is of second
    order. So the phase begins when `step * size <= share * apart ** 2`, summed over the kinds, in
    the last round. By `chance`: changes with nothing in common have a mean too, and M of equal
    weight have one of `apart / (M - 1)`. So it begins when `step <= share * apart`. Either begins
    after `least` rounds or later, and then stays. By `bend` it does not begin where clients agree;
    by `chance` it does, once what they learn is less than what their batches differ by. A round in
    which nobody sent these kinds says nothing. With one local step nothing drifts: leave both out.

    >>> rule = Settled("frozen", least=2)
    >>> rule(Sign(3, drift={"query": (0.5, 1e-4)}, sizes={"query": 10.0}))
    'frozen'
    """

    phase: str
    kinds: tuple[str, ...] = ("query", "key")
    share: float = 0.02
    least: int = 10
    by: str = "bend"

    def __post_init__(self) -> None:
        if not self.kinds:
            raise FedplanError(f"phase {self.phase!r} looks at no kind: say some, as ('query',)")
        if not self.share > 0:
            raise FedplanError(
                f"phase {self.phase!r} begins at a share of {self.share:g}: it is above 0"
            )
        if self.least < 0:
            raise FedplanError(
                f"phase {self.phase!r} is to begin after {self.least} rounds: 0 is at once"
            )
        if self.by not in _SETTLED:
            raise FedplanError(
                f"phase {self.phase!r} settles by {self.by!r}: say {' or '.join(_SETTLED)}"
            )

    @property
    def phases(self) -> tuple[str, ...]:
        """The one phase."""
        return (self.phase,)

    @property
    def text(self) -> str:
        """It in one line, for both ends to compare."""
        return spelled_out("settled", self)

    def __call__(self, sign: Sign) -> str:
        """The phase, once it has begun."""
        begun = sign.phase == self.phase or (sign.round > self.least and self._holds(sign))
        return self.phase if begun else ""

    def _holds(self, sign: Sign) -> bool:
        there = [kind for kind in self.kinds if kind in sign.drift]
        apart, step = (fsum(sign.drift[kind][place] for kind in there) for place in (0, 1))
        if not apart > 0:  # nobody sent them, or all did the same
            return False
        size = fsum(sign.sizes[kind] for kind in there)
        return _SETTLED[self.by](apart, step, size) <= self.share
