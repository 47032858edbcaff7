# SPDX-License-Identifier: Apache-2.0
"""Guarantees: whose presence a run hides, by how much noise, and what that will cost."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fedplan.language.wording import spelled_out
from fedplan.privacy.accounting.accountant import calibrate, epsilon
from fedplan.privacy.accounting.budget import Unit
from fedplan.privacy.accounting.events import Event, Release, Steps, together
from fedplan.privacy.mechanisms.vote import asked

COUNT_NOISE = 10.0
"""The noise of the count that a moving clip follows, as a multiple of one client's part in it."""


@dataclass(frozen=True)
class Guarantee:
    """What a run promises. All of it is public, and both ends agree on it.

    The unit is a client, whose whole change is clipped and hidden by the server's noise; or an
    example, hidden by the noise that its own site adds to every step. `noise` is a multiple of
    `clip`. `rate` is the chance of a client to be in a round, None if nobody draws; or that of an
    example to be in a step, of which a turn takes `steps`, each divided by `batch`.

    With `vote` as the noise of its counts, the units vote on the blocks that `best` chooses, every
    `period` rounds. Of clients, `clip` is where the bound starts if it follows a `quantile` of
    their lengths, and `cap` the number of rows from which on all weigh alike; 0 is neither.
    """

    unit: Unit
    epsilon: float
    delta: float
    clip: float
    noise: float
    rate: float | None = None
    steps: int = 0
    batch: int = 0
    vote: float = 0.0
    period: int = 10
    quantile: float = 0.0
    cap: int = 0

    def votes(self, round: int) -> bool:
        """Whether the units vote in a round."""
        return self.vote > 0 and asked(round, self.period)

    def bill(self, round: int, about: str) -> dict[str, Event]:
        """What a round costs at most, by the name of each release, for the unit that pays most.

        An example is in one site, which is in every round; it is drawn anew for each step and for
        the vote. Clients are drawn once a round, for both the vote and the sum. Charged apart, the
        sum may claim its rate and the vote none: let v and s be the ratios of chances of the two,
        with a client to without it, and q the rate. That of both is 1 - q + qvs; what is charged is
        that of v(1 - q + qs). Both are linear in v with the same mean, and the latter is steeper:
        so it is the larger for every convex measure of the distance of two worlds.
        """
        main = Release(self._noise, self.rate)
        if self.unit == "example":
            main = Steps(self.noise, self.rate or 1.0, self.steps)
        vote = Release(self.vote, self.rate if self.unit == "example" else None) if self.vote else 0
        return {**({voted(about): vote} if vote and self.votes(round) else {}), about: main}

    @property
    def _noise(self) -> float:
        return together(self.noise, COUNT_NOISE) if self.quantile else self.noise

    def forecast(self, rounds: int) -> float:
        """The epsilon of so many rounds."""
        return epsilon(self._events(rounds), self.delta)

    def calibrated(self, rounds: int) -> Guarantee:
        """The same with the least noise that keeps to epsilon over so many rounds."""

        def events(noise: float) -> list[Event]:
            return replace(self, noise=noise)._events(rounds)

        return replace(self, noise=calibrate(self.epsilon, self.delta, events))

    def _events(self, rounds: int) -> list[Event]:
        return [e for number in range(1, rounds + 1) for e in self.bill(number, "").values()]

    @property
    def text(self) -> str:
        """It in one line, for both ends to compare."""
        return spelled_out("guarantee", self)


def voted(about: str) -> str:
    """The name of the vote that comes before a release."""
    return f"{about}: vote"
