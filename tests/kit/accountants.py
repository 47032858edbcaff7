# SPDX-License-Identifier: Apache-2.0
"""Random guarantees, and their epsilon by dp-accounting and by Opacus, from the mechanisms alone.

The sums of a guarantee are written out here again, from the description of each mechanism, and not
taken from fedplan: so a wrong event shows as much as a wrong total.
"""

from __future__ import annotations

import math
import random
import warnings
from dataclasses import dataclass
from typing import Any

from dp_accounting import gaussian_mechanism
from dp_accounting.pld import privacy_loss_distribution as pld

from fedplan.privacy.guarantee import Guarantee

Sum = tuple[float, float, int]
"""A Gaussian sum: its noise multiplier, sampling rate (1: all take part), and how many times."""
COUNT_NOISE = 10.0
"""Stddev of the noise on the count of unclipped clients, to which each client adds 0 or 1."""


@dataclass(frozen=True)
class Setting:
    """A guarantee over a number of rounds."""

    guarantee: Guarantee
    rounds: int

    @property
    def sums(self) -> list[Sum]:
        """All Gaussian sums of the run over one unit, by the description of each mechanism."""
        g, rounds, rate = self.guarantee, self.rounds, self.guarantee.sampling_rate or 1.0
        noise, vote_rate, count = g.noise_multiplier, rate, rounds
        if g.unit == "example":  # each step, and each vote, samples anew
            count = g.steps * rounds
        else:  # a vote is over the sample of the round's sum: it claims no rate
            vote_rate = 1.0
            if g.clipping_quantile:  # sum and count are one vector (Andrew et al. 2021, theorem 1)
                noise = (noise**-2 + COUNT_NOISE**-2) ** -0.5
        sums = [(noise, rate, count)]
        if g.vote_noise_multiplier:
            sums.append((g.vote_noise_multiplier, vote_rate, math.ceil(rounds / g.vote_every)))
        return sums


def random_setting(dice: random.Random) -> Setting:
    """A setting of any unit, with or without sampling, votes and adaptive clipping.

    Its epsilon is below 50: above, reference grids take minutes, and nobody promises it.
    """

    def between(low: float, high: float) -> float:
        return math.exp(dice.uniform(math.log(low), math.log(high)))

    unit = dice.choice(("client", "example"))
    everybody = unit == "client" and dice.random() < 0.25
    setting = Setting(
        Guarantee(
            unit=unit,
            epsilon=1e3,
            delta=between(1e-8, 1e-3),
            clipping_norm=1.0,
            noise_multiplier=between(0.6, 8.0),
            sampling_rate=None if everybody else between(1e-3, 0.5),
            steps=round(between(1, 50)) if unit == "example" else 0,
            batch_size=16 if unit == "example" else 0,
            vote_noise_multiplier=between(4.0, 40.0) if dice.random() < 0.4 else 0.0,
            vote_every=dice.randint(1, 20),
            clipping_quantile=0.5 if unit == "client" and dice.random() < 0.4 else 0.0,
        ),
        round(between(1, 300)),
    )
    return setting if opacus_epsilon(setting, "rdp") < 50 else random_setting(dice)


def reference_epsilon(setting: Setting) -> float:
    """Epsilon by dp-accounting: exact without sampling, else by PLD on a fine grid.

    The grid is finer than the library's default and than fedplan's, so that its bound is lower.
    """
    sums, delta = setting.sums, setting.guarantee.delta
    if all(rate == 1 for _, rate, _ in sums):
        sigma = math.fsum(count / noise**2 for noise, _, count in sums) ** -0.5
        return float(gaussian_mechanism.get_epsilon_gaussian(sigma, delta))
    # The excess of a bound grows as the number of sums times the square of the interval, and with
    # the interval relative to the spread of one loss, which is about rate / noise.
    interval = min(1e-4, math.sqrt(1e-4 / sum(count for *_, count in sums)) / 4)
    interval = min(interval, *(rate / noise / 32 for noise, rate, _ in sums))
    total = pld.identity(interval)
    for noise, rate, count in sums:
        one = pld.from_gaussian_mechanism(
            noise, sampling_prob=rate, value_discretization_interval=interval
        )
        total = total.compose(one.self_compose(count) if count > 1 else one)
    return float(total.get_epsilon_for_delta(delta))


def opacus_epsilon(setting: Setting, accountant: str) -> float:
    """Epsilon by Opacus' "prv" (an upper bound, 0.01 above its estimate) or "rdp" accountant."""
    from opacus.accountants import create_accountant

    theirs: Any = create_accountant(accountant)
    theirs.history = list(setting.sums)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # RDP warns where its best order is the last one
        return float(theirs.get_epsilon(setting.guarantee.delta))
