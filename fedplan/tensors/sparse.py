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
    Tensors,
    TensorSpec,
    max_magnitude,
    require_finite,
)


@dataclass(frozen=True)
class Sparse(Codec):
    """Sends the `fraction` of numbers or rows with the largest norm; the rest decode to zero.

    `part_name` is the name of the part with the indices: "index" selects single numbers, "rows"
    selects rows. With "rows", a tensor of fewer than two dimensions is sent whole.
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

    def encode_tensor(
        self, value: Tensor, base: Tensor, generator: torch.Generator
    ) -> dict[str, Tensor]:
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
        items[_checked_indices(parts[self.part_name], len(items))] = require_finite(parts[""])
        return items.reshape(spec.shape)

    def max_error(self, value: Tensor, base: Tensor, later: float) -> float:
        item_shape = self._item_shape(require_finite(value).shape)
        if item_shape is None:
            return later
        dropped = value.reshape(item_shape).clone()
        dropped[_largest_items(dropped, self.fraction)] = 0
        return max(later, max_magnitude(dropped))

    def _item_shape(self, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        """Return the shape whose first dimension counts the items; None if all is sent."""
        if self.part_name == "index":
            return (math.prod(shape),)
        return tuple(shape) if len(shape) >= 2 else None


def _sent_count(fraction: float, count: int) -> int:
    """Return ceil(fraction * count) in exact arithmetic, so that both ends agree."""
    return math.ceil(Fraction(repr(fraction)) * count)


def _largest_items(items: Tensor, fraction: float) -> Tensor:
    """Return the ascending indices of the items with the largest norms; first ones win ties.

    Raises CodecError for 2**31 items or more.
    """
    if len(items) >= 2**31:
        raise CodecError(f"{len(items)} items are too many for an index of 32 bits")
    count = _sent_count(fraction, len(items))
    if count == len(items):
        return torch.arange(count, device=items.device)
    norms = _item_norms(items)
    threshold = norms.kthvalue(len(items) - count + 1).values
    above = (norms > threshold).nonzero().flatten()
    tied = (norms == threshold).nonzero().flatten()
    return torch.cat([above, tied[: count - len(above)]]).sort().values


def _item_norms(items: Tensor) -> Tensor:
    """Return the L2 norm of each item, up to a common factor for float64 rows."""
    if items.dim() == 1:
        return items.abs().to(TensorSpec.of(items).compute_dtype)
    rows = items.reshape(len(items), math.prod(items.shape[1:]))
    if rows.dtype == torch.float64:  # squares of float64 could overflow
        rows = rows / (max_magnitude(rows) or 1.0)
    return cast("Tensor", torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64))


def _checked_indices(indices: Tensor, length: int) -> Tensor:
    """Return the indices as int64; raise CodecError unless ascending, distinct and in range."""
    wide = indices.to(torch.int64)
    if len(wide) and (wide[0] < 0 or wide[-1] >= length or (wide.diff() <= 0).any()):
        raise CodecError(f"its index does not point at different items out of {length} in order")
    return wide
