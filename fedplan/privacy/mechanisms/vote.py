# SPDX-License-Identifier: Apache-2.0
"""Differentially private vote on blocks: ballots, and counts with Gaussian noise.

Each unit of privacy (client or example) names up to k blocks, those of its highest scores. One
ballot changes at most k counts by 1 each. A choice by the noisy counts costs no further privacy.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, sqrt
from typing import TypeVar

from fedplan.errors import PrivacyError
from fedplan.privacy.accounting.accountant import Release
from fedplan.privacy.mechanisms.noise import COUNT_GRID_STEP, NoiseStream, derive_key

T = TypeVar("T", bound=Hashable)


def make_ballot(scores: Mapping[T, float], k: int) -> frozenset[T]:
    """The `k` keys of the highest scores, of equal scores the first; empty if any is not finite."""
    if not all(map(isfinite, scores.values())):
        return frozenset()
    return frozenset(sorted(scores, key=lambda each: -scores[each])[:k])


def count_ballots(ballots: Iterable[Collection[T]], blocks: Sequence[T], k: int) -> dict[T, int]:
    """Number of valid ballots that name each block.

    A ballot with more than `k` names, a repeated one or an unknown one is ignored silently: an
    error would be a release.
    """
    counts = dict.fromkeys(blocks, 0)
    for ballot in ballots:
        if len(ballot) <= k and len(set(ballot)) == len(ballot) and counts.keys() >= set(ballot):
            for block in ballot:
                counts[block] += 1
    return counts


def is_voting_round(round: int, period: int) -> bool:
    """Whether a vote is held in a round: in the first, and every `period` rounds after it."""
    if period < 1:
        raise PrivacyError(f"the period is {period!r}: give a number of rounds, 1 or more")
    return round % period == 1 % period


@dataclass(frozen=True)
class NoisyVote:
    """A vote on blocks with Gaussian noise on the counts; its sensitivity is sqrt(k).

    A ballot has at most `k` blocks; `sampling_rate` None: no sampling is claimed. Charge `event`
    with `digest`, then call `release`.
    """

    # Gumbel noise would need no delta, but its epsilons would add up; this composes as a Gaussian.

    k: int
    noise_multiplier: float
    sampling_rate: float | None = None

    @property
    def event(self) -> Release:
        """Privacy event of one vote, to be charged before `release`."""
        return Release(self.noise_multiplier, self.sampling_rate)

    @property
    def stddev(self) -> float:
        """Standard deviation of the noise on each count."""
        return self.noise_multiplier * sqrt(self.k)

    def release(
        self, counts: Mapping[T, int], secret: bytes, name: str, content: str = ""
    ) -> dict[T, float]:
        """Return the noisy count of each block. Charges nothing: charge `event` first.

        The noise follows from secret, name, counts and `content`, a digest of all that the ballots
        depend on; equal arguments give equal bits.
        """
        source = NoiseStream.for_release(secret, name, content, *self._words(counts))
        noise = source.rounded_gaussian((len(counts),), self.stddev, COUNT_GRID_STEP)
        return {block: counts[block] + float(n) for block, n in zip(counts, noise, strict=True)}

    def digest(self, counts: Mapping[T, int], secret: bytes, name: str, content: str = "") -> str:
        """Keyed digest of the counts, for the charge: it reveals nothing without the secret."""
        return derive_key(secret, "digest", name, content, *self._words(counts)).hex()[:32]

    def _words(self, counts: Mapping[T, int]) -> tuple[str | int, ...]:
        """The stddev, then each block and its count, as words of a digest."""
        words = [word for block, count in counts.items() for word in (repr(block), count)]
        return (self.stddev.hex(), *words)
