# SPDX-License-Identifier: Apache-2.0
"""Noise: Gaussian numbers from a cryptographic stream."""

from __future__ import annotations

import os
from math import ceil, log2, pi

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedplan.privacy.errors import needed
from fedplan.privacy.mechanisms.secret import SIZE, derived

_CHUNK = 2**16
"""Pairs of numbers made at a time: their scratch stays in a core's cache."""
COUNTS = 2.0**-30
"""The step of noisy counts."""


def on_grid(values: Tensor, step: float) -> Tensor:
    """Float64 numbers as whole steps, which are a power of two, in place.

    The last bits of a Gaussian tell how it was made, and those of a sum with it what it was added
    to (Mironov 2012; Jin et al., arXiv 2112.05307). So a sum and its noise are both put on one
    grid, so coarse that every step has noise that leads to it, before they are added.
    """
    return values.mul_(1 / step).round_().mul_(step)


def finest(scale: float) -> float:
    """The finest step on which all noise of a scale is exact: none is 19 times as large."""
    return 2.0 ** (ceil(log2(19 * scale)) - 52)


class Noise:
    """A stream of random numbers that nobody without its key can foresee.

    The stream is AES-256 in counter mode; seeds of numpy or torch have no part in it. Numbers are
    float64 from 63 random bits. Who adds them to something takes both `on_grid`.
    """

    def __init__(self, key: bytes) -> None:
        ciphers = needed("cryptography.hazmat.primitives.ciphers", "noise")
        counter = ciphers.modes.CTR(bytes(16))
        self._stream = ciphers.Cipher(ciphers.algorithms.AES(key), counter).encryptor()

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
        """Two independent Gaussians per place (Box and Muller)."""
        radius = self._above_zero(count).log_().mul_(-2).sqrt_()
        angle = self._above_zero(count).mul_(2 * pi)
        return radius * angle.cos(), angle.sin_().mul_(radius)

    def _above_zero(self, count: int) -> Tensor:
        """Numbers above 0 and at most 1, in steps of 2**-63: the tails reach as far as that."""
        words = (self.words(count) >> np.uint64(1)).view(np.int64)
        return torch.from_numpy(words).double().add_(0.5).mul_(2.0**-63)

    def words(self, count: int) -> NDArray[np.uint64]:
        """Random words of 64 bits."""
        return np.frombuffer(self._stream.update(bytes(8 * count)), dtype="<u8")
