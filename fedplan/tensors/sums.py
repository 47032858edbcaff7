# SPDX-License-Identifier: Apache-2.0
"""Sums: weighted sums of named tensors with the same bits in whatever order they are added."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from fedplan.errors import FedplanError
from fedplan.tensors.named import all_finite
from fedplan.tensors.stretches import extents, flattened, magnitudes
from fedplan.tensors.totals import ADDED, CARRY, FLOATS, GRID, Arena, Total, dtype_of

LARGEST_VALUE = 2.0**40
LARGEST_WEIGHT = 2**27
LARGEST_SUM = 2**98
"""In steps of the grid: the sum of weight times the largest magnitude stays below it."""

_FACTS = ("dtype", "weight", "senders", "reach")
_RAW = (*_FACTS, "shape", "load", "lifted")


class SumError(FedplanError):
    """A tensor, a weight or a partial sum that cannot be added exactly."""


class ExactSum:
    """A running weighted sum of named tensors, exactly associative and commutative.

    Each value is rounded once to a multiple of GRID; from there on all is whole numbers. So the
    bits do not depend on the order of updates or on how partial sums were merged, and the memory,
    8 or 16 bytes a number, does not depend on how many came. An error leaves the sum as it was.
    """

    def __init__(self) -> None:
        self._totals: dict[str, Total] = {}
        self._arenas: list[Arena] = []

    @torch.no_grad()
    def add(
        self, values: Mapping[str, Tensor], weight: int, peaks: Mapping[str, int] | None = None
    ) -> None:
        """Add one sender's tensors, each times the weight. Each name has senders of its own.

        `peaks` are those of just these tensors, if somebody has looked at them already.
        """
        peaks, flat = self.require(values, weight, peaks), flattened(values)
        if fresh := {name: value for name, value in values.items() if name not in self._totals}:
            arena = Arena.of({name: flat[name] for name in fresh})
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
            self._check(name, dtype_of(tensor), tuple(tensor.shape), weight * found[name])
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
            said: dict[str, Any] = {**fact, "shape": tuple(fact["shape"])}
            lower, upper = tensors[f"{name}.lower"], tensors.get(f"{name}.upper")
            found._totals[name] = Total(lower=lower, upper=upper, **said)
        return found

    def _sorted(self) -> list[tuple[str, Total]]:
        return sorted(self._totals.items())


def _read(upper: Tensor, lower: Tensor, dtype: str, weight: int, senders: int, reach: int) -> Total:
    """A settled total, or a TypeError that says what is wrong with it."""
    counts, most = (weight, senders, reach), (reach >> CARRY) + 1
    fit = 1 <= senders <= weight <= senders * LARGEST_WEIGHT and 0 <= reach < LARGEST_SUM
    if not fit or {type(count) for count in counts} != {int}:
        raise TypeError(f"its weight, senders and reach are {counts}")
    if {upper.dtype, lower.dtype} != {torch.int64} or dtype not in ADDED:
        raise TypeError(f"its dtypes are {upper.dtype}, {lower.dtype} and {dtype}")
    over = upper.clamp(-most, most).ne(upper).any() or (lower >> CARRY).any()
    if upper.shape != lower.shape or bool(over):
        raise TypeError("its counts are of two shapes, or out of range")
    flat = lower.flatten(), upper.flatten()
    return Total(dtype, tuple(lower.shape), *flat, *counts, load=2**CARRY).copy()


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
        if tensor.dtype not in FLOATS:
            raise SumError(f"{name} is {dtype_of(tensor)}: send one of {', '.join(ADDED)}")


def _in_steps(values: Mapping[str, Tensor], peaks: Mapping[str, float]) -> dict[str, int]:
    for name, peak in peaks.items():
        if not peak <= LARGEST_VALUE:  # so that NaN is refused too
            ends = [float(end) for end in torch.aminmax(values[name].detach())]
            worst = next(end for end in ends if not abs(end) <= LARGEST_VALUE)
            raise SumError(f"{name} holds {worst}: send finite values up to {LARGEST_VALUE:.0f}")
    return {name: math.ceil(peak / GRID) for name, peak in peaks.items()}
