# SPDX-License-Identifier: Apache-2.0
"""Phases: what the server announces to all clients, such as that the kernel is frozen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from fedplan.errors import FedplanError
from fedplan.language.wording import phrase


@dataclass(frozen=True)
class Sign:
    """What a rule may look at before a round: the phase that holds, and how the last round went.

    `drift` is that of the last round, by kind of param: how far the clients' changes lay apart, and
    the square of their mean step.
    """

    round: int
    phase: str = ""
    drift: Mapping[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])


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
