# SPDX-License-Identifier: Apache-2.0
"""Guarantee: the differential privacy settings of a run, and the privacy loss of its rounds."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from fedplan.language.canonical import format_call
from fedplan.privacy.accounting.accountant import (
    DPSGDSteps,
    Event,
    Release,
    calibrate,
    combined_noise,
    epsilon,
)
from fedplan.privacy.accounting.budget import Unit
from fedplan.privacy.mechanisms.vote import is_voting_round

COUNT_NOISE = 10.0
"""Noise multiplier of the count of unclipped clients, by which an adaptive clipping norm moves."""


@dataclass(frozen=True)
class Guarantee:
    """Differential privacy settings of a run, public and agreed by server and clients.

    unit: "client" (client-level DP: each client's change is clipped, and noise is added to the sum)
    or "example" (example-level DP: DP-SGD at each client).
    epsilon, delta: the privacy budget of the whole run, for each unit (client or example).
    clipping_norm: the first round's norm if `clipping_quantile` is set, else of all rounds.
    noise_multiplier: stddev of the noise divided by the clipping norm of the round.
    sampling_rate: Poisson sampling rate, of clients per round or of examples per step; None: no
    sampling, all take part.
    steps, batch_size: DP-SGD steps per turn, and the expected batch size. Unit "example" only.
    vote_noise_multiplier: noise multiplier of the votes on blocks, which are held in round 1 and
    every `vote_every` rounds after it; 0: no votes.
    clipping_quantile: quantile of client norms that the clipping norm follows; 0: a fixed norm.
    max_weight: clients are weighted by min(examples, max_weight); 0: all have the same weight.
    ghost_clipping: DP-SGD runs several examples at a time, which assumes that the server does not
    choose values to amplify rounding.
    evaluation_noise_multiplier: noise multiplier of the score counts of a client, which it sends
    after every `evaluate_every` rounds, and after the last; 0: no score counts. Unit "example".
    """

    # The field names are part of `text`, which both ends compare, and of the statement's JSON.
    unit: Unit
    epsilon: float
    delta: float
    clipping_norm: float
    noise_multiplier: float
    sampling_rate: float | None = None
    steps: int = 0
    batch_size: int = 0
    vote_noise_multiplier: float = 0.0
    vote_every: int = 10
    clipping_quantile: float = 0.0
    max_weight: int = 0
    ghost_clipping: bool = False
    evaluation_noise_multiplier: float = 0.0
    evaluate_every: int = 1

    def is_voting_round(self, round: int) -> bool:
        """Whether clients vote on blocks in this round: votes are on, and the period is due."""
        return self.vote_noise_multiplier > 0 and is_voting_round(round, self.vote_every)

    def round_events(self, round: int, name: str) -> dict[str, Event]:
        """Privacy events of one round for a client or example that takes part, by release name.

        The key `name` is the main release (one noisy sum, or the DP-SGD steps of one turn); that of
        a vote, `vote_name(name)`, comes first.
        """
        # Examples are sampled anew for each step and for the vote. Clients are sampled once a
        # round, for both the vote and the sum: charged separately, the sum may claim its sampling
        # rate and the vote none. Let v and s be the likelihood ratios of the two, with a client to
        # without it, and q the rate. The ratio of both is 1 - q + qvs; what is charged is that of
        # v(1 - q + qs). Both are linear in v with the same mean, and the latter is steeper: so it
        # is the larger for every convex divergence of the two neighbouring distributions.
        noise, rate = self.noise_multiplier, self.sampling_rate
        if self.unit == "example":
            main, vote_rate = DPSGDSteps(noise, rate or 1.0, self.steps), rate
        else:
            # With adaptive clipping, the sum and the count of unclipped clients are one release.
            noise = combined_noise(noise, COUNT_NOISE) if self.clipping_quantile else noise
            main, vote_rate = Release(noise, rate), None
        if not self.vote_noise_multiplier:
            return {name: main}
        vote = Release(self.vote_noise_multiplier, vote_rate)
        return {vote_name(name): vote, name: main} if self.is_voting_round(round) else {name: main}

    def evaluation_events(self, name: str) -> dict[str, Event]:
        """Privacy event of the score counts after the turn `name`, by release name; {} without."""
        # An example is trained on or tested on, and charged for both: the account knows no split.
        noise = self.evaluation_noise_multiplier
        return {evaluation_name(name): Release(noise)} if noise else {}

    def forecast_epsilon(self, rounds: int) -> float:
        """Epsilon after `rounds` rounds, and score counts, for a unit that takes part in all."""
        return epsilon(self._events(rounds), self.delta)

    def with_calibrated_noise(self, rounds: int) -> Guarantee:
        """Copy with the smallest noise multiplier that keeps `rounds` rounds within epsilon."""

        def events(noise: float) -> list[Event]:
            return replace(self, noise_multiplier=noise)._events(rounds)

        return replace(self, noise_multiplier=calibrate(self.epsilon, self.delta, events))

    def _events(self, rounds: int) -> list[Event]:
        numbers = range(1, rounds + 1)
        due = [n for n in numbers if n % self.evaluate_every == 0 or n == rounds]
        return [
            *(event for number in numbers for event in self.round_events(number, "").values()),
            *(event for _ in due for event in self.evaluation_events("").values()),
        ]

    @property
    def text(self) -> str:
        """All fields in one line, without those of score counts if there are none."""
        settings = asdict(self)
        if not self.evaluation_noise_multiplier:
            del settings["evaluation_noise_multiplier"], settings["evaluate_every"]
        return format_call("guarantee", **settings)


def vote_name(name: str) -> str:
    """Name under which the vote before the release `name` is charged."""
    return f"{name}: vote"


def evaluation_name(name: str) -> str:
    """Name under which the score counts after the turn `name` are charged."""
    return f"{name}: evaluation"
