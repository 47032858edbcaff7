# SPDX-License-Identifier: Apache-2.0
"""Ring arithmetic on arrays of integers modulo 2**64 (narrow) or 2**128 (wide).

A narrow integer is one uint64 word. A wide integer is a row of two words, the low word first.
Negative integers are in two's complement. Sums wrap around, and are exact if the result fits.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedplan.tensors.accumulator import CARRY_BITS

Words = NDArray[np.uint64]
"""Narrow integers of shape (n,), or wide ones of shape (n, 2)."""

WORD = 64
"""Bits of a word."""
_LOWER_MASK = np.uint64(2**CARRY_BITS - 1)
_CARRY_SHIFT, _UPPER_SHIFT = np.uint64(CARRY_BITS), np.uint64(WORD - CARRY_BITS)
_SIGN_SHIFT = np.uint64(WORD - 1)


def add_words(total: Words, addend: Words) -> None:
    """Add `addend` to `total` in place, with wrap-around.

    Both are narrow (shape (n,)), or both wide (shape (n, 2)).
    """
    if total.ndim == 1:
        np.add(total, addend, out=total)
        return
    low, high = total[:, 0], total[:, 1]
    low += addend[:, 0]
    high += addend[:, 1]
    high += low < addend[:, 0]  # carry: the low word has wrapped around


def subtract_words(total: Words, subtrahend: Words) -> None:
    """Subtract `subtrahend` from `total` in place, with wrap-around.

    Both are narrow (shape (n,)), or both wide (shape (n, 2)).
    """
    if total.ndim == 1:
        np.subtract(total, subtrahend, out=total)
        return
    low, high = total[:, 0], total[:, 1]
    high -= subtrahend[:, 1]
    high -= low < subtrahend[:, 0]
    low -= subtrahend[:, 0]


def widen_words(narrow: Words) -> Words:
    """Return narrow integers as wide ones, extending the sign bit."""
    wide = np.empty((len(narrow), 2), dtype=np.uint64)
    wide[:, 0] = narrow
    wide[:, 1] = np.uint64(0) - (narrow >> _SIGN_SHIFT)
    return wide


def words_from_ints(numbers: Iterable[int]) -> Words:
    """Return Python ints as wide integers, modulo 2**128."""
    residues = [number % 2 ** (2 * WORD) for number in numbers]
    pairs = [(residue % 2**WORD, residue >> WORD) for residue in residues]
    return np.array(pairs, dtype=np.uint64).reshape(-1, 2)


def ints_from_words(wide: Words) -> list[int]:
    """Return wide integers as signed Python ints."""
    residues = (int(low) + (int(high) << WORD) for low, high in wide)
    return [
        residue - 2 ** (2 * WORD) if residue >> (2 * WORD - 1) else residue for residue in residues
    ]


def words_from_counts(upper: Tensor, lower: Tensor) -> Words:
    """Return upper * 2**CARRY_BITS + lower as wide integers of shape (numel, 2).

    `upper` and `lower` are int64 counts in normalized form, as `ExactSum.to_tensors` returns.
    """
    high, low = (counts.detach().contiguous().view(-1).numpy() for counts in (upper, lower))
    wide = np.empty((len(low), 2), dtype=np.uint64)
    wide[:, 0] = (high.view(np.uint64) << _CARRY_SHIFT) | low.view(np.uint64)
    wide[:, 1] = (high >> (WORD - CARRY_BITS)).view(np.uint64)
    return wide


def counts_from_words(wide: Words, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return (upper, lower) counts in `shape`; the inverse of `words_from_counts`."""
    low, high = np.ascontiguousarray(wide[:, 0]), np.ascontiguousarray(wide[:, 1])
    upper, lower = (high << _UPPER_SHIFT) | (low >> _CARRY_SHIFT), low & _LOWER_MASK
    upper_counts, lower_counts = (torch.from_numpy(n.view(np.int64)) for n in (upper, lower))
    return upper_counts.view(shape), lower_counts.view(shape)
