# SPDX-License-Identifier: Apache-2.0
"""Vote: whoever is hidden has one ballot, and the counts are hidden by noise.

Clients vote where clients are hidden, rows where rows are: each names up to K blocks, those of its
highest scores, and every count gets Gaussian noise. Whatever is chosen by the noisy counts costs
nothing more. With or without one ballot, each of at most K counts differs by 1.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, sqrt
from typing import TypeVar

from fedplan.privacy.accounting.events import Release
from fedplan.privacy.errors import PrivacyError
from fedplan.privacy.mechanisms.noise import COUNTS, Noise, on_grid
from fedplan.privacy.mechanisms.secret import derived

T = TypeVar("T", bound=Hashable)


def ballot(scores: Mapping[T, float], k: int) -> frozenset[T]:
    """The K of the highest scores; of equals, the earlier. Scores that are no numbers name none."""
    if not all(map(isfinite, scores.values())):
        return frozenset()
    return frozenset(sorted(scores, key=lambda each: -scores[each])[:k])


def counted(votes: Iterable[Collection[T]], blocks: Sequence[T], k: int) -> dict[T, int]:
    """How many ballots named each of the public blocks. What is not a ballot counts for nothing.

    Nothing is said of it, since to say so would be a release; who cast it can check its own.
    """
    counts = dict.fromkeys(blocks, 0)
    for vote in votes:
        if len(vote) <= k and len(set(vote)) == len(vote) and counts.keys() >= set(vote):
            for block in vote:
                counts[block] += 1
    return counts


def asked(round: int, period: int) -> bool:
    """Whether there is a vote in a round; its counts hold until the next."""
    if period < 1:
        raise PrivacyError(f"the period is {period!r}: let there be a vote every 1 rounds or more")
    return round % period == 1 % period


@dataclass(frozen=True)
class Vote:
    """Counts with Gaussian noise; a ballot is a vector of length sqrt(K) at most.

    `noise` is a multiple of that, and `rate` the chance of each ballot to be cast, None if nothing
    is claimed of it. It composes with the rounds as one Gaussian sum more; Gumbel noise would need
    no delta, and would add up.
    """

    k: int
    noise: float
    rate: float | None = None

    @property
    def event(self) -> Release:
        """What the counts cost."""
        return Release(self.noise, self.rate)

    @property
    def scale(self) -> float:
        """The standard deviation of the noise on each count."""
        return self.noise * sqrt(self.k)

    def release(
        self, counts: Mapping[T, int], secret: bytes, about: str, of: str = ""
    ) -> dict[T, float]:
        """The noisy counts, the same for the same counts, secret and name. Charge before.

        `of` is what the ballots follow from: the same counts of something else are another release.
        """
        source = Noise.for_release(secret, about, of, *self._content(counts))
        noise = on_grid(source.gaussian((len(counts),), self.scale), COUNTS)
        return {block: counts[block] + float(n) for block, n in zip(counts, noise, strict=True)}

    def digest(self, counts: Mapping[T, int], secret: bytes, about: str, of: str = "") -> str:
        """A name for these counts that only the secret's owner can make."""
        return derived(secret, "digest", about, of, *self._content(counts)).hex()[:32]

    def _content(self, counts: Mapping[T, int]) -> tuple[str | int, ...]:
        named = [word for block, count in counts.items() for word in (repr(block), count)]
        return (self.scale.hex(), *named)
