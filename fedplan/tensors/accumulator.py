# SPDX-License-Identifier: Apache-2.0
"""Accumulators: exact fixed-point sums of tensors, as int64 counts of a grid step."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from fedplan.tensors.chunks import Chunk, ChunkedTensors, make_chunks
from fedplan.tensors.named import Tensors

GRID = 2.0**-47
"""Step that each value is rounded to, once; float32 values from 2**-24 up are exact multiples."""
CARRY_BITS = 36
"""A count of the upper tensor is worth 2**CARRY_BITS grid steps."""

# Adding 1.5 * 2**52 steps to a float64 rounds it to a whole step, ties to even, and leaves that
# count in the low bits of the result: its bits less the bits of the constant are the count.
_LOWER = 1.5 * 2**52 * GRID
_UPPER = _LOWER * 2**CARRY_BITS
_LOWER_BITS, _UPPER_BITS = struct.unpack("2q", struct.pack("2d", _LOWER, _UPPER))
_CHUNK = 2**16  # numbers whose temporaries fit a core's cache
SUMMABLE_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that can be summed."""
DTYPE_BY_NAME = {str(dtype)[6:]: dtype for dtype in SUMMABLE_DTYPES}
"""The same by name, such as "float32"."""


@dataclass(slots=True)
class Accumulator:
    """Weighted sum of the tensors of one name, in grid steps: lower + 2**CARRY_BITS * upper.

    For each tensor call `reserve`, then `add`; `divide` returns the mean. Checks nothing.
    `dtype`, `shape`: dtype name and shape of the tensors. `lower`, `upper`: flat int64 counts;
    `upper` is None until `lower` could overflow. `lower` also contains `lifted` times the bits of
    the rounding constant, modulo 2**64: subtracting these once is faster than at each update.
    `weight`, `senders`: total weight and number of updates. `reach` bounds the magnitude of the
    whole sum, `load` that of the lower counts without the constant, both in steps.
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

    def copy(self) -> Accumulator:
        """Return a deep copy."""
        upper = self.upper if self.upper is None else self.upper.clone()
        return replace(self, lower=self.lower.clone(), upper=upper)

    def reserve(self, weight: int, peak: int) -> bool:
        """Count one update of this weight, and normalize first if the counts could overflow.

        `peak` is the largest magnitude of the update in grid steps. The caller then adds the
        update's values. Returns True if the values fit the lower counts alone; if False, `add`
        must be called with `wide=True`.
        """
        wide = peak > 2**51 or weight * peak > 2**62
        step = weight * (2 ** (CARRY_BITS - 1) if wide else peak)
        if (wide and self.upper is None) or self.load + step >= 2**63:
            self.normalize()
        self._add_totals(weight, 1, weight * peak, step, weight)
        return not wide

    def add(self, flat: Tensor, weight: int, *, wide: bool) -> None:
        """Add the flattened values `flat` times the weight; call `reserve` before.

        `wide`: add the upper part of each value to the upper counts, the rest to the lower ones.
        """
        for chunk in self._chunks():
            values = _float64_copy(flat[chunk])
            if wide:
                assert self.upper is not None
                lifted = values + _UPPER
                values.sub_(lifted - _UPPER)
                self.upper[chunk].add_(lifted.view(torch.int64).sub_(_UPPER_BITS), alpha=weight)
            _add_lower(self.lower[chunk], values, weight)

    def merge(self, other: Accumulator) -> None:
        """Add the sum `other`, of the same shape and dtype; may normalize `other`."""
        if other.upper is not None or self.load + other.load >= 2**63:
            self.normalize()
            other.normalize()
        self.lower.add_(other.lower)
        if self.upper is not None and other.upper is not None:
            self.upper.add_(other.upper)
        self._add_totals(other.weight, other.senders, other.reach, other.load, other.lifted)

    def _add_totals(self, weight: int, senders: int, reach: int, load: int, lifted: int) -> None:
        self.weight, self.senders = self.weight + weight, self.senders + senders
        self.reach, self.load = self.reach + reach, self.load + load
        self.lifted += lifted

    def normalize(self) -> None:
        """Rewrite the counts in their unique form: each lower count in 0..2**CARRY_BITS - 1."""
        upper = torch.zeros_like(self.lower) if self.upper is None else self.upper
        for chunk, high, low in self.normalized_chunks():
            upper[chunk], self.lower[chunk] = high, low
        self.upper, self.load, self.lifted = upper, 2**CARRY_BITS, 0

    def normalized_chunks(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield (range, upper counts, lower counts) of parts of the sum, as new tensors.

        The counts are in the form of `normalize`: each lower count in 0..2**CARRY_BITS - 1. The
        accumulator is not changed.
        """
        for chunk in self._chunks():
            low = self.lower[chunk] - _lifted_bits(self.lifted)
            high = low >> CARRY_BITS
            if self.upper is not None:
                high += self.upper[chunk]
            yield chunk, high, low.bitwise_and_(2**CARRY_BITS - 1)

    def divide(self, weight: int) -> Tensor:
        """Return the sum divided by `weight`, as a new tensor of `dtype` and `shape`."""
        result = torch.empty(self.lower.numel(), dtype=DTYPE_BY_NAME[self.dtype])
        if self.upper is None:
            for chunk in self._chunks():
                result[chunk] = _divide_lower(self.lower[chunk], self.lifted, weight)
            return result.view(self.shape)
        for chunk, high, low in self.normalized_chunks():
            # Each count is exact in float64, so even where they cancel the sum rounds only once.
            steps = high.double().mul_(2.0**CARRY_BITS).add_(low.double())
            result[chunk] = steps.div_(float(weight)).mul_(GRID)
        return result.view(self.shape)

    def _chunks(self) -> Iterator[slice]:
        count = self.lower.numel()
        return (slice(at, min(at + _CHUNK, count)) for at in range(0, count, _CHUNK))


