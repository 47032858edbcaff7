# SPDX-License-Identifier: Apache-2.0
"""Rules that say when to freeze the kernel, from sums that a server has anyway.

In the formulas s is the squared length of the kernel's mean change in a round (`Drift.step`), a the
mean squared distance of clients' changes from it (`apart`), z the squared length of the kernel
itself (`size`), K the number of local steps and M that of clients. All hold from round 10 on, since
a value that starts at zero gives the kernel nothing to learn from in the first rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from research.kernel.rounds import Drift, Pace

LEAST = 10
"""No rule freezes before so many rounds."""


class Rule(Protocol):
    """A rule: its name, its formula, and whether it freezes after the rounds that it is shown."""

    @property
    def name(self) -> str: ...

    @property
    def formula(self) -> str: ...

    def holds(self, past: Sequence[Drift], pace: Pace) -> bool: ...


@dataclass(frozen=True)
class Bend:
    """Freeze when the mean step is no longer than what drift alone would make it.

    Clients that go apart by a push the mean where the loss bends, and a bend is of second order: the
    push is as long as a over the length of the kernel. One step bends nothing, so K = 1 says never.
    """

    share: float

    name = "bend"

    @property
    def formula(self) -> str:
        return f"s z <= {self.share:g} (1 - 1/K) a^2"

    def holds(self, past: Sequence[Drift], pace: Pace) -> bool:
        last = past[-1]
        return last.step * last.size <= self.share * (1 - 1 / pace.steps) * last.apart**2


@dataclass(frozen=True)
class Balance:
    """Freeze when the mean step is a small share of what clients disagree by.

    Where clients agree, what they differ by fades as they learn; so it must still be half of the
    most that it ever was. One step drifts nowhere, so K = 1 says never.
    """

    share: float

    name = "balance"

    @property
    def formula(self) -> str:
        return f"s <= {self.share:g} (1 - 1/K)^2 a, and a >= max(a so far) / 2"

    def holds(self, past: Sequence[Drift], pace: Pace) -> bool:
        last, most = past[-1], max(each.apart for each in past)
        small = last.step <= self.share * (1 - 1 / pace.steps) ** 2 * last.apart
        return small and last.apart >= most / 2


@dataclass(frozen=True)
class Chance:
    """Freeze when the mean step is as short as that of clients without anything in common.

    Independent changes have a mean whose square is a / (M - 1). It has no constant to choose.
    """

    clients: int

    name = "chance"

    @property
    def formula(self) -> str:
        return "s <= a / (M - 1)"

    def holds(self, past: Sequence[Drift], pace: Pace) -> bool:
        return past[-1].step <= past[-1].apart / (self.clients - 1)


@dataclass(frozen=True)
class Late:
    """A control that looks at nothing: freeze for the last tenth of the rounds."""

    name = "late"
    formula = "round >= 0.9 T"

    def holds(self, past: Sequence[Drift], pace: Pace) -> bool:
        return len(past) >= 0.9 * pace.rounds


@dataclass(frozen=True)
class Never:
    """A control: FedAvg."""

    name = "never"
    formula = "none"

    def holds(self, past: Sequence[Drift], pace: Pace) -> bool:
        return False


def warm_up(rule: Rule, kernel: Sequence[Drift], pace: Pace) -> int:
    """After how many rounds a rule freezes; all of them if it never does."""
    for done in range(LEAST, pace.rounds):
        if rule.holds(kernel[:done], pace):
            return done
    return pace.rounds
