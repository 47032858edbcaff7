# SPDX-License-Identifier: Apache-2.0
"""Clipping: scale changes to a norm, and adapt that norm to a quantile of client norms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import exp, fsum, isfinite, sqrt
from typing import NamedTuple, cast

from torch import Tensor

from fedplan.errors import PrivacyError
from fedplan.privacy.mechanisms.noise import COUNT_GRID_STEP, NoiseStream

CLIPPING_NORMS = (2.0**-20, 2.0**20)
"""Smallest and largest clipping norm: sums are exact, and noise is coarser than their grid."""
_MARGIN = 2.0**-30
"""Fraction by which a norm must stay below the limit, and twice that if it is clipped.

Rounding errors of a norm are below 2**-38 of it: sums of at most _CHUNK squares in float64, added
exactly."""
_CHUNK = 2**14
"""Numbers whose squares are summed at a time."""


class ClippedChange(NamedTuple):
    """A clipped change in float64, its factor, and whether the norm was within the limit."""

    values: dict[str, Tensor]
    factor: float
    within: bool


def clip_change(
    change: Mapping[str, Tensor], clipping_norm: float, *, weight: float = 1.0
) -> ClippedChange:
    """Scale a change, as one vector over all tensors, to a norm of at most `clipping_norm`.

    weight: from 0 to 1, a further factor. Returns new tensors. Raises a PrivacyError for a norm or
    weight out of range, and as `global_norm`.
    """
    require_clipping_norm(clipping_norm)
    if not 0 <= weight <= 1:
        raise PrivacyError(
            f"the weight is {weight!r}: give one from 0 to 1, such as capped_weight() gives"
        )
    norm = global_norm(change)
    within = norm <= clipping_norm * (1 - _MARGIN)
    factor = weight * (1.0 if within else clipping_norm / norm * (1 - 2 * _MARGIN))
    return ClippedChange(
        {n: t.detach().double() * factor for n, t in change.items()}, factor, within
    )


def capped_weight(examples: int, cap: int) -> float:
    """Weight of a client, min(examples, cap) / cap. Raises a PrivacyError for negative numbers."""
    if type(examples) is not int or type(cap) is not int or examples < 0 or cap < 1:
        raise PrivacyError(f"{examples!r} examples with cap {cap!r}: give whole numbers")
    return min(examples, cap) / cap


def global_norm(change: Mapping[str, Tensor]) -> float:
    """L2 norm over all tensors, in float64; a PrivacyError for numbers that are not finite."""
    peak = 0.0
    for name, tensor in change.items():
        if not tensor.is_floating_point():
            raise PrivacyError(f"{name} is {tensor.dtype}: a change holds floating-point numbers")
        largest = float(tensor.detach().abs().max()) if tensor.numel() else 0.0
        if not isfinite(largest):
            raise PrivacyError(f"{name} holds a number that is not finite")
        peak = max(peak, largest)
    if peak == 0:
        return 0.0
    flat = (tensor.detach().reshape(-1) for tensor in change.values())
    chunks = (cast("tuple[Tensor, ...]", each.split(_CHUNK)) for each in flat)
    scaled = (chunk.double() / peak for each in chunks for chunk in each)
    return peak * sqrt(fsum(float(chunk.dot(chunk)) for chunk in scaled))


def require_clipping_norm(clipping_norm: float) -> None:
    """Raise a PrivacyError for a clipping norm outside of CLIPPING_NORMS."""
    if not CLIPPING_NORMS[0] <= clipping_norm <= CLIPPING_NORMS[1]:
        least, most = CLIPPING_NORMS
        raise PrivacyError(
            f"the clipping norm is {clipping_norm!r}: give one from {least:g} to {most:g}"
        )


@dataclass(frozen=True)
class AdaptiveClipping:
    """Clipping norm C that follows a quantile of client norms (Andrew et al., 2021, algorithm 1).

    After each round, `next_round` makes a copy with C exp(-step_size (b - quantile)), where b is
    the noisy fraction of changes within C. b is a release: each client adds 1/2 if its change was
    within C, else -1/2, and `noise_multiplier` is the stddev of the noise on this sum divided by
    its sensitivity, 1/2. Pay for b and the sum of changes by one charge, with `combined_noise`.
    b is clamped to [0, 1], and the new norm to CLIPPING_NORMS. Raises a PrivacyError for fields out
    of range.
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
        self,
        within: int,
        cohort: int,
        divisor: float,
        *,
        secret: bytes,
        name: str,
        content: str = "",
    ) -> AdaptiveClipping:
        """Make a copy with the clipping norm of the next round. Charges nothing.

        within: number of the `cohort` clients with a change within the present norm. divisor: the
        public (expected) size of a cohort. All but it and the secret decide the noise.
        """
        words = (content, within, cohort, self.noise_multiplier.hex())
        source = NoiseStream.for_release(secret, f"{name}: within the bound", *words)
        noise = source.rounded_gaussian((1,), self.noise_multiplier / 2, COUNT_GRID_STEP)
        noisy = within - cohort / 2 + float(noise)
        fraction = min(max(noisy / divisor + 0.5, 0.0), 1.0)
        norm = self.clipping_norm * exp(self.step_size * (self.quantile - fraction))
        return replace(self, clipping_norm=min(max(norm, CLIPPING_NORMS[0]), CLIPPING_NORMS[1]))
