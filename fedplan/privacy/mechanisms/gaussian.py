# SPDX-License-Identifier: Apache-2.0
"""Gaussian: the sum of clients' changes with the noise that hides each of them.

What each client adds is clipped as one vector; every coordinate of the public set gets noise,
whoever sent it and whether anybody did; and the divisor is public. So the support, the divisor and
the noise tell nothing of who was there, what they trained, or how many examples they hold.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import isfinite, sqrt

import torch
from torch import Tensor

from fedplan.privacy.accounting.events import Release
from fedplan.privacy.errors import PrivacyError
from fedplan.privacy.mechanisms.clipping import clip, require_bound
from fedplan.privacy.mechanisms.noise import Noise, finest, on_grid
from fedplan.privacy.mechanisms.secret import derived
from fedplan.tensors.sums import GRID, LARGEST_VALUE, ExactSum

Change = Mapping[str, Tensor]
Shared = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""The public set: the shape and dtype of each name that any client may share in a round."""
RATIO = 2.0**30
"""A share of the noise is so many steps of its grid at least: the sum of shares, each rounded, is
then as good as one rounded Gaussian. docs/design/secure-sums.md says by how much."""


@dataclass(frozen=True)
class Mechanism:
    """The client-level Gaussian mechanism of one round; all that it holds is public.

    `noise` is a multiple of `bound`, and the sum is divided by `over`: the expected size of a
    cohort, say. `rate` is the chance of each client to be in the cohort, None if it was not drawn.
    With `parts` nobody adds the noise alone: each client adds a share, of which so many have it.

        total = ExactSum()
        for change in changes:
            mechanism.add(total, change)
        budget.charge(mechanism.event, "round 7", digest=mechanism.digest(total, secret, "round 7"))
        mean = mechanism.release(total, secret, "round 7")
    """

    shared: Shared
    bound: float
    noise: float
    over: float
    rate: float | None = None
    parts: int = 0

    def __post_init__(self) -> None:
        require_bound(self.bound)
        if not self.over > 0 or not isfinite(self.over):
            raise PrivacyError(f"the public divisor is {self.over!r}: give a number above 0")
        if not GRID * 2**20 <= self.scale <= LARGEST_VALUE / 2**6:
            raise PrivacyError(f"noise {self.noise!r} by {self.bound!r} cannot be summed exactly")
        if self.parts and self.part < RATIO * self._step:
            raise PrivacyError(
                f"a share of the noise is {self.part:.3g}, in steps of {self._step:.3g}: too "
                "coarse for shares to be one Gaussian; take a larger clip, by "
                f"{RATIO * self._step / self.part:.2g} times, or more noise"
            )

    @property
    def scale(self) -> float:
        """The standard deviation of the noise on each coordinate of the sum."""
        return self.noise * self.bound

    @property
    def part(self) -> float:
        """The standard deviation of what one draws: a share of the noise, or all of it."""
        return self.scale / sqrt(self.parts or 1)

    @property
    def event(self) -> Release:
        """What a release costs. Which coordinates it has makes no difference."""
        return Release(self.noise, self.rate)

    def add(self, total: ExactSum, change: Change, *, weight: float = 1.0) -> bool:
        """Add one client's clipped change; say whether it was within the bound.

        Names that it does not have count as zeros. A change that does not fit is refused and leaves
        the sum as it was.
        """
        self._require_shared(change)
        clipped = clip(change, self.bound, weight=weight)
        # Rounded to whole steps towards zero: to the nearest step it could get longer.
        step = self._step
        total.add({n: v.div_(step).trunc_().mul_(step) for n, v in clipped.values.items()}, 1)
        return clipped.within

    def clipped(self, change: Change) -> ExactSum:
        """One client's clipped change as a sum of its own."""
        total = ExactSum()
        self.add(total, change)
        return total

    def release(self, total: ExactSum, secret: bytes, about: str) -> dict[str, Tensor]:
        """The sum with noise, divided: the same bits for the same sum, secret and name.

        Charge `event` before.
        """
        return self.divided(self.noised(total, secret, about))

    def noised(self, total: ExactSum, secret: bytes, about: str, *of: bytes) -> ExactSum:
        """A sum with noise: all of it on all clients' sum, or on one client's its share.

        It is added in whole steps of the grid, as one more sender, on every coordinate of the
        public set, so that no rounding depends on the sum. `of` is what else it follows from.
        """
        source = Noise.for_release(secret, about, *of, self._content(total))
        noisy = ExactSum()
        noisy.merge(total)
        noisy.add(self._noises(source), 1)
        return noisy

    def divided(self, noisy: ExactSum) -> dict[str, Tensor]:
        """A sum that has its noise, divided by the public number: of what it holds."""
        sums = noisy.mean(dict.fromkeys(self.shared, 1))
        return {name: sums[name].div_(self.over).to(self.shared[name][1]) for name in sums}

    def digest(self, total: ExactSum, secret: bytes, about: str) -> str:
        """A name for this sum that only the secret's owner can make, fit to be written down."""
        return derived(secret, "digest", about, self._content(total)).hex()[:32]

    def _noises(self, source: Noise) -> dict[str, Tensor]:
        shapes = {name: self.shared[name][0] for name in sorted(self.shared)}
        drawn = {name: source.gaussian(shape, self.part) for name, shape in shapes.items()}
        return {name: on_grid(values, self._step) for name, values in drawn.items()}

    @property
    def _step(self) -> float:
        """The step of changes and of noise: where the largest noise has no finer bits, no less.

        Bits that no noise has, a sum would show as they are.
        """
        return max(GRID, finest(self.part))

    def _content(self, total: ExactSum) -> bytes:
        """A digest of all that decides a release: every bit of the sum, the set and the scale."""
        tensors, facts = total.tensors()
        shapes = sorted((name, shape) for name, (shape, _) in self.shared.items())
        found = hashlib.sha256(json.dumps([facts, shapes, self.part.hex()]).encode())
        for name in sorted(tensors):
            found.update(tensors[name].numpy().tobytes())
        return found.digest()

    def _require_shared(self, change: Change) -> None:
        for name, tensor in change.items():
            if name not in self.shared:
                raise PrivacyError(f"{name!r} is not among what this round shares")
            shape = self.shared[name][0]
            if tuple(tensor.shape) != shape:
                raise PrivacyError(f"{name!r} has shape {tuple(tensor.shape)}, not {shape}")


def aggregate(
    mechanism: Mechanism, changes: Iterable[Change], secret: bytes, about: str
) -> dict[str, Tensor]:
    """One release from all changes at once."""
    total = ExactSum()
    for change in changes:
        mechanism.add(total, change)
    return mechanism.release(total, secret, about)
