# SPDX-License-Identifier: Apache-2.0
"""Layouts: where the tensors of safetensors bytes lie, so that they are read where they are.

The library's own reader copies all of them. What it would refuse is refused here too.
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
"""What a tensor may hold, by the name that safetensors has for it."""

with warnings.catch_warnings():
    # Torch says once that bytes cannot be written to. Nobody writes to what came in a message.
    warnings.simplefilter("ignore")
    torch.frombuffer(b"\0", dtype=torch.uint8)


class Place(NamedTuple):
    """Where a tensor lies, in bytes after the head."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


def places_in(entries: Mapping[str, Any], size: int) -> list[Place]:
    """Where each tensor lies among `size` bytes, one after the other; else a ValueError says why.

    `entries` are those of the head. No byte is left over, and none is of two tensors.
    """
    places = sorted((_place(*each) for each in entries.items()), key=lambda p: (p.start, p.stop))
    at = 0
    for place in places:
        if place.start != at:
            raise ValueError(f"{place.name!r} starts at {place.start} and not at {at}")
        at = place.stop
    if at != size:
        raise ValueError(f"tensors end at {at} of {size} bytes")
    return places


def _place(name: str, entry: Any) -> Place:
    said = cast("dict[str, Any]", entry) if isinstance(entry, dict) else {}
    if said.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{name!r} has {', '.join(map(str, said))}")
    dtype = DTYPES.get(said["dtype"]) if isinstance(said["dtype"], str) else None
    shape, ends = _whole(said["shape"]), _whole(said["data_offsets"])
    if dtype is None or shape is None or ends is None or len(ends) != 2:
        raise ValueError(f"{name!r} is {str(said)[:60]}")
    if ends[1] - ends[0] != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{name!r} is {dtype} {shape}, and has {ends[1] - ends[0]} bytes")
    return Place(name, dtype, shape, *ends)


def _whole(said: Any) -> tuple[int, ...] | None:
    """A list of whole numbers, as safetensors counts them."""
    found: list[Any] = cast("list[Any]", said) if isinstance(said, list) else [None]
    return tuple(found) if all(type(n) is int and 0 <= n < 2**64 for n in found) else None


def viewed(data: bytes | bytearray, head: int, place: Place) -> Tensor:
    """A tensor that lies in some bytes, `head` of which come before all of them: no copy of it."""
    count = (place.stop - place.start) // place.dtype.itemsize
    if not count:
        return torch.empty(place.shape, dtype=place.dtype)
    found = torch.frombuffer(data, dtype=place.dtype, count=count, offset=head + place.start)
    # Other writers than ours may have left it between two words.
    aligned = found.data_ptr() % place.dtype.itemsize == 0
    return (found if aligned else _copied(data, head, place)).view(place.shape)


def _copied(data: bytes | bytearray, head: int, place: Place) -> Tensor:
    part = bytearray(memoryview(data)[head + place.start : head + place.stop])
    return torch.frombuffer(part, dtype=place.dtype)
