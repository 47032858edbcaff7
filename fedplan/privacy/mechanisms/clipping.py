# SPDX-License-Identifier: Apache-2.0
"""Clipping: changes no longer than a bound, and a bound that follows their lengths."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import exp, fsum, isfinite, sqrt
from typing import NamedTuple

from torch import Tensor

from fedplan.privacy.errors import PrivacyError
from fedplan.privacy.mechanisms.noise import COUNTS, Noise, on_grid

BOUNDS = (2.0**-20, 2.0**20)
"""The bounds within which sums are exact and noise is far coarser than their grid."""
_HAIR = 1 - 2.0**-40
"""What is clipped ends a hair inside the bound, so that rounding never puts it outside."""


class Clipped(NamedTuple):
    """A change within the bound, in float64; what it was multiplied by; whether it was within."""

    values: dict[str, Tensor]
    factor: float
    within: bool


def clip(change: Mapping[str, Tensor], bound: float, *, weight: float = 1.0) -> Clipped:
    """Scale a change, taken as one vector over all of its names, to be no longer than the bound.

    A weight of at most 1 scales it further, so that it is folded into what the bound promises.
    """
    require_bound(bound)
    if not 0 <= weight <= 1:
        raise PrivacyError(
            f"the weight is {weight!r}: give one from 0 to 1, such as capped() gives"
        )
    length = norm(change)
    within = length <= bound
    factor = weight * (1.0 if within else bound / length * _HAIR)
    return Clipped({n: t.detach().double() * factor for n, t in change.items()}, factor, within)


def capped(examples: int, cap: int) -> float:
    """A client's weight by its examples, up to a public cap: the count itself never travels."""
    if type(examples) is not int or type(cap) is not int or examples < 0 or cap < 1:
        raise PrivacyError(f"{examples!r} examples with cap {cap!r}: give whole numbers")
    return min(examples, cap) / cap


def norm(change: Mapping[str, Tensor]) -> float:
    """The length of a change over all of its names, in float64. What is not finite is refused."""
    peaks = [_peak(name, tensor) for name, tensor in change.items()]
    peak = max(peaks, default=0.0)
    if peak == 0:
        return 0.0
    parts = [float((t.detach().double() / peak).norm()) for t in change.values()]
    return peak * sqrt(fsum(part**2 for part in parts))


def require_bound(bound: float) -> None:
    """Refuse a bound that cannot be summed exactly."""
    if not BOUNDS[0] <= bound <= BOUNDS[1]:
        least, most = BOUNDS
        raise PrivacyError(f"the bound is {bound!r}: give one from {least:g} to {most:g}")


def _peak(name: str, tensor: Tensor) -> float:
    if not tensor.is_floating_point():
        raise PrivacyError(f"{name} is {tensor.dtype}: a change holds floating-point numbers")
    peak = float(tensor.detach().abs().max()) if tensor.numel() else 0.0
    if not isfinite(peak):
        raise PrivacyError(f"{name} holds a number that is not finite")
    return peak


@dataclass(frozen=True)
class Adaptive:
    """A bound that moves to a quantile of the lengths (Andrew et al., arXiv 1905.03871, alg. 1).

    After each round C becomes C exp(-rate (b - quantile)), where b is the share of changes that
    were within C: if too many are, C shrinks. b is a release: the bits of each client, less a half,
    are summed, and `noise` is that of the sum as a multiple of its sensitivity, 1/2. It is over the
    same cohort as the sum of changes, so both are charged as one: `events.together`.
    """

    bound: float
    quantile: float = 0.5
    rate: float = 0.2
    noise: float = 10.0

    def __post_init__(self) -> None:
        require_bound(self.bound)
        if not 0 < self.quantile < 1 or not self.rate > 0 or not self.noise > 0:
            raise PrivacyError(
                f"{self}: the quantile is between 0 and 1, rate and noise are above 0"
            )

    def after(
        self, within: int, cohort: int, over: float, *, secret: bytes, about: str
    ) -> Adaptive:
        """The bound for the next round. `over` is the public size of a cohort.

        The noise of the round that is closed is by the bound that clipped it, which is this one.
        """
        made_of = (within, cohort, self.noise.hex())
        source = Noise.for_release(secret, f"{about}: within the bound", *made_of)
        extra = float(on_grid(source.gaussian((1,), self.noise / 2), COUNTS))
        noisy = within - cohort / 2 + extra
        share = min(max(noisy / over + 0.5, 0.0), 1.0)
        bound = self.bound * exp(self.rate * (self.quantile - share))
        return replace(self, bound=min(max(bound, BOUNDS[0]), BOUNDS[1]))
