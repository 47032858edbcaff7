# SPDX-License-Identifier: Apache-2.0
"""Gaussian mechanism for client-level DP: the sum of clipped client changes with noise.

Each client's change is clipped as one vector. Every coordinate of the public set gets noise,
whether anybody sent it or not, and the divisor is public. So neither reveals who took part, what
they trained, or how many examples they hold.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite, sqrt

import torch
from torch import Tensor

from fedplan.errors import PrivacyError
from fedplan.privacy.accounting.accountant import Release
from fedplan.privacy.mechanisms.clipping import clip_change, require_clipping_norm
from fedplan.privacy.mechanisms.noise import NoiseStream, derive_key, grid_step
from fedplan.tensors.sums import GRID, MAX_VALUE, ExactSum

Change = Mapping[str, Tensor]
"""A client's update minus the base, by tensor name."""
PublicShapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""The public set: shape and dtype of each tensor that any client may share in a round."""
MIN_SHARE_STEPS = 2.0**10
"""Smallest stddev of a share of the noise, in grid steps: the sum of rounded shares is then a
rounding of one Gaussian, but for a probability below 1e-1000000."""


@dataclass(frozen=True)
class GaussianMechanism:
    """The client-level Gaussian mechanism of one round. All fields are public.

    public_shapes: shape and dtype of each tensor that any client may share; all get noise.
    clipping_norm: L2 norm to which each client's change is clipped.
    noise_multiplier: stddev of the noise divided by the clipping norm.
    divisor: number that the noisy sum is divided by, such as the expected cohort size.
    sampling_rate: probability of each client to be in the cohort; None: not sampled.
    noise_shares: with distributed DP, the number of clients whose shares add up to the whole noise;
        0: one party adds all of it.

    Raises a PrivacyError for a clipping norm or divisor out of range, and for noise that ExactSum
    cannot sum exactly. Adds no charge by itself:

        total = ExactSum()
        for change in changes:
            mechanism.add(total, change)
        budget.charge(mechanism.event, "round 7", digest=mechanism.digest(total, secret, "round 7"))
        mean = mechanism.release(total, secret, "round 7")
    """

    public_shapes: PublicShapes
    clipping_norm: float
    noise_multiplier: float
    divisor: float
    sampling_rate: float | None = None
    noise_shares: int = 0

    def __post_init__(self) -> None:
        require_clipping_norm(self.clipping_norm)
        if not self.divisor > 0 or not isfinite(self.divisor):
            raise PrivacyError(f"the public divisor is {self.divisor!r}: give a number above 0")
        if not GRID * 2**20 <= self.stddev <= MAX_VALUE / 2**6:
            raise PrivacyError(
                f"noise_multiplier {self.noise_multiplier!r} times clipping norm "
                f"{self.clipping_norm!r} cannot be summed exactly"
            )
        if self.noise_shares and self.share_stddev < MIN_SHARE_STEPS * self._grid_step:
            raise PrivacyError(
                f"a share of the noise is {self.share_stddev:.3g}, in steps of "
                f"{self._grid_step:.3g}: too coarse for shares to be one Gaussian; take a larger "
                "clipping norm, by "
                f"{MIN_SHARE_STEPS * self._grid_step / self.share_stddev:.2g} times, or more noise"
            )

    @property
    def stddev(self) -> float:
        """Standard deviation of the whole noise on each coordinate of the sum."""
        return self.noise_multiplier * self.clipping_norm

    @property
    def share_stddev(self) -> float:
        """Standard deviation of the noise that one party adds: a share, or all of it."""
        return self.stddev / sqrt(self.noise_shares or 1)

    @property
    def event(self) -> Release:
        """Privacy event of one release, the same for any set of coordinates."""
        return Release(self.noise_multiplier, self.sampling_rate)

    def add(self, total: ExactSum, change: Change, *, weight: float = 1.0) -> bool:
        """Clip one client's change and add it to `total`; return whether clipping was not needed.

        weight: from 0 to 1, multiplies the clipped change. Raises a PrivacyError, with `total`
        unchanged, for another tensor than the public ones, and as `clip_change`.
        """
        for name, tensor in change.items():
            if name not in self.public_shapes:
                raise PrivacyError(f"{name!r} is not shared in this round")
            shape = self.public_shapes[name][0]
            if tuple(tensor.shape) != shape:
                raise PrivacyError(f"{name!r} has shape {tuple(tensor.shape)}, not {shape}")
        clipped = clip_change(change, self.clipping_norm, weight=weight)
        # Rounded towards zero: rounding to nearest could increase the norm.
        step = self._grid_step
        total.add({n: v.div_(step).trunc_().mul_(step) for n, v in clipped.values.items()}, 1)
        return clipped.within

    def clipped_sum(self, change: Change) -> ExactSum:
        """A new sum that holds one client's clipped change."""
        total = ExactSum()
        self.add(total, change)
        return total

    def release(self, total: ExactSum, secret: bytes, name: str) -> dict[str, Tensor]:
        """Return `total` plus noise, divided by `divisor`; `total` is unchanged.

        Equal sum, secret and name give equal bits. Charge `event` first.
        """
        return self.divide(self.add_noise(total, secret, name))

    def add_noise(self, total: ExactSum, secret: bytes, name: str, *content: bytes) -> ExactSum:
        """Return a new sum: `total` plus noise of `share_stddev` on every public coordinate.

        The noise follows from secret, name, `content` and the bits of `total`.
        """
        # Added in whole grid steps, as one more sender: no rounding depends on the sum.
        source = NoiseStream.for_release(secret, name, *content, self._digest(total))
        noisy = ExactSum()
        noisy.merge(total)
        noisy.add(self._sample_noise(source), 1)
        return noisy

    def divide(self, noisy: ExactSum) -> dict[str, Tensor]:
        """A noisy sum divided by `divisor`, in the public dtypes."""
        sums = noisy.mean(dict.fromkeys(self.public_shapes, 1))
        return {
            name: sums[name].div_(self.divisor).to(self.public_shapes[name][1]) for name in sums
        }

    def digest(self, total: ExactSum, secret: bytes, name: str) -> str:
        """Keyed digest of a sum, for its charge: it reveals nothing without the secret."""
        return derive_key(secret, "digest", name, self._digest(total)).hex()[:32]

    def _sample_noise(self, source: NoiseStream) -> dict[str, Tensor]:
        shapes = {name: self.public_shapes[name][0] for name in sorted(self.public_shapes)}
        return {
            name: source.rounded_gaussian(shape, self.share_stddev, self._grid_step)
            for name, shape in shapes.items()
        }

    @property
    def _grid_step(self) -> float:
        """Grid step to which changes and noise are rounded: sums are on the same grid or finer."""
        return max(GRID, grid_step(self.share_stddev))

    def _digest(self, total: ExactSum) -> bytes:
        """SHA-256 of everything that decides a release of `total`: sum, public set and stddev."""
        tensors, facts = total.to_tensors()
        shapes = sorted((name, shape) for name, (shape, _) in self.public_shapes.items())
        digest = hashlib.sha256(json.dumps([facts, shapes, self.share_stddev.hex()]).encode())
        for name in sorted(tensors):
            digest.update(tensors[name].numpy().tobytes())
        return digest.digest()
