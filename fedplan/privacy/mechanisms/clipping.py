# SPDX-License-Identifier: Apache-2.0
"""Clipping: scale changes to a norm, and adapt that norm to a quantile of client norms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import exp, fsum, isfinite, sqrt
from typing import NamedTuple

from torch import Tensor

from fedplan.privacy.errors import PrivacyError
from fedplan.privacy.mechanisms.noise import COUNT_GRID_STEP, NoiseStream, round_to_grid

CLIPPING_NORMS = (2.0**-20, 2.0**20)
"""Smallest and largest clipping norm: sums are exact, and noise is coarser than their grid."""
_HAIR = 1 - 2.0**-40
"""A clipped norm ends slightly inside the limit, so that rounding never puts it outside."""


class ClippedChange(NamedTuple):
    """A clipped change in float64, the factor it was multiplied by, and whether it needed none.

    within: whether the original norm was within the clipping norm.
    """

    values: dict[str, Tensor]
    factor: float
    within: bool


def clip_change(
    change: Mapping[str, Tensor], clipping_norm: float, *, weight: float = 1.0
) -> ClippedChange:
    """Scale a change, as one vector over all tensors, to a norm of at most `clipping_norm`.

    A weight of 0 to 1 scales it further: a weighted change keeps the sensitivity. The change itself
    is not modified. Raises a PrivacyError for a norm or weight out of range, for tensors that are
    not floating-point and for numbers that are not finite.
    """
    require_clipping_norm(clipping_norm)
    if not 0 <= weight <= 1:
        raise PrivacyError(
            f"the weight is {weight!r}: give one from 0 to 1, such as capped_weight() gives"
        )
    norm = global_norm(change)
    within = norm <= clipping_norm
    factor = weight * (1.0 if within else clipping_norm / norm * _HAIR)
    return ClippedChange(
        {n: t.detach().double() * factor for n, t in change.items()}, factor, within
    )


def capped_weight(examples: int, cap: int) -> float:
    """Weight of a client, min(examples, cap) / cap. Raises a PrivacyError for negative numbers."""
    if type(examples) is not int or type(cap) is not int or examples < 0 or cap < 1:
        raise PrivacyError(f"{examples!r} examples with cap {cap!r}: give whole numbers")
    return min(examples, cap) / cap


def global_norm(change: Mapping[str, Tensor]) -> float:
    """L2 norm over all tensors, in float64; 0.0 without any.

    Raises a PrivacyError for numbers that are not finite or not floating-point.
    """
    peaks = [_peak(name, tensor) for name, tensor in change.items()]
    peak = max(peaks, default=0.0)
    if peak == 0:
        return 0.0
    parts = [float((t.detach().double() / peak).norm()) for t in change.values()]
    return peak * sqrt(fsum(part**2 for part in parts))


def require_clipping_norm(clipping_norm: float) -> None:
    """Raise a PrivacyError for a clipping norm outside of CLIPPING_NORMS."""
    if not CLIPPING_NORMS[0] <= clipping_norm <= CLIPPING_NORMS[1]:
        least, most = CLIPPING_NORMS
        raise PrivacyError(
            f"the clipping norm is {clipping_norm!r}: give one from {least:g} to {most:g}"
        )


def _peak(name: str, tensor: Tensor) -> float:
    """Largest absolute value of a tensor. Raises a PrivacyError as `global_norm` says."""
    if not tensor.is_floating_point():
        raise PrivacyError(f"{name} is {tensor.dtype}: a change holds floating-point numbers")
    peak = float(tensor.detach().abs().max()) if tensor.numel() else 0.0
    if not isfinite(peak):
        raise PrivacyError(f"{name} holds a number that is not finite")
    return peak


@dataclass(frozen=True)
class AdaptiveClipping:
    """Clipping norm C that adapts to a quantile of norms (Andrew et al., arXiv 1905.03871, alg. 1).

    After each round C becomes C exp(-step_size (b - quantile)), where b is the noisy fraction of
    changes within C. b is a release: each client adds 1/2 if its change was within C, else -1/2,
    and `noise_multiplier` is the stddev of the noise on that sum divided by its sensitivity, 1/2.
    It is over the cohort of the sum of changes, so both are one charge: see `combined_noise`.
    """

    clipping_norm: float
    quantile: float = 0.5
    step_size: float = 0.2
    noise_multiplier: float = 10.0

    def __post_init__(self) -> None:
        require_clipping_norm(self.clipping_norm)
        if not 0 < self.quantile < 1 or not self.step_size > 0 or not self.noise_multiplier > 0:
            raise PrivacyError(
                f"{self}: the quantile is between 0 and 1, step_size and noise_multiplier are "
                "above 0"
            )

    def next_round(
        self, within: int, cohort: int, divisor: float, *, secret: bytes, name: str
    ) -> AdaptiveClipping:
        """A copy with the clipping norm of the next round.

        within: number of the `cohort` clients whose change was within this norm.
        divisor: the public (expected) size of a cohort, by which the noisy sum is divided.
        name: name of the round, which decides the noise together with the secret and the counts.
        """
        content = (within, cohort, self.noise_multiplier.hex())
        source = NoiseStream.for_release(secret, f"{name}: within the bound", *content)
        noise = float(
            round_to_grid(source.gaussian((1,), self.noise_multiplier / 2), COUNT_GRID_STEP)
        )
        noisy = within - cohort / 2 + noise
        fraction = min(max(noisy / divisor + 0.5, 0.0), 1.0)
        clipping_norm = self.clipping_norm * exp(self.step_size * (self.quantile - fraction))
        return replace(
            self, clipping_norm=min(max(clipping_norm, CLIPPING_NORMS[0]), CLIPPING_NORMS[1])
        )
