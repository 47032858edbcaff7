# SPDX-License-Identifier: Apache-2.0
"""Stretches: tensors by name in pieces of a core's cache: large ones cut, small ones joined.

So what is worked out over all of them costs what their bytes cost, and not a call for each tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

LENGTH = 2**16
"""Numbers whose scratch, in float64, stays in a core's cache."""

Flat = Mapping[str, Tensor]
"""Tensors by name, each with one dimension."""


class Piece(NamedTuple):
    """Numbers of one tensor, all or some of them."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class Stretch:
    """Pieces one after the other, and where the first of them begins among all numbers.

    If there are several, each is a whole tensor, and all have one dtype.
    """

    at: int
    size: int
    pieces: tuple[Piece, ...]

    @property
    def ends(self) -> slice:
        """Its numbers among those of all stretches."""
        return slice(self.at, self.at + self.size)

    @property
    def starts(self) -> list[int]:
        """Where each piece begins within it."""
        found, at = list[int](), 0
        for piece in self.pieces:
            found.append(at)
            at += piece.stop - piece.start
        return found

    def of(self, flat: Flat) -> Tensor:
        """Its numbers: a view if they lie together, else joined."""
        (name, start, stop), *others = self.pieces
        if others:
            return torch.cat([flat[piece.name] for piece in self.pieces])
        return flat[name][start:stop]


def flattened(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Each tensor with one dimension: a view where its numbers lie in their order."""
    with torch.no_grad():
        return {name: value.reshape(-1) for name, value in values.items()}


def stretches_of(flat: Flat) -> list[Stretch]:
    """All numbers of some tensors, in their order; one that is empty is in no stretch."""
    found, open_, at = list[Stretch](), list[Piece](), 0
    dtype: torch.dtype | None = None

    def close() -> None:
        nonlocal at
        if open_:
            size = sum(piece.stop - piece.start for piece in open_)
            found.append(Stretch(at, size, tuple(open_)))
            at += size
            open_.clear()

    room = 0
    for name, value in flat.items():
        count = value.numel()
        if value.dtype != dtype or count > room:
            close()
            dtype, room = value.dtype, LENGTH
        if count > LENGTH:
            for start in range(0, count, LENGTH):
                open_.append(Piece(name, start, min(start + LENGTH, count)))
                close()
        elif count:
            open_.append(Piece(name, 0, count))
            room -= count
    close()
    return found


@torch.no_grad()
def extents(
    values: Mapping[str, Tensor], base: Mapping[str, Tensor]
) -> tuple[dict[str, float], dict[str, float]]:
    """Each tensor's largest magnitude, and its squared distance from the base, in one pass."""
    peaks, squares = dict.fromkeys(values, 0.0), dict.fromkeys(values, 0.0)
    for stretch, here, there in _beside(values, base):
        _note_peaks(peaks, stretch, here)
        _note_squares(squares, stretch, here - there)
    return peaks, squares


@torch.no_grad()
def magnitudes(values: Mapping[str, Tensor]) -> dict[str, float]:
    """The largest magnitude in each tensor: NaN if it holds one, 0 if it is empty."""
    peaks, flat = dict.fromkeys(values, 0.0), flattened(values)
    for stretch in stretches_of(flat):
        _note_peaks(peaks, stretch, stretch.of(flat))
    return peaks


@torch.no_grad()
def distances(values: Mapping[str, Tensor], base: Mapping[str, Tensor]) -> dict[str, float]:
    """The squared distance of each tensor from the base."""
    squares = dict.fromkeys(values, 0.0)
    for stretch, here, there in _beside(values, base):
        _note_squares(squares, stretch, here - there)
    return squares


def _beside(
    values: Mapping[str, Tensor], base: Mapping[str, Tensor]
) -> Iterator[tuple[Stretch, Tensor, Tensor]]:
    here, there = flattened(values), flattened({name: base[name] for name in values})
    return ((stretch, stretch.of(here), stretch.of(there)) for stretch in stretches_of(here))


def _note_peaks(peaks: dict[str, float], stretch: Stretch, numbers: Tensor) -> None:
    if len(stretch.pieces) == 1:
        ends = [abs(float(end)) for end in torch.aminmax(numbers)]
        peaks[stretch.pieces[0].name] = _larger(peaks[stretch.pieces[0].name], _larger(*ends))
        return
    # numpy has no bfloat16, and is slow with float16.
    wide = numbers.abs() if numbers.element_size() > 2 else numbers.float().abs_()
    found = np.maximum.reduceat(wide.cpu().numpy(), stretch.starts).tolist()
    peaks.update(zip((piece.name for piece in stretch.pieces), found, strict=True))


def _larger(one: float, other: float) -> float:
    """The larger of two; a NaN is larger than all."""
    return one if one >= other or one != one else other


def _note_squares(squares: dict[str, float], stretch: Stretch, moved: Tensor) -> None:
    # Squares are of the values' own dtype. numpy adds on one thread, so always in one order.
    wide = cast(Any, moved.mul_(moved).double().cpu().numpy())
    for piece, found in zip(stretch.pieces, np.add.reduceat(wide, stretch.starts), strict=True):
        squares[piece.name] += float(found)
