# SPDX-License-Identifier: Apache-2.0
"""Noise: Gaussian numbers from a cryptographic stream."""

from __future__ import annotations

import hashlib
import os
from math import pi

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedplan.privacy.secret import SIZE, derived

_CHUNK = 2**16
"""Pairs of numbers made at a time: their scratch stays in a core's cache."""
_TERMS = 4


class Noise:
    """A stream of random numbers that nobody without its key can foresee.

    The stream is SHAKE-256 of the key and a count, from the standard library, so that the same key
    gives the same numbers whichever packages are installed; seeds of numpy or torch have no part in
    it. Numbers are float64 from 63 random bits. Each Gaussian is the sum of four, halved: the bits
    of one alone tell how it was made, and a sum of floats with it what it was added to (Holohan and
    Braghin, arXiv 2107.10138; Jin et al., arXiv 2112.05307).
    """

    def __init__(self, key: bytes) -> None:
        self._key, self._drawn = key, 0

    @staticmethod
    def fresh() -> Noise:
        """Noise that can be drawn once, keyed by the system's source."""
        return Noise(os.urandom(SIZE))

    @staticmethod
    def for_release(secret: bytes, about: str, *of: str | int | bytes) -> Noise:
        """The noise of one release of one content, and of no other.

        A server that was killed closes its round again. If it drew anew, the same sum would be out
        twice with two noises, and their mean is closer to it than was paid for: so the noise
        follows from the secret and from what the release is called. And if the sum, or the scale of
        the noise, is another the second time, one noise on both would give both away: so it follows
        also from `of`, which says all that the release is made of. The bits are the same on the
        same machine; another processor may round the last one of a logarithm differently.
        """
        return Noise(derived(secret, "noise", about, *of))

    def gaussian(self, shape: tuple[int, ...], scale: float) -> Tensor:
        """Float64 numbers of standard deviation `scale`."""
        values = torch.empty(shape, dtype=torch.float64)
        flat = values.view(-1)
        for start in range(0, flat.numel(), 2 * _CHUNK):
            part = flat[start : start + 2 * _CHUNK]
            half = (part.numel() + 1) // 2
            real, imaginary = self._pairs(half)
            part[:half] = real
            part[half:] = imaginary[: part.numel() - half]
        return values.mul_(scale)

    def uniform(self, count: int) -> Tensor:
        """Float64 numbers from 0 to below 1."""
        words = (self.words(count) >> np.uint64(11)).view(np.int64)
        return torch.from_numpy(words).double().mul_(2.0**-53)

    def _pairs(self, count: int) -> tuple[Tensor, Tensor]:
        """Two independent Gaussians per place, each the half of a sum of four (Box and Muller)."""
        radius = self._above_zero(_TERMS * count).log_().mul_(-2).sqrt_().mul_(0.5)
        angle = self._above_zero(_TERMS * count).mul_(2 * pi)
        real = (radius * angle.cos()).view(_TERMS, count).sum(0)
        return real, (radius * angle.sin_()).view(_TERMS, count).sum(0)

    def _above_zero(self, count: int) -> Tensor:
        """Numbers above 0 and at most 1, in steps of 2**-63: the tails reach as far as that."""
        words = (self.words(count) >> np.uint64(1)).view(np.int64)
        return torch.from_numpy(words).double().add_(0.5).mul_(2.0**-63)

    def words(self, count: int) -> NDArray[np.uint64]:
        """Random words of 64 bits."""
        self._drawn += 1
        stream = hashlib.shake_256(self._key + self._drawn.to_bytes(8, "little"))
        return np.frombuffer(stream.digest(8 * count), dtype="<u8")
