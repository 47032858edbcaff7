# SPDX-License-Identifier: Apache-2.0
"""Sums: weighted sums of named tensors with the same bits in whatever order they are added."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from fedplan.errors import FedplanError
from fedplan.tensors.named import all_finite
from fedplan.tensors.stretches import Flat, Stretch, extents, flattened, magnitudes, stretches_of

GRID = 2.0**-47
"""The step that every value is rounded to, once; float32 values from 2**-24 up are multiples."""
CARRY = 36
"""A count of the upper tensor is 2**CARRY steps of the grid."""
LARGEST_VALUE = 2.0**40
LARGEST_WEIGHT = 2**27
LARGEST_SUM = 2**98
"""In steps of the grid: the sum of weight times the largest magnitude stays below it."""

# Adding 1.5 * 2**52 steps to a float64 rounds it to a whole step, ties to even, and leaves that
# count in the low bits of the result: its bits less the bits of the constant are the count.
_LOWER = 1.5 * 2**52 * GRID
_UPPER = _LOWER * 2**CARRY
_LOWER_BITS, _UPPER_BITS = struct.unpack("2q", struct.pack("2d", _LOWER, _UPPER))
_CHUNK = 2**16  # numbers whose scratch stays in a core's cache
_FACTS = ("dtype", "weight", "senders", "reach")
_RAW = (*_FACTS, "shape", "load", "lifted")
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_DTYPES = {str(dtype)[6:]: dtype for dtype in _FLOATS}


class SumError(FedplanError):
    """A tensor, a weight or a partial sum that cannot be added exactly."""


@dataclass(slots=True)
class _Total:
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

    def copy(self) -> _Total:
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

    def merge(self, other: _Total) -> None:
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
        result = torch.empty(self.lower.numel(), dtype=_DTYPES[self.dtype])
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
class _Arena:
    """The lower counts of names that first came together, in one tensor, and their stretches."""

    lower: Tensor
    stretches: list[Stretch]
    names: frozenset[str]

    @staticmethod
    def of(flat: Flat) -> _Arena:
        count = sum(value.numel() for value in flat.values())
        lower = torch.zeros(count, dtype=torch.int64)
        return _Arena(lower, stretches_of(flat), frozenset(flat))

    def totals(self, values: Mapping[str, Tensor]) -> dict[str, _Total]:
        """The total of each name, of which nothing has been added."""
        shares = self.lower.split([value.numel() for value in values.values()])
        return {
            name: _Total(_dtype(value), tuple(value.shape), share)
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
        self, totals: Mapping[str, _Total], shares: Mapping[str, int]
    ) -> Iterable[tuple[str, Tensor]]:
        """The means of names that were joined and came from the same senders throughout."""
        for stretch in (each for each in self.stretches if len(each.pieces) > 1):
            held = [totals[piece.name] for piece in stretch.pieces]
            alike = {(totals[piece.name].lifted, shares[piece.name]) for piece in stretch.pieces}
            if len(alike) == 1 and all(total.upper is None for total in held):
                lifted, weight = alike.pop()
                mean = _divided(self.lower[stretch.ends], lifted, weight).to(_DTYPES[held[0].dtype])
                parts = mean.split([piece.stop for piece in stretch.pieces])
                for piece, part, total in zip(stretch.pieces, parts, held, strict=True):
                    yield piece.name, part.clone().view(total.shape)


class ExactSum:
    """A running weighted sum of named tensors, exactly associative and commutative.

    Each value is rounded once to a multiple of GRID; from there on all is whole numbers. So the
    bits do not depend on the order of updates or on how partial sums were merged, and the memory,
    8 or 16 bytes a number, does not depend on how many came. An error leaves the sum as it was.
    """

    def __init__(self) -> None:
        self._totals: dict[str, _Total] = {}
        self._arenas: list[_Arena] = []

    @torch.no_grad()
    def add(
        self, values: Mapping[str, Tensor], weight: int, peaks: Mapping[str, int] | None = None
    ) -> None:
        """Add one sender's tensors, each times the weight. Each name has senders of its own.

        `peaks` are those of just these tensors, if somebody has looked at them already.
        """
        peaks, flat = self.require(values, weight, peaks), flattened(values)
        if fresh := {name: value for name, value in values.items() if name not in self._totals}:
            arena = _Arena.of({name: flat[name] for name in fresh})
            self._arenas.append(arena)
            self._totals |= arena.totals(fresh)
        narrow = {n: v for n, v in flat.items() if self._totals[n].expect(weight, peaks[n])}
        added = {name for arena in self._arenas for name in arena.add(narrow, weight)}
        for name in flat.keys() - added:
            self._totals[name].add(flat[name], weight, wide=name not in narrow)

    def require(
        self, values: Mapping[str, Tensor], weight: int, peaks: Mapping[str, int] | None = None
    ) -> dict[str, int]:
        """Refuse tensors that `add` would refuse; else the peak of each."""
        if type(weight) is not int or not 1 <= weight <= LARGEST_WEIGHT:
            most = LARGEST_WEIGHT
            raise SumError(f"weight {weight!r} is not an int from 1 to {most}: count examples")
        found = dict(peaks) if peaks is not None else peaks_of(values)
        for name, tensor in values.items():
            self._check(name, _dtype(tensor), tuple(tensor.shape), weight * found[name])
        return found

    def merge(self, other: ExactSum) -> None:
        """Add all that another sum holds, as if its updates had come here."""
        for name, theirs in other._totals.items():
            self._check(name, theirs.dtype, theirs.shape, theirs.reach)
        fresh = {n: t.copy() for n, t in other._totals.items() if n not in self._totals}
        for name in other._totals.keys() - fresh.keys():
            self._totals[name].merge(other._totals[name])
        self._totals |= fresh

    def _check(self, name: str, dtype: str, shape: tuple[int, ...], reach: int) -> None:
        """Refuse what does not fit the sum under a name, or could overflow it."""
        held = self._totals.get(name)
        if held and (held.dtype, held.shape) != (dtype, shape):
            before = f"but was {held.dtype} {held.shape} before"
            raise SumError(f"{name} is {dtype} {shape}, {before}: send all of a name alike")
        if reach + (held.reach if held else 0) >= LARGEST_SUM:
            most = f"{LARGEST_SUM * GRID:.0f}"
            raise SumError(f"the sum of {name} could pass {most}: give smaller weights")

    def mean(self, over: Mapping[str, int] | None = None) -> dict[str, Tensor]:
        """Each sum divided by the weight of its own senders, or by `over`, in the dtype it had."""
        shares = self.weights() if over is None else over
        for name in self._totals:
            share = shares.get(name)
            if type(share) is not int or share < 1:
                raise SumError(f"{name} cannot be divided by {share!r}: give a positive int")
        joined = {n: m for each in self._arenas for n, m in each.means(self._totals, shares)}
        means = {
            name: joined[name] if name in joined else total.over(shares[name])
            for name, total in self._sorted()
        }
        for name, mean in means.items():
            # No sum is too large for the others.
            if mean.dtype is torch.float16 and not all_finite(mean):
                raise SumError(f"the mean of {name} is too large for {mean.dtype}: divide by more")
        return means

    def weights(self) -> dict[str, int]:
        """The weight of all senders of each name."""
        return {name: total.weight for name, total in self._sorted()}

    def senders(self) -> dict[str, int]:
        """How many updates held each name."""
        return {name: total.senders for name, total in self._sorted()}

    @property
    def nbytes(self) -> int:
        """How many bytes the counts take."""
        return sum(t.lower.nbytes * (1 + (t.upper is not None)) for t in self._totals.values())

    def tensors(self) -> tuple[dict[str, Tensor], dict[str, object]]:
        """The sum as tensors for safetensors and facts for JSON: equal sums give equal bits."""
        tensors: dict[str, Tensor] = {}
        facts: dict[str, object] = {}
        for name, total in self._sorted():
            total.settle()
            assert total.upper is not None
            tensors[f"{name}.upper"] = total.upper.view(total.shape).clone()
            tensors[f"{name}.lower"] = total.lower.view(total.shape).clone()
            facts[name] = {key: getattr(total, key) for key in _FACTS}
        return tensors, facts

    @classmethod
    def read(cls, tensors: Mapping[str, Tensor], facts: Mapping[str, object]) -> ExactSum:
        """The sum that `tensors` wrote."""
        found = cls()
        for name, fact in facts.items():
            try:
                pair = tensors[f"{name}.upper"], tensors[f"{name}.lower"]
                found._totals[name] = _read(*pair, **cast("dict[str, Any]", fact))
            except (KeyError, TypeError) as error:
                text = f"{name} is not part of a sum ({error}): read what `tensors` wrote"
                raise SumError(text) from error
        return found

    def raw(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The sum as it stands, for one who trusts it and merges it at once: nothing is copied."""
        tensors, facts = dict[str, Tensor](), dict[str, Any]()
        for name, total in self._sorted():
            tensors[f"{name}.lower"] = total.lower
            tensors |= {f"{name}.upper": total.upper} if total.upper is not None else {}
            facts[name] = {key: getattr(total, key) for key in _RAW}
        return tensors, facts

    @classmethod
    def of_raw(cls, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> ExactSum:
        """The sum that `raw` gave."""
        found = cls()
        for name, fact in facts.items():
            said = {**fact, "shape": tuple(fact["shape"])}
            lower, upper = tensors[f"{name}.lower"], tensors.get(f"{name}.upper")
            found._totals[name] = _Total(lower=lower, upper=upper, **said)
        return found

    def _sorted(self) -> list[tuple[str, _Total]]:
        return sorted(self._totals.items())


def _read(
    upper: Tensor, lower: Tensor, dtype: str, weight: int, senders: int, reach: int
) -> _Total:
    """A settled total, or a TypeError that says what is wrong with it."""
    counts, most = (weight, senders, reach), (reach >> CARRY) + 1
    fit = 1 <= senders <= weight <= senders * LARGEST_WEIGHT and 0 <= reach < LARGEST_SUM
    if not fit or {type(count) for count in counts} != {int}:
        raise TypeError(f"its weight, senders and reach are {counts}")
    if {upper.dtype, lower.dtype} != {torch.int64} or dtype not in _DTYPES:
        raise TypeError(f"its dtypes are {upper.dtype}, {lower.dtype} and {dtype}")
    over = upper.clamp(-most, most).ne(upper).any() or (lower >> CARRY).any()
    if upper.shape != lower.shape or bool(over):
        raise TypeError("its counts are of two shapes, or out of range")
    flat = lower.flatten(), upper.flatten()
    return _Total(dtype, tuple(lower.shape), *flat, *counts, load=2**CARRY).copy()


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _bits(lifted: int) -> int:
    """So many times the bits of the constant, modulo 2**64."""
    return (lifted * _LOWER_BITS + 2**63) % 2**64 - 2**63


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


def peaks_of(values: Mapping[str, Tensor]) -> dict[str, int]:
    """Each tensor's largest magnitude in steps of the grid, rounded up, if all can be added."""
    _require_floats(values)
    return _in_steps(values, magnitudes(values))


def looked_at(
    values: Mapping[str, Tensor], base: Mapping[str, Tensor]
) -> tuple[dict[str, int], dict[str, float]]:
    """The same, and each tensor's squared distance from the base, in one pass."""
    _require_floats(values)
    peaks, squares = extents(values, base)
    return _in_steps(values, peaks), squares


def _require_floats(values: Mapping[str, Tensor]) -> None:
    for name, tensor in values.items():
        if tensor.dtype not in _FLOATS:
            raise SumError(f"{name} is {_dtype(tensor)}: send one of {', '.join(_DTYPES)}")


def _in_steps(values: Mapping[str, Tensor], peaks: Mapping[str, float]) -> dict[str, int]:
    for name, peak in peaks.items():
        if not peak <= LARGEST_VALUE:  # so that NaN is refused too
            ends = [float(end) for end in torch.aminmax(values[name].detach())]
            worst = next(end for end in ends if not abs(end) <= LARGEST_VALUE)
            raise SumError(f"{name} holds {worst}: send finite values up to {LARGEST_VALUE:.0f}")
    return {name: math.ceil(peak / GRID) for name, peak in peaks.items()}
