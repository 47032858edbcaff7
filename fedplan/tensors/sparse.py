# SPDX-License-Identifier: Apache-2.0
"""Sparse: the codec that sends the largest numbers or rows of a tensor, and where they stand."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import cast

import torch
from torch import Tensor

from fedplan.tensors.codecs import Form, Tensors, Wire, WireError, finite, largest


@dataclass(frozen=True)
class Sparse(Wire):
    """A fraction of the numbers, or of the rows; those of smaller magnitude become zero.

    A tensor with fewer than two dimensions has no rows and is kept whole.
    """

    what: str
    fraction: float

    @property
    def text(self) -> str:
        return f"{'prune' if self.what == 'rows' else 'topk'}({self.fraction!r})"

    def form(self, whole: Form) -> dict[str, Form]:
        laid = self._laid(whole.shape)
        if laid is None:
            return {"": whole}
        kept = _share(self.fraction, laid[0])
        return {
            "": Form((kept, *laid[1:]), whole.dtype),
            self.what: Form((kept,), torch.int32),
        }

    def code(self, value: Tensor, base: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        laid = self._laid(finite(value).shape)
        if laid is None:
            return {"": value}
        items = value.reshape(laid)
        kept = _foremost(items, self.fraction)
        return {"": items[kept], self.what: kept.to(torch.int32)}

    def restore(self, parts: Tensors, whole: Form, base: Tensor) -> Tensor:
        laid = self._laid(whole.shape)
        if laid is None:
            return finite(parts[""])
        items = torch.zeros(laid, dtype=whole.dtype, device=base.device)
        items[_places(parts[self.what], len(items))] = finite(parts[""])
        return items.reshape(whole.shape)

    def error(self, value: Tensor, base: Tensor, later: float) -> float:
        laid = self._laid(finite(value).shape)
        if laid is None:
            return later
        rest = value.reshape(laid).clone()
        rest[_foremost(rest, self.fraction)] = 0
        return max(later, largest(rest))

    def _laid(self, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        """The shape in which the first dimension counts what is kept or not."""
        if self.what == "index":
            return (math.prod(shape),)
        return tuple(shape) if len(shape) >= 2 else None


def _share(fraction: float, count: int) -> int:
    """How many of `count` are kept. Reckoned exactly, so that both ends agree."""
    return math.ceil(Fraction(repr(fraction)) * count)


def _foremost(items: Tensor, fraction: float) -> Tensor:
    """Where the items of the largest norm stand, in order; of equal ones the first."""
    if len(items) >= 2**31:
        raise WireError(f"{len(items)} items are too many for an index of 32 bits")
    count = _share(fraction, len(items))
    if count == len(items):
        return torch.arange(count, device=items.device)
    norms = _norms(items)
    edge = norms.kthvalue(len(items) - count + 1).values
    above = (norms > edge).nonzero().flatten()
    level = (norms == edge).nonzero().flatten()
    return torch.cat([above, level[: count - len(above)]]).sort().values


def _norms(items: Tensor) -> Tensor:
    if items.dim() == 1:
        return items.abs().to(Form.of(items).work)
    rows = items.reshape(len(items), math.prod(items.shape[1:]))
    if rows.dtype == torch.float64:  # of which the squares may be beyond the range
        rows = rows / (largest(rows) or 1.0)
    return cast("Tensor", torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64))


def _places(index: Tensor, length: int) -> Tensor:
    """An index, if it points at different items in order."""
    found = index.to(torch.int64)
    if len(found) and (found[0] < 0 or found[-1] >= length or (found.diff() <= 0).any()):
        raise WireError(f"its index does not point at different items out of {length} in order")
    return found
