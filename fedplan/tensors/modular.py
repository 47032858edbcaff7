# SPDX-License-Identifier: Apache-2.0
"""Modular: whole numbers as words of 64 bits: one word modulo 2**64, or two modulo 2**128.

A narrow number is one word of an array, a wide one a row of two, the lower word first. Negative
numbers are what is left of them: minus one is a word of ones. So sums wrap around and are exact as
long as what they come to fits.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedplan.tensors.totals import CARRY

Words = NDArray[np.uint64]

WORD = 64
_REST = np.uint64(2**CARRY - 1)
_CARRY, _ABOVE = np.uint64(CARRY), np.uint64(WORD - CARRY)
_SIGN = np.uint64(WORD - 1)


def add_words(total: Words, more: Words) -> None:
    """Add numbers to numbers, in place."""
    if total.ndim == 1:
        np.add(total, more, out=total)
        return
    low, high = total[:, 0], total[:, 1]
    low += more[:, 0]
    high += more[:, 1]
    high += low < more[:, 0]  # the lower word has wrapped around


def take_words(total: Words, less: Words) -> None:
    """Take numbers from numbers, in place."""
    if total.ndim == 1:
        np.subtract(total, less, out=total)
        return
    low, high = total[:, 0], total[:, 1]
    high -= less[:, 1]
    high -= low < less[:, 0]
    low -= less[:, 0]


def widened(narrow: Words) -> Words:
    """The same numbers, wide; those of the upper half are negative."""
    found = np.empty((len(narrow), 2), dtype=np.uint64)
    found[:, 0] = narrow
    found[:, 1] = np.uint64(0) - (narrow >> _SIGN)
    return found


def wide_of(numbers: Iterable[int]) -> Words:
    """Some numbers of Python, wide."""
    held = [number % 2 ** (2 * WORD) for number in numbers]
    pairs = [(number % 2**WORD, number >> WORD) for number in held]
    return np.array(pairs, dtype=np.uint64).reshape(-1, 2)


def numbers_of(wide: Words) -> list[int]:
    """Wide numbers as those of Python, each with its sign."""
    found = (int(low) + (int(high) << WORD) for low, high in wide)
    return [each - 2 ** (2 * WORD) if each >> (2 * WORD - 1) else each for each in found]


def words_of_counts(upper: Tensor, lower: Tensor) -> Words:
    """The steps of a settled sum, as `ExactSum.tensors` has them, as wide numbers."""
    high, low = (_flat(each).view(np.uint64) for each in (upper, lower))
    found = np.empty((len(low), 2), dtype=np.uint64)
    found[:, 0] = (high << _CARRY) | low
    found[:, 1] = (_flat(upper) >> (WORD - CARRY)).view(np.uint64)
    return found


def counts_of_words(wide: Words, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The upper and lower counts that `words_of_counts` was given."""
    low, high = np.ascontiguousarray(wide[:, 0]), np.ascontiguousarray(wide[:, 1])
    upper, lower = (high << _ABOVE) | (low >> _CARRY), low & _REST
    return _tensor(upper).view(shape), _tensor(lower).view(shape)


def _flat(counts: Tensor) -> NDArray[np.int64]:
    return counts.detach().contiguous().view(-1).numpy()


def _tensor(words: Words) -> Tensor:
    return torch.from_numpy(words.view(np.int64))
