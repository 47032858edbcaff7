# SPDX-License-Identifier: Apache-2.0
"""Vote: clients choose blocks together, and the choice is private.

Each client names up to K blocks; the counts get noise and the K largest win. With or without one
client, each count differs by at most 1, and all in the same direction.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import TypeVar

from torch import Tensor

from fedplan.privacy.errors import PrivacyError
from fedplan.privacy.events import Release, Vote
from fedplan.privacy.noise import Noise
from fedplan.privacy.secret import derived

T = TypeVar("T", bound=Hashable)


def counted(votes: Iterable[Collection[T]], blocks: Sequence[T], k: int) -> dict[T, int]:
    """How many clients named each of the public blocks. A vote that is not one counts for nothing.

    Nothing is said of it, since to say so would be a release; the client can check its own.
    """
    counts = dict.fromkeys(blocks, 0)
    for vote in votes:
        if len(vote) <= k and len(set(vote)) == len(vote) and counts.keys() >= set(vote):
            for block in vote:
                counts[block] += 1
    return counts


def asked(round: int, period: int) -> bool:
    """Whether the clients vote in a round; the choice holds until they do again."""
    if period < 1:
        raise PrivacyError(f"the period is {period!r}: let clients vote every 1 rounds or more")
    return round % period == 1 % period


@dataclass(frozen=True)
class GumbelVote:
    """The K largest counts with Gumbel noise: K exponential mechanisms, each of epsilon / K.

    The largest of count + scale * Gumbel is drawn as by exp(count / scale), and the K largest as by
    K such draws without replacement (Durfee and Rogers, arXiv 1905.04273, section 4). All counts
    move in one direction, so exp(epsilon' * count) is epsilon'-private, without the usual half:
    scale = K / epsilon.
    """

    k: int
    epsilon: float

    @property
    def event(self) -> Vote:
        """What a choice costs."""
        return Vote(self.epsilon)

    def choose(self, counts: Mapping[T, int], secret: bytes, about: str) -> list[T]:
        """The winners, the first one first: the same for the same counts, secret and name."""
        scale = self.k / self.epsilon
        source = Noise.for_release(secret, about, *_content(counts, "gumbel", scale))
        return _largest(counts, source.gumbel(len(counts), scale), self.k)

    def digest(self, counts: Mapping[T, int], secret: bytes, about: str) -> str:
        """A name for these counts that only the secret's owner can make."""
        return _digest(secret, about, _content(counts, "gumbel", self.k / self.epsilon))


@dataclass(frozen=True)
class GaussianVote:
    """The K largest counts with Gaussian noise; a vote is a vector of length sqrt(K) at most.

    `noise` is a multiple of that, and `rate` the chance of each client to be in the cohort. It
    composes with the rounds better than the other if there are many votes.
    """

    k: int
    noise: float
    rate: float | None = None

    @property
    def event(self) -> Release:
        """What a choice costs."""
        return Release(self.noise, self.rate)

    def choose(self, counts: Mapping[T, int], secret: bytes, about: str) -> list[T]:
        """The winners, the first one first: the same for the same counts, secret and name."""
        scale = self.noise * sqrt(self.k)
        source = Noise.for_release(secret, about, *_content(counts, "gaussian", scale))
        return _largest(counts, source.gaussian((len(counts),), scale), self.k)

    def digest(self, counts: Mapping[T, int], secret: bytes, about: str) -> str:
        """A name for these counts that only the secret's owner can make."""
        return _digest(secret, about, _content(counts, "gaussian", self.noise * sqrt(self.k)))


def _largest(counts: Mapping[T, int], noise: Tensor, k: int) -> list[T]:
    if not 1 <= k <= len(counts):
        raise PrivacyError(f"{k} of {len(counts)} blocks cannot be chosen")
    noisy = [count + float(extra) for count, extra in zip(counts.values(), noise, strict=True)]
    ranked = sorted(zip(noisy, range(len(noisy)), counts, strict=True), reverse=True)
    return [block for _, _, block in ranked[:k]]


def _content(counts: Mapping[T, int], kind: str, scale: float) -> tuple[str | int, ...]:
    named = [word for block, count in counts.items() for word in (repr(block), count)]
    return (kind, scale.hex(), *named)


def _digest(secret: bytes, about: str, content: tuple[str | int, ...]) -> str:
    return derived(secret, "digest", about, *content).hex()[:32]
