# SPDX-License-Identifier: Apache-2.0
"""Layout of safetensors bytes: parse the header entries and view tensors without copying.

The safetensors library copies all tensors. Input that it rejects is rejected here too.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8},
    **{"U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8},
    **{"BOOL": torch.bool, "C64": torch.complex64},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2},
}
"""Torch dtype by safetensors dtype name."""

with warnings.catch_warnings():
    # Torch warns once that bytes are read-only. Nobody writes to tensors of a message.
    warnings.simplefilter("ignore")
    torch.frombuffer(b"\0", dtype=torch.uint8)


class TensorEntry(NamedTuple):
    """Header entry of one tensor: name, dtype, shape, and the range of its bytes.

    `start` and `stop` count from the first byte after the header.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


def parse_entries(entries: Mapping[str, Any], size: int) -> list[TensorEntry]:
    """Parse the header's `entries` (JSON by tensor name); return them in the order of their bytes.

    Raises ValueError if an entry has other fields than dtype, shape and data_offsets, an invalid
    value, or a size that does not match, or if the tensors do not cover `size` bytes exactly,
    without gaps or overlaps.
    """
    parsed = list[TensorEntry]()
    for name, entry in entries.items():
        fields = cast("dict[str, Any]", entry) if isinstance(entry, dict) else {}
        if fields.keys() != {"dtype", "shape", "data_offsets"}:
            raise ValueError(f"{name!r} has {', '.join(map(str, fields))}")
        dtype = DTYPES.get(fields["dtype"]) if isinstance(fields["dtype"], str) else None
        shape, offsets = _parse_uints(fields["shape"]), _parse_uints(fields["data_offsets"])
        if dtype is None or shape is None or offsets is None or len(offsets) != 2:
            raise ValueError(f"{name!r} is {str(fields)[:60]}")
        if (nbytes := offsets[1] - offsets[0]) != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{name!r} is {dtype} {shape}, and has {nbytes} bytes")
        parsed.append(TensorEntry(name, dtype, shape, *offsets))
    parsed.sort(key=lambda entry: (entry.start, entry.stop))
    offset = 0
    for entry in parsed:
        if entry.start != offset:
            raise ValueError(f"{entry.name!r} starts at {entry.start} and not at {offset}")
        offset = entry.stop
    if offset != size:
        raise ValueError(f"tensors end at {offset} of {size} bytes")
    return parsed


def _parse_uints(value: Any) -> tuple[int, ...] | None:
    """Return a list of unsigned 64-bit ints as a tuple; None if the value is anything else."""
    items: list[Any] = cast("list[Any]", value) if isinstance(value, list) else [None]
    return tuple(items) if all(type(n) is int and 0 <= n < 2**64 for n in items) else None


def tensor_view(data: bytes | bytearray, header_size: int, entry: TensorEntry) -> Tensor:
    """Return the tensor of `entry`, sharing memory with `data`; a copy if its bytes are unaligned.

    `header_size` is the number of bytes before the first tensor. Does not check the entry's range.
    """
    count = (entry.stop - entry.start) // entry.dtype.itemsize
    if not count:
        return torch.empty(entry.shape, dtype=entry.dtype)
    start = header_size + entry.start
    tensor = torch.frombuffer(data, dtype=entry.dtype, count=count, offset=start)
    if tensor.data_ptr() % entry.dtype.itemsize:  # as other programs may write it
        copied = bytearray(memoryview(data)[start : header_size + entry.stop])
        tensor = torch.frombuffer(copied, dtype=entry.dtype)
    return tensor.view(entry.shape)
