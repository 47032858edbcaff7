# SPDX-License-Identifier: Apache-2.0
"""NoiseStream: Gaussian and uniform random numbers from a cryptographic stream."""

from __future__ import annotations

import os
from math import ceil, log2, pi

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedplan.privacy.errors import import_extra
from fedplan.privacy.mechanisms.secret import SECRET_SIZE, derive_key

_CHUNK = 2**16
"""Pairs of numbers made at a time, so that temporary tensors stay in the cache."""
COUNT_GRID_STEP = 2.0**-30
"""Grid step to which noise on counts is rounded."""


def round_to_grid(values: Tensor, step: float) -> Tensor:
    """Round float64 `values` in place to multiples of `step`, a power of two, and return them."""
    # The low bits of floating-point noise reveal the value it was added to (Mironov 2012; Jin et
    # al., arXiv 2112.05307). So a sum and its noise are rounded to one grid before they are added.
    return values.mul_(1 / step).round_().mul_(step)


def finest_grid_step(stddev: float) -> float:
    """Smallest grid step on which Gaussian noise of a stddev is exact in float64.

    No sample is 19 times as large as the stddev.
    """
    return 2.0 ** (ceil(log2(19 * stddev)) - 52)


class NoiseStream:
    """A stream of cryptographically secure random numbers: AES-256 in counter mode under a key.

    key: 32 bytes; make a stream with `fresh` or `for_release`. Each call goes on where the last
    ended. Independent of the seeds of numpy and torch. Before noise is added to a value, apply
    `round_to_grid` to both: low bits of floating-point noise reveal the value. Raises a
    PrivacyError if `cryptography` is not installed.
    """

    def __init__(self, key: bytes) -> None:
        ciphers = import_extra("cryptography.hazmat.primitives.ciphers", "cryptographic noise")
        counter = ciphers.modes.CTR(bytes(16))
        self._stream = ciphers.Cipher(ciphers.algorithms.AES(key), counter).encryptor()

    @staticmethod
    def fresh() -> NoiseStream:
        """Stream under a new random key: its numbers cannot be drawn again."""
        return NoiseStream(os.urandom(SECRET_SIZE))

    @staticmethod
    def for_release(secret: bytes, name: str, *content: str | int | bytes) -> NoiseStream:
        """Stream for one release: the key follows from the secret, the name and the content.

        `content` must determine everything that is released. The same arguments give the same bits
        on the same machine; another processor may round a logarithm differently.
        """
        # After a restart the same sum gets the same noise: two noises on one sum would average out.
        # Another sum under the same name gets other noise: the same noise on both would reveal
        # their difference.
        return NoiseStream(derive_key(secret, "noise", name, *content))

    def gaussian(self, shape: tuple[int, ...], stddev: float) -> Tensor:
        """The next Gaussian numbers, float64 of a shape, with mean 0 and this stddev."""
        values = torch.empty(shape, dtype=torch.float64)
        flat = values.view(-1)
        for start in range(0, flat.numel(), 2 * _CHUNK):
            part = flat[start : start + 2 * _CHUNK]
            half = (part.numel() + 1) // 2
            real, imaginary = self._pairs(half)
            part[:half] = real
            part[half:] = imaginary[: part.numel() - half]
        return values.mul_(stddev)

    def uniform(self, count: int) -> Tensor:
        """The next `count` uniform float64 numbers of [0, 1)."""
        words = (self.words(count) >> np.uint64(11)).view(np.int64)
        return torch.from_numpy(words).double().mul_(2.0**-53)

    def _pairs(self, count: int) -> tuple[Tensor, Tensor]:
        """Two tensors of `count` independent standard Gaussians (Box and Muller)."""
        radius = self._above_zero(count).log_().mul_(-2).sqrt_()
        angle = self._above_zero(count).mul_(2 * pi)
        return radius * angle.cos(), angle.sin_().mul_(radius)

    def _above_zero(self, count: int) -> Tensor:
        """`count` uniform numbers of (0, 1] in steps of 2**-63, the limit of the Gaussian tails."""
        words = (self.words(count) >> np.uint64(1)).view(np.int64)
        return torch.from_numpy(words).double().add_(0.5).mul_(2.0**-63)

    def words(self, count: int) -> NDArray[np.uint64]:
        """The next `count` random 64-bit words."""
        return np.frombuffer(self._stream.update(bytes(8 * count)), dtype="<u8")
