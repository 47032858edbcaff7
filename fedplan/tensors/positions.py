# SPDX-License-Identifier: Apache-2.0
"""Ascending positions in few bits: a bit per number, or for few positions Elias-Fano coding.

The size is known beforehand: a tenth of all positions takes about half a bit per number.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def packed_size(count: int, total: int) -> int:
    """Return the bytes of `count` packed positions below `total`."""
    return sum((bits + 7) // 8 for bits in _bit_counts(count, total))


def pack_positions(positions: Tensor, total: int) -> Tensor:
    """Return ascending, different positions below `total` as `packed_size` bytes (uint8)."""
    numbers, low_bits = positions.cpu().numpy(), _low_bits(len(positions), total)
    high_count, _ = _bit_counts(len(numbers), total)
    high = np.zeros(high_count, dtype=np.uint8)
    high[(numbers >> low_bits) + _unary_steps(len(numbers), low_bits)] = 1
    low = (numbers[:, None] >> np.arange(low_bits)) & 1
    packed = np.concatenate([np.packbits(high), np.packbits(low.astype(np.uint8))])
    return torch.from_numpy(packed).to(positions.device)


def unpack_positions(packed: Tensor, count: int, total: int) -> Tensor:
    """Return the positions (int64) of `packed_size` bytes.

    Raises ValueError unless they are `count` ascending, different positions below `total`, packed
    as `pack_positions` does it: positions have one form.
    """
    data, low_bits = packed.cpu().numpy(), _low_bits(count, total)
    high_count, low_count = _bit_counts(count, total)
    split = (high_count + 7) // 8
    marks, rest = np.unpackbits(data[:split]), np.unpackbits(data[split:])
    if marks[high_count:].any() or rest[low_count:].any():
        raise ValueError("bits behind the last position are set")
    ones = np.flatnonzero(marks)
    if len(ones) != count:
        raise ValueError(f"{len(ones)} positions are marked, not {count}")
    bits = rest[:low_count].reshape(count, low_bits)
    low = bits.astype(np.int64) @ (1 << np.arange(low_bits))
    positions = ((ones - _unary_steps(count, low_bits)) << low_bits) | low
    if count and (positions[-1] >= total or (np.diff(positions) <= 0).any()):
        raise ValueError(f"the positions are not ascending, or not below {total}")
    return torch.from_numpy(positions).to(packed.device)


def _low_bits(count: int, total: int) -> int:
    """Return how many low bits of each position are stored as they are; 0 for a bit per number."""
    bits = (total // max(count, 1)).bit_length() - 1
    return bits if bits > 1 else 0


def _unary_steps(count: int, low_bits: int) -> NDArray[np.int64]:
    """Return by how much the mark of each position is moved, so that equal high parts differ."""
    return np.arange(count) if low_bits else np.zeros(count, dtype=np.int64)


def _bit_counts(count: int, total: int) -> tuple[int, int]:
    """Return the number of (marks of the high parts, bits of the low parts)."""
    low_bits = _low_bits(count, total)
    return (count + (total >> low_bits), count * low_bits) if low_bits else (total, 0)
