# SPDX-License-Identifier: Apache-2.0
"""Sparse: the codec that sends the largest numbers or rows of a tensor, with their indices."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import cast

import torch
from torch import Tensor

from fedplan.tensors.codecs import (
    Codec,
    CodecError,
    Parts,
    Tensors,
    TensorSpec,
    max_magnitude,
    require_finite,
)


@dataclass(frozen=True)
class Sparse(Codec):
    """Codec that sends the `fraction` of numbers or rows with the largest norm, rounded up.

    All others decode to zero. `part_name`: "index" selects single numbers (`topk`), "rows" selects
    rows (`prune`); it also names the part with their int32 indices. With "rows", a tensor of fewer
    than two dimensions is sent whole. Encoding raises CodecError for non-finite values; decoding
    also for indices that are not ascending and in range.
    """

    part_name: str
    fraction: float

    @property
    def text(self) -> str:
        return f"{'prune' if self.part_name == 'rows' else 'topk'}({self.fraction!r})"

    def coded_specs(self, spec: TensorSpec) -> dict[str, TensorSpec]:
        item_shape = self._item_shape(spec.shape)
        if item_shape is None:
            return {"": spec}
        count = _sent_count(self.fraction, item_shape[0])
        return {
            "": TensorSpec((count, *item_shape[1:]), spec.dtype),
            self.part_name: TensorSpec((count,), torch.int32),
        }

    def encode_tensor(self, value: Tensor, base: Tensor, generator: torch.Generator) -> Parts:
        item_shape = self._item_shape(require_finite(value).shape)
        if item_shape is None:
            return {"": value}
        items = value.reshape(item_shape)
        indices = _largest_items(items, self.fraction)
        return {"": items[indices], self.part_name: indices.to(torch.int32)}

    def decode_tensor(self, parts: Tensors, spec: TensorSpec, base: Tensor) -> Tensor:
        item_shape = self._item_shape(spec.shape)
        if item_shape is None:
            return require_finite(parts[""])
        items = torch.zeros(item_shape, dtype=spec.dtype, device=base.device)
        values, count = require_finite(parts[""]), len(items)
        indices = parts[self.part_name].to(torch.int64)
        if len(indices) and (indices[0] < 0 or indices[-1] >= count or (indices.diff() <= 0).any()):
            raise CodecError(f"its index does not point at different items out of {count} in order")
        items[indices] = values
        return items.reshape(spec.shape)

    def max_error(self, value: Tensor, base: Tensor, later: float) -> float:
        item_shape = self._item_shape(require_finite(value).shape)
        if item_shape is None:
            return later
        dropped = value.reshape(item_shape).clone()
        dropped[_largest_items(dropped, self.fraction)] = 0
        return max(later, max_magnitude(dropped))

    def _item_shape(self, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        """Return the shape of the items, counted by its first dimension; None to send all."""
        if self.part_name == "index":
            return (math.prod(shape),)
        return tuple(shape) if len(shape) >= 2 else None


def _sent_count(fraction: float, count: int) -> int:
    """Return ceil(fraction * count) in exact arithmetic, so that both ends agree."""
    return math.ceil(Fraction(repr(fraction)) * count)


def _largest_items(items: Tensor, fraction: float) -> Tensor:
    """Return the indices (int64, ascending) of the `fraction` of items with the largest L2 norms.

    An item is a number or a row: an element of the first dimension. Of items with equal norms, the
    first are taken. Raises CodecError for 2**31 items or more.
    """
    if len(items) >= 2**31:
        raise CodecError(f"{len(items)} items are too many for an index of 32 bits")
    count = _sent_count(fraction, len(items))
    if count == len(items):
        return torch.arange(count, device=items.device)
    if items.dim() == 1:
        norms = items.abs().to(TensorSpec.of(items).compute_dtype)
    else:
        rows = items.reshape(len(items), math.prod(items.shape[1:]))
        if rows.dtype == torch.float64:  # squares of float64 could overflow
            rows = rows / (max_magnitude(rows) or 1.0)
        norms = cast("Tensor", torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64))
    threshold = norms.kthvalue(len(items) - count + 1).values
    above = (norms > threshold).nonzero().flatten()
    tied = (norms == threshold).nonzero().flatten()
    return torch.cat([above, tied[: count - len(above)]]).sort().values