@dataclass(frozen=True)
class AccumulatorBuffer:
    """Joint memory of the accumulators of all names that one update added for the first time.

    `lower`: the lower counts of all names, one after the other. `chunks`: parts of `lower`.
    Create with `allocate`. Then `add_chunks` and `joined_means` treat many small tensors in one
    operation.
    """

    lower: Tensor
    chunks: list[Chunk]

    @staticmethod
    def allocate(values: Tensors) -> tuple[AccumulatorBuffer, dict[str, Accumulator]]:
        """Return a buffer of zeros for tensors of these sizes, and an accumulator for each.

        The lower counts of an accumulator view the buffer; the caller keeps them.
        """
        sizes = [value.numel() for value in values.values()]
        lower = torch.zeros(sum(sizes), dtype=torch.int64)
        accumulators = {
            name: Accumulator(dtype_name(value), tuple(value.shape), counts)
            for (name, value), counts in zip(values.items(), _split(lower, sizes), strict=True)
        }
        return AccumulatorBuffer(lower, make_chunks(values)), accumulators

    def add_chunks(
        self, values: Mapping[str, Tensor], chunked: ChunkedTensors, names: set[str], weight: int
    ) -> set[str]:
        """Add tensors times the weight, for chunks of the buffer with all tensors in `names`.

        `chunked`: the chunks of `values`. Returns the names of the added tensors; the caller adds
        the others one by one.
        """
        present = [c for c in self.chunks if all(part.name in names for part in c.slices)]
        numbers = {c.slices: n for c, n in zip(chunked.chunks, chunked.numbers, strict=True)}
        for chunk in present:
            gathered = numbers.get(chunk.slices)
            if gathered is None:  # an update with other names has other chunks
                parts = {part.name: values[part.name].contiguous() for part in chunk.slices}
                gathered = chunk.gather(parts)
            _add_lower(self.lower[chunk.span], _float64_copy(gathered), weight)
        return {part.name for chunk in present for part in chunk.slices}

    def joined_means(
        self, accumulators: Mapping[str, Accumulator], divisors: Mapping[str, int]
    ) -> Iterable[tuple[str, Tensor]]:
        """Yield (name, mean) of small tensors, dividing all tensors of a chunk in one operation.

        A mean is a new tensor, equal to `accumulators[name].divide(divisors[name])`: the divisor
        alone divides, not the total weight. Both mappings have all names; other keys are ignored.
        The caller divides the tensors that are not yielded: empty ones, those alone in a chunk, and
        all of a chunk whose tensors differ in divisor or total weight, or of which one has `upper`
        counts (not None).
        """
        for chunk in (each for each in self.chunks if len(each.slices) > 1):
            group = [accumulators[part.name] for part in chunk.slices]
            scales = {(accumulators[p.name].lifted, divisors[p.name]) for p in chunk.slices}
            if len(scales) == 1 and all(each.upper is None for each in group):
                lifted, weight = scales.pop()
                mean = _divide_lower(self.lower[chunk.span], lifted, weight)
                mean = mean.to(DTYPE_BY_NAME[group[0].dtype])
                parts = _split(mean, [part.stop for part in chunk.slices])
                for part, values, total in zip(chunk.slices, parts, group, strict=True):
                    yield part.name, values.clone().view(total.shape)


def dtype_name(tensor: Tensor) -> str:
    """Return the name of a tensor's dtype, such as "float32"."""
    return str(tensor.dtype).removeprefix("torch.")


def _lifted_bits(lifted: int) -> int:
    """Return `lifted` times the bits of the rounding constant, as a signed 64-bit int."""
    return (lifted * _LOWER_BITS + 2**63) % 2**64 - 2**63


def _split(flat: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
    return cast("tuple[Tensor, ...]", flat.split(sizes))


def _float64_copy(values: Tensor) -> Tensor:
    return values.to("cpu", torch.float64, copy=True)


def _add_lower(lower: Tensor, values: Tensor, weight: int) -> None:
    """Add float64 values times the weight to the counts `lower`; overwrites `values`."""
    lower.add_(values.add_(_LOWER).view(torch.int64), alpha=weight)


def _divide_lower(lower: Tensor, lifted: int, weight: int) -> Tensor:
    """Return the float64 mean of a sum without upper counts: the counts `lower` over the weight.

    Rounds the counts once and the quotient once; the grid step is a power of two.
    """
    return (lower - _lifted_bits(lifted)).double().div_(float(weight) / GRID)
