# SPDX-License-Identifier: Apache-2.0
"""Totals: exact sums as whole steps of a grid, one under each name, their counts in arenas."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from fedplan.tensors.stretches import Flat, Stretch, stretches_of

GRID = 2.0**-47
"""The step that every value is rounded to, once; float32 values from 2**-24 up are multiples."""
CARRY = 36
"""A count of the upper tensor is 2**CARRY steps of the grid."""

# Adding 1.5 * 2**52 steps to a float64 rounds it to a whole step, ties to even, and leaves that
# count in the low bits of the result: its bits less the bits of the constant are the count.
_LOWER = 1.5 * 2**52 * GRID
_UPPER = _LOWER * 2**CARRY
_LOWER_BITS, _UPPER_BITS = struct.unpack("2q", struct.pack("2d", _LOWER, _UPPER))
_CHUNK = 2**16  # numbers whose scratch stays in a core's cache
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
ADDED = {str(dtype)[6:]: dtype for dtype in FLOATS}


@dataclass(slots=True)
class Total:
    """The sum under one name: whole steps of the grid, as lower + 2**CARRY * upper.

    `lower` also holds `lifted` times the bits of the constant, modulo 2**64, because taking them
    off once is faster than at each update. `load` bounds the lower count without them, `reach` the
    whole sum. There is no upper tensor until the lower could overflow.
    """

    dtype: str
    shape: tuple[int, ...]
    lower: Tensor
    upper: Tensor | None = None
    weight: int = 0
    senders: int = 0
    reach: int = 0
    load: int = 0
    lifted: int = 0

    def copy(self) -> Total:
        """The same in memory of its own."""
        upper = self.upper if self.upper is None else self.upper.clone()
        return replace(self, lower=self.lower.clone(), upper=upper)

    def expect(self, weight: int, peak: int) -> bool:
        """Make room for one update and count it; whether its values go into the lower alone."""
        wide = peak > 2**51 or weight * peak > 2**62
        step = weight * (2 ** (CARRY - 1) if wide else peak)
        if (wide and self.upper is None) or self.load + step >= 2**63:
            self.settle()
        self._note(weight, 1, weight * peak, step, weight)
        return not wide

    def add(self, flat: Tensor, weight: int, *, wide: bool) -> None:
        """Add the values of an update that was expected."""
        for chunk in self._chunks():
            values = _copied(flat[chunk])
            if wide:
                self._add_upper(chunk, values, weight)
            _add_lower(self.lower[chunk], values, weight)

    def _add_upper(self, chunk: slice, values: Tensor, weight: int) -> None:
        """Add the upper share of values, and leave what is left of them."""
        assert self.upper is not None
        lifted = values + _UPPER
        values.sub_(lifted - _UPPER)
        self.upper[chunk].add_(lifted.view(torch.int64).sub_(_UPPER_BITS), alpha=weight)

    def merge(self, other: Total) -> None:
        """Add another sum under the same name."""
        if other.upper is not None or self.load + other.load >= 2**63:
            self.settle()
            other.settle()
        self.lower.add_(other.lower)
        if self.upper is not None and other.upper is not None:
            self.upper.add_(other.upper)
        self._note(other.weight, other.senders, other.reach, other.load, other.lifted)

    def _note(self, weight: int, senders: int, reach: int, load: int, lifted: int) -> None:
        self.weight, self.senders = self.weight + weight, self.senders + senders
        self.reach, self.load = self.reach + reach, self.load + load
        self.lifted += lifted

    def settle(self) -> None:
        """Write the sum in its one settled form: every lower count from 0 to 2**CARRY - 1."""
        upper = torch.zeros_like(self.lower) if self.upper is None else self.upper
        for chunk, high, low in self.settled():
            upper[chunk], self.lower[chunk] = high, low
        self.upper, self.load, self.lifted = upper, 2**CARRY, 0

    def settled(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """The upper and lower counts of the settled form, chunk by chunk."""
        for chunk in self._chunks():
            low = self.lower[chunk] - _bits(self.lifted)
            high = low >> CARRY
            if self.upper is not None:
                high += self.upper[chunk]
            yield chunk, high, low.bitwise_and_(2**CARRY - 1)

    def over(self, weight: int) -> Tensor:
        """The sum divided by a weight."""
        result = torch.empty(self.lower.numel(), dtype=ADDED[self.dtype])
        if self.upper is None:
            for chunk in self._chunks():
                result[chunk] = _divided(self.lower[chunk], self.lifted, weight)
            return result.view(self.shape)
        for chunk, high, low in self.settled():
            # Both counts are one float64 each, so even where they cancel the sum rounds only once.
            steps = high.double().mul_(2.0**CARRY).add_(low.double())
            result[chunk] = steps.div_(float(weight)).mul_(GRID)
        return result.view(self.shape)

    def _chunks(self) -> Iterator[slice]:
        count = self.lower.numel()
        return (slice(at, min(at + _CHUNK, count)) for at in range(0, count, _CHUNK))


@dataclass(frozen=True)
class Arena:
    """The lower counts of names that first came together, in one tensor, and their stretches."""

    lower: Tensor
    stretches: list[Stretch]
    names: frozenset[str]

    @staticmethod
    def of(flat: Flat) -> Arena:
        """Room for tensors of which nothing was added."""
        count = sum(value.numel() for value in flat.values())
        lower = torch.zeros(count, dtype=torch.int64)
        return Arena(lower, stretches_of(flat), frozenset(flat))

    def totals(self, values: Mapping[str, Tensor]) -> dict[str, Total]:
        """The total of each name, of which nothing has been added."""
        shares = _split(self.lower, [value.numel() for value in values.values()])
        return {
            name: Total(dtype_of(value), tuple(value.shape), share)
            for (name, value), share in zip(values.items(), shares, strict=True)
        }

    def add(self, flat: Flat, weight: int) -> set[str]:
        """Add those stretches of which all is there; the names that were added."""
        whole = flat.keys() >= self.names
        there = [b for b in self.stretches if whole or all(p.name in flat for p in b.pieces)]
        for stretch in there:
            _add_lower(self.lower[stretch.ends], _copied(stretch.of(flat)), weight)
        return {piece.name for stretch in there for piece in stretch.pieces}

    def means(
        self, totals: Mapping[str, Total], shares: Mapping[str, int]
    ) -> Iterable[tuple[str, Tensor]]:
        """The means of names that were joined and came from the same senders throughout."""
        for stretch in (each for each in self.stretches if len(each.pieces) > 1):
            held = [totals[piece.name] for piece in stretch.pieces]
            alike = {(totals[piece.name].lifted, shares[piece.name]) for piece in stretch.pieces}
            if len(alike) == 1 and all(total.upper is None for total in held):
                lifted, weight = alike.pop()
                mean = _divided(self.lower[stretch.ends], lifted, weight).to(ADDED[held[0].dtype])
                parts = _split(mean, [piece.stop for piece in stretch.pieces])
                for piece, part, total in zip(stretch.pieces, parts, held, strict=True):
                    yield piece.name, part.clone().view(total.shape)


def dtype_of(tensor: Tensor) -> str:
    """The name of a tensor's dtype."""
    return str(tensor.dtype).removeprefix("torch.")


def _bits(lifted: int) -> int:
    """So many times the bits of the constant, modulo 2**64."""
    return (lifted * _LOWER_BITS + 2**63) % 2**64 - 2**63


def _split(flat: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
    return cast("tuple[Tensor, ...]", flat.split(sizes))


def _copied(values: Tensor) -> Tensor:
    return values.to("cpu", torch.float64, copy=True)


def _add_lower(lower: Tensor, values: Tensor, weight: int) -> None:
    """Add values of float64 times the weight; they are then spent."""
    lower.add_(values.add_(_LOWER).view(torch.int64), alpha=weight)


def _divided(lower: Tensor, lifted: int, weight: int) -> Tensor:
    """Lower counts that are the whole sum, divided: the counts round once, the quotient once.

    To divide by the grid's step as well only moves the exponent.
    """
    return (lower - _bits(lifted)).double().div_(float(weight) / GRID)
