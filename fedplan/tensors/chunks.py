# SPDX-License-Identifier: Apache-2.0
"""Chunks: named tensors in runs of cache-sized length, large tensors cut and small ones joined.

A pass over all chunks costs time by the number of bytes, and not one call per tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors  # pyright: ignore

from fedplan.tensors.named import Tensors

CHUNK_NUMEL = 2**16
"""Most numbers of a chunk: in float64 they fit a core's cache."""


class TensorSlice(NamedTuple):
    """The numbers `start:stop` of the flattened tensor `name`."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class Chunk:
    """At most CHUNK_NUMEL numbers: part of one tensor, or several whole tensors of one dtype.

    `start`: offset among the numbers of all tensors, one after the other. `size`: count of
    numbers. `slices`: the parts of tensors, in order. `gather` returns the numbers.
    """

    start: int
    size: int
    slices: tuple[TensorSlice, ...]

    @property
    def span(self) -> slice:
        """The chunk's range among the numbers of all chunks."""
        return slice(self.start, self.start + self.size)

    @property
    def slice_offsets(self) -> list[int]:
        """Offset of each slice within the chunk."""
        offsets, offset = list[int](), 0
        for part in self.slices:
            offsets.append(offset)
            offset += part.stop - part.start
        return offsets

    def gather(self, values: Tensors) -> Tensor:
        """Return the chunk's numbers of contiguous tensors: a view for a single slice, else a copy.

        A copy has the numbers of one slice after the other.
        """
        (name, start, stop), *others = self.slices
        if others:
            parts = [values[part.name] for part in self.slices]
            return cast(Tensor, _flatten_dense_tensors(parts))
        return values[name].view(-1)[start:stop]


def make_chunks(values: Tensors) -> list[Chunk]:
    """Divide the numbers of all tensors, in order, into chunks.

    A large tensor has several chunks; small neighbours of one dtype share a chunk. An empty tensor
    is in no chunk.
    """
    chunks, pending, offset = list[Chunk](), list[TensorSlice](), 0
    dtype: torch.dtype | None = None

    def close() -> None:
        nonlocal offset
        if pending:
            size = sum(part.stop - part.start for part in pending)
            chunks.append(Chunk(offset, size, tuple(pending)))
            offset += size
            pending.clear()

    room = 0
    for name, value in values.items():
        count = value.numel()
        if value.dtype != dtype or count > room:
            close()
            dtype, room = value.dtype, CHUNK_NUMEL
        if count > CHUNK_NUMEL:
            for start in range(0, count, CHUNK_NUMEL):
                pending.append(TensorSlice(name, start, min(start + CHUNK_NUMEL, count)))
                close()
        elif count:
            pending.append(TensorSlice(name, 0, count))
            room -= count
    close()
    return chunks


@dataclass(frozen=True)
class ChunkedTensors:
    """Named tensors with the numbers of each of their chunks, for several passes over them.

    `shapes`: shape and dtype of each tensor, in order. Numbers of a large tensor are views, those
    of small ones joined copies: valid until a tensor changes. Made by `chunk_tensors`.
    """

    shapes: dict[str, tuple[torch.Size, torch.dtype]]
    chunks: list[Chunk]
    numbers: list[Tensor]

    def fits(self, values: Tensors) -> bool:
        """Whether `values` have the same names in the same order, shapes and dtypes."""
        return list(_shapes(values).items()) == list(self.shapes.items())


def _shapes(values: Tensors) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (value.shape, value.dtype) for name, value in values.items()}


@torch.no_grad()
def chunk_tensors(values: Tensors, like: ChunkedTensors | None = None) -> ChunkedTensors:
    """Return tensors in chunks; with `like`, its tensors among them, in the same chunks.

    The tensors of `like` must have the shapes and dtypes that they have in `values`. Raises
    KeyError if one is missing.
    """
    names = like.shapes if like else values
    dense = {name: values[name].contiguous() for name in names}
    chunks = like.chunks if like else make_chunks(values)
    numbers = [chunk.gather(dense) for chunk in chunks]
    return ChunkedTensors(like.shapes if like else _shapes(values), chunks, numbers)


@torch.no_grad()
def peaks_and_squared_distances(
    values: ChunkedTensors, base: ChunkedTensors
) -> tuple[dict[str, float], dict[str, float]]:
    """Return (`max_magnitudes` of `values`, `squared_distances` from `base`), in one pass."""
    peaks, squares = dict.fromkeys(values.shapes, 0.0), dict.fromkeys(values.shapes, 0.0)
    for chunk, numbers, others in zip(values.chunks, values.numbers, base.numbers, strict=True):
        _update_peaks(peaks, chunk, numbers)
        _add_squares(squares, chunk, numbers - others)
    return peaks, squares


@torch.no_grad()
def max_magnitudes(values: ChunkedTensors) -> dict[str, float]:
    """Return the largest magnitude of each tensor: NaN if it contains one, 0 if it is empty."""
    peaks = dict.fromkeys(values.shapes, 0.0)
    for chunk, numbers in zip(values.chunks, values.numbers, strict=True):
        _update_peaks(peaks, chunk, numbers)
    return peaks


@torch.no_grad()
def squared_distances(values: Tensors, base: Tensors) -> dict[str, float]:
    """Return the squared L2 distance of each tensor from the tensor of its name in `base`."""
    squares, chunked = dict.fromkeys(values, 0.0), chunk_tensors(values)
    others = chunk_tensors(base, chunked).numbers
    for chunk, *pair in zip(chunked.chunks, chunked.numbers, others, strict=True):
        _add_squares(squares, chunk, torch.sub(*pair))
    return squares


def _update_peaks(peaks: dict[str, float], chunk: Chunk, numbers: Tensor) -> None:
    """Raise the largest magnitude in `peaks` of each tensor with numbers in a chunk.

    `numbers`: the chunk's numbers. A NaN among them makes the tensor's magnitude NaN.
    """
    if len(chunk.slices) == 1:
        name = chunk.slices[0].name
        extremes = [abs(float(extreme)) for extreme in torch.aminmax(numbers)]
        peaks[name] = _larger(peaks[name], _larger(*extremes))
        return
    # numpy has no bfloat16, and is slow with float16.
    wide = numbers.abs() if numbers.element_size() > 2 else numbers.float().abs_()
    maxima = np.maximum.reduceat(wide.cpu().numpy(), chunk.slice_offsets).tolist()
    peaks.update(zip((part.name for part in chunk.slices), maxima, strict=True))


def _larger(one: float, other: float) -> float:
    """Return the larger of two numbers; NaN if either is NaN."""
    return one if one >= other or one != one else other


def _add_squares(squares: dict[str, float], chunk: Chunk, difference: Tensor) -> None:
    """Add to `squares`, by tensor, the sum of squares of the chunk; overwrites `difference`."""
    # Squares have the dtype of the values. numpy adds on one thread, so always in one order.
    wide = cast(Any, difference.mul_(difference).double().cpu().numpy())
    sums = np.add.reduceat(wide, chunk.slice_offsets)
    for part, square in zip(chunk.slices, sums, strict=True):
        squares[part.name] += float(square)
