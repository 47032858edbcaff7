# SPDX-License-Identifier: Apache-2.0
"""Exact sums: weighted sums of named tensors, bitwise equal in whatever order they are added."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from fedplan.errors import FedplanError
from fedplan.tensors.accumulator import (
    CARRY_BITS,
    DTYPE_BY_NAME,
    GRID,
    SUMMABLE_DTYPES,
    Accumulator,
    AccumulatorBuffer,
    dtype_name,
)
from fedplan.tensors.chunks import (
    ChunkedTensors,
    chunk_tensors,
    max_magnitudes,
    peaks_and_squared_distances,
)
from fedplan.tensors.named import all_finite

MAX_VALUE = 2.0**40
"""Largest magnitude of a value that can be added."""
MAX_WEIGHT = 2**27
"""Largest weight of one update."""
MAX_SUM_STEPS = 2**98
"""In grid steps: the sum of weight times the largest magnitude stays below it."""

_FACTS = ("dtype", "weight", "senders", "reach")
_RAW_FACTS = (*_FACTS, "shape", "load", "lifted")


class SumError(FedplanError):
    """A tensor, a weight or a partial sum that cannot be added exactly."""


class ExactSum:
    """A running weighted sum of named tensors on the CPU, exactly associative and commutative.

    Call `add` for each sender, or `merge` with another sum, then `mean`, which can be repeated.
    Each value is rounded once to a multiple of GRID; all further arithmetic is on integers. So the
    bits depend neither on the order of updates nor on how partial sums are merged, and the memory
    is 8 or 16 bytes a number for any number of updates. A method that raises changes nothing.
    """

    def __init__(self) -> None:
        self._accumulators: dict[str, Accumulator] = {}
        self._buffers: list[AccumulatorBuffer] = []

    @torch.no_grad()
    def add(
        self,
        values: Mapping[str, Tensor],
        weight: int,
        peaks: Mapping[str, int] | None = None,
        chunked: ChunkedTensors | None = None,
    ) -> None:
        """Add one sender's `values`, each times `weight`; senders may send different names.

        Does not keep the tensors. `peaks`, `chunked`: the `peak_steps` and chunks of `values`, if
        already computed. Raises SumError as `validate` does.
        """
        peaks = self.validate(values, weight, peaks)
        if new := {name: value for name, value in values.items() if name not in self._accumulators}:
            buffer, accumulators = AccumulatorBuffer.allocate(new)
            self._buffers.append(buffer)
            self._accumulators |= accumulators
        narrow = {name for name in values if self._accumulators[name].reserve(weight, peaks[name])}
        chunked = chunked or chunk_tensors(values)
        added = set[str]()
        for buffer in self._buffers:
            added |= buffer.add_chunks(values, chunked, narrow, weight)
        for name in values.keys() - added:
            flat = values[name].reshape(-1)
            self._accumulators[name].add(flat, weight, wide=name not in narrow)

    def validate(
        self, values: Mapping[str, Tensor], weight: int, peaks: Mapping[str, int] | None = None
    ) -> dict[str, int]:
        """Check that `add` would accept these arguments; changes nothing.

        Returns the `peak_steps` of the values, or a copy of `peaks`. Raises SumError for a weight
        outside 1..MAX_WEIGHT, another dtype or shape than before under the same name, or a possible
        overflow; without `peaks` also for a dtype that is no float, and a non-finite or too large
        value.
        """
        if type(weight) is not int or not 1 <= weight <= MAX_WEIGHT:
            raise SumError(
                f"weight {weight!r} is not an int from 1 to {MAX_WEIGHT}: count examples"
            )
        peaks = dict(peaks) if peaks is not None else peak_steps(values)
        for name, tensor in values.items():
            self._require_fit(name, dtype_name(tensor), tuple(tensor.shape), weight * peaks[name])
        return peaks

    def merge(self, other: ExactSum) -> None:
        """Add all updates of the sum `other`, as if each had been added here.

        Keeps no tensor of `other`, and changes no result of `other`. Raises SumError for two dtypes
        or shapes of a name, or a possible overflow.
        """
        self.require_mergeable(other)
        new = {n: a.copy() for n, a in other._accumulators.items() if n not in self._accumulators}
        for name in other._accumulators.keys() - new.keys():
            self._accumulators[name].merge(other._accumulators[name])
        self._accumulators |= new

    def require_mergeable(self, other: ExactSum) -> None:
        """Raise SumError if `merge` would not accept the sum `other`; change nothing."""
        for name, theirs in other._accumulators.items():
            self._require_fit(name, theirs.dtype, theirs.shape, theirs.reach)

    def _require_fit(self, name: str, dtype: str, shape: tuple[int, ...], reach: int) -> None:
        """Raise SumError if the sum of `name` has another dtype or shape, or could overflow.

        `reach`: largest magnitude, in grid steps, that the caller wants to add.
        """
        existing = self._accumulators.get(name)
        if existing and (existing.dtype, existing.shape) != (dtype, shape):
            before = f"but was {existing.dtype} {existing.shape} before"
            raise SumError(f"{name} is {dtype} {shape}, {before}: send all of a name alike")
        if reach + (existing.reach if existing else 0) >= MAX_SUM_STEPS:
            limit = f"{MAX_SUM_STEPS * GRID:.0f}"
            raise SumError(f"the sum of {name} could pass {limit}: give smaller weights")

    def mean(self, divisors: Mapping[str, int] | None = None) -> dict[str, Tensor]:
        """Return by name the sum divided by its total weight, or by `divisors[name]`.

        The means are new tensors in the dtype and shape of the added tensors; the sum can go on.
        Raises SumError if a divisor is not a positive int, or a float16 mean overflows.
        """
        divisors = self.weights() if divisors is None else divisors
        for name in self._accumulators:
            divisor = divisors.get(name)
            if type(divisor) is not int or divisor < 1:
                raise SumError(f"{name} cannot be divided by {divisor!r}: give a positive int")
        joined = {
            name: mean
            for buffer in self._buffers
            for name, mean in buffer.joined_means(self._accumulators, divisors)
        }
        means = {
            name: joined[name] if name in joined else accumulator.divide(divisors[name])
            for name, accumulator in self._sorted()
        }
        for name, mean in means.items():
            # No sum is too large for the other dtypes.
            if mean.dtype is torch.float16 and not all_finite(mean):
                raise SumError(f"the mean of {name} is too large for {mean.dtype}: divide by more")
        return means

    def weights(self) -> dict[str, int]:
        """Return the total weight of the updates of each name."""
        return {name: accumulator.weight for name, accumulator in self._sorted()}

    def senders(self) -> dict[str, int]:
        """Return the number of updates of each name."""
        return {name: accumulator.senders for name, accumulator in self._sorted()}

    @property
    def nbytes(self) -> int:
        """Bytes of the counts in memory."""
        accumulators = self._accumulators.values()
        return sum(a.lower.nbytes * (1 + (a.upper is not None)) for a in accumulators)

    def to_tensors(self) -> tuple[dict[str, Tensor], dict[str, object]]:
        """Return the sum as (copied int64 tensors `name.upper` and `name.lower`, JSON by name).

        Equal sums give equal bits. Normalizes the counts in place, which changes no result.
        """
        tensors, facts = dict[str, Tensor](), dict[str, object]()
        for name, accumulator in self._sorted():
            accumulator.normalize()
            assert accumulator.upper is not None
            tensors[f"{name}.upper"] = accumulator.upper.view(accumulator.shape).clone()
            tensors[f"{name}.lower"] = accumulator.lower.view(accumulator.shape).clone()
            facts[name] = {key: getattr(accumulator, key) for key in _FACTS}
        return tensors, facts

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], facts: Mapping[str, object]) -> ExactSum:
        """Return the sum of the tensors and the JSON `facts` that `to_tensors` returned.

        Copies the tensors. Raises SumError if a part is missing or invalid.
        """
        total = cls()
        for name, fact in facts.items():
            try:
                counts = tensors[f"{name}.upper"], tensors[f"{name}.lower"]
                total._accumulators[name] = _read_accumulator(*counts, **cast(Any, fact))
            except (KeyError, TypeError) as error:
                raise SumError(
                    f"{name} is not part of a sum ({error}): read what `to_tensors` wrote"
                ) from error
        return total

    def export_raw(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return (count tensors, JSON facts by name) for `from_raw`.

        The tensors are the sum's own, not copied and not normalized: use or send before the next
        `add`.
        """
        tensors, facts = dict[str, Tensor](), dict[str, Any]()
        for name, accumulator in self._sorted():
            tensors[f"{name}.lower"] = accumulator.lower
            if accumulator.upper is not None:
                tensors[f"{name}.upper"] = accumulator.upper
            facts[name] = {key: getattr(accumulator, key) for key in _RAW_FACTS}
        return tensors, facts

    @classmethod
    def from_raw(cls, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> ExactSum:
        """Return the sum of the tensors and `facts` that `export_raw` returned.

        The sum takes over the tensors, and later calls change the tensors. Nothing is checked.
        """
        total = cls()
        for name, fact in facts.items():
            fields: dict[str, Any] = {**fact, "shape": tuple(fact["shape"])}
            lower, upper = tensors[f"{name}.lower"], tensors.get(f"{name}.upper")
            total._accumulators[name] = Accumulator(lower=lower, upper=upper, **fields)
        return total

    @classmethod
    def read_raw(
        cls,
        tensors: Mapping[str, Tensor],
        facts: Mapping[str, Any],
        expected: Mapping[str, tuple[Tensor, int, int]],
    ) -> ExactSum:
        """As `from_raw`, of another party that may be wrong; copies the tensors.

        `expected`: by name a tensor of the dtype and shape, the total weight, and the number of
        updates. Raises SumError if anything differs from these, is missing, left over, or of
        another type, or if a mean is no value that an update could have.
        """
        names = {f"{name}.{part}" for name in expected for part in ("lower", "upper")}
        if not isinstance(facts, dict) or facts.keys() != expected.keys() or tensors.keys() - names:
            raise SumError("the sum has other names than its updates")
        counts, checked = dict[str, Tensor](), dict[str, Any]()
        for name, (like, weight, senders) in expected.items():
            known = (dtype_name(like), tuple(like.shape), weight, senders)
            fact, bounds = facts[name], {"reach": MAX_SUM_STEPS, "load": 2**63, "lifted": 2**63}
            try:
                claim = (fact["dtype"], tuple(fact["shape"]), fact["weight"], fact["senders"])
                limits = {key: fact[key] for key in bounds}
            except (KeyError, TypeError) as error:
                raise SumError(f"{name} is not part of a sum: {error!r}") from error
            parts = {k: tensors[k] for k in (f"{name}.lower", f"{name}.upper") if k in tensors}
            fits = [t.dtype == torch.int64 and t.shape == (like.numel(),) for t in parts.values()]
            if claim != known or f"{name}.lower" not in parts or not all(fits):
                raise SumError(f"the sum of {name} is {claim}, and its updates are {known}")
            if any(type(n) is not int or not 0 <= n < bounds[key] for key, n in limits.items()):
                raise SumError(f"the sum of {name} has {limits}, out of range")
            counts |= {key: part.clone() for key, part in parts.items()}
            checked[name] = {
                **limits,
                **dict(zip(("dtype", "shape", *_FACTS[1:3]), known, strict=True)),
            }
        total = cls.from_raw(counts, checked)
        for accumulator in total._accumulators.values():
            # Of the counts themselves: a claim that is too large would leave no room for others.
            accumulator.normalize()
            accumulator.reach, upper = 0, accumulator.upper
            if upper is not None and upper.numel():
                largest = max(abs(int(extreme)) for extreme in upper.aminmax())
                accumulator.reach = (largest + 1) << CARRY_BITS
        peak_steps(total.mean())
        return total

    def _sorted(self) -> list[tuple[str, Accumulator]]:
        return sorted(self._accumulators.items())


def _read_accumulator(
    upper: Tensor, lower: Tensor, dtype: str, weight: int, senders: int, reach: int
) -> Accumulator:
    """Return an accumulator with copies of the counts and with the other arguments as fields.

    `upper` and `lower` must be normalized (each lower count in 0..2**CARRY_BITS - 1). Raises
    TypeError if an argument has a wrong type, is out of range, or contradicts another.
    """
    facts, limit = (weight, senders, reach), (reach >> CARRY_BITS) + 1
    valid = 1 <= senders <= weight <= senders * MAX_WEIGHT and 0 <= reach < MAX_SUM_STEPS
    if not valid or {type(fact) for fact in facts} != {int}:
        raise TypeError(f"its weight, senders and reach are {facts}")
    if {upper.dtype, lower.dtype} != {torch.int64} or dtype not in DTYPE_BY_NAME:
        raise TypeError(f"its dtypes are {upper.dtype}, {lower.dtype} and {dtype}")
    too_large = upper.clamp(-limit, limit).ne(upper).any() or (lower >> CARRY_BITS).any()
    if upper.shape != lower.shape or bool(too_large):
        raise TypeError("its counts are of two shapes, or out of range")
    counts = lower.flatten(), upper.flatten()
    return Accumulator(dtype, tuple(lower.shape), *counts, *facts, load=2**CARRY_BITS).copy()


def peak_steps(values: Mapping[str, Tensor]) -> dict[str, int]:
    """Return each tensor's largest magnitude in grid steps, rounded up.

    Raises SumError for a dtype or value that cannot be added.
    """
    _require_floats(values)
    return _in_steps(values, max_magnitudes(chunk_tensors(values)))


def peak_steps_and_squared_distances(
    values: Mapping[str, Tensor], chunked: ChunkedTensors, base: ChunkedTensors
) -> tuple[dict[str, int], dict[str, float]]:
    """Return (`peak_steps` of `values`, squared L2 distances from `base`), each by name.

    `chunked`: the chunks of `values`; `base` has the same ones. Reads the values once. Raises
    SumError as `peak_steps` does.
    """
    _require_floats(values)
    peaks, squares = peaks_and_squared_distances(chunked, base)
    return _in_steps(values, peaks), squares


def _require_floats(values: Mapping[str, Tensor]) -> None:
    for name, tensor in values.items():
        if tensor.dtype not in SUMMABLE_DTYPES:
            raise SumError(
                f"{name} is {dtype_name(tensor)}: send one of {', '.join(DTYPE_BY_NAME)}"
            )


def _in_steps(values: Mapping[str, Tensor], peaks: Mapping[str, float]) -> dict[str, int]:
    """Return the peaks (largest magnitudes of `values`) in grid steps, rounded up.

    Raises SumError, with the value, for a peak that is NaN or over MAX_VALUE.
    """
    for name, peak in peaks.items():
        if not peak <= MAX_VALUE:  # so that NaN is refused too
            extremes = [float(extreme) for extreme in torch.aminmax(values[name].detach())]
            worst = next(extreme for extreme in extremes if not abs(extreme) <= MAX_VALUE)
            raise SumError(f"{name} holds {worst}: send finite values up to {MAX_VALUE:.0f}")
    return {name: math.ceil(peak / GRID) for name, peak in peaks.items()}
