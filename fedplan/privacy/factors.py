# SPDX-License-Identifier: Apache-2.0
"""Factors: the gradients of many examples at once, none of them written out.

The gradient of a dense layer's weight is, for each example, a sum over its tokens of slopes times
inputs. Its length, and a weighted sum over the examples, follow from these factors alone (Li et
al., Large Language Models Can Be Strong Differentially Private Learners, 2022; Bu et al.,
Differentially Private Optimization on Large Model at Small Cost, 2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from fedplan.privacy.contributions import square
from fedplan.privacy.errors import PrivacyError

_ROUNDING = 1e-6
"""What a product in float32 may be wrong by: it counts as length, so that none is cut short."""


_SMALL = 2**14


class Unfactored(PrivacyError):
    """A use of a trained tensor whose gradients have no factors that are known here."""


@final
@dataclass(frozen=True)
class Outer:
    """Gradients of a dense weight: `inputs` and `slopes` are [examples, tokens, width].

    `dim` is the dimension of the weight that counts outputs. Where only some `outputs` are trained,
    the slopes are theirs.
    """

    inputs: Tensor
    slopes: Tensor
    dim: int = 0
    outputs: Tensor | None = None

    def only(self, chosen: Tensor) -> Outer:
        """Those of some examples."""
        return replace(self, inputs=self.inputs[chosen], slopes=self.slopes[chosen])

    def squares(self) -> Tensor:
        """The squared length of each gradient; where that is cheaper, they are written out."""
        tokens, width, height = *self.inputs.shape[1:], self.slopes.shape[2]
        if tokens * (width + height) > width * height:
            if width * height <= _SMALL:
                return Whole(self.slopes.mT @ self.inputs).squares()
            pairs = zip(self.slopes, self.inputs, strict=True)
            return torch.stack([square(slopes.T @ inputs) for slopes, inputs in pairs])
        products = _products(self.inputs).double() * _products(self.slopes).double()
        return (products + products.abs() * _ROUNDING).sum((1, 2))

    def add(self, total: Tensor, scales: Tensor) -> None:
        """Add the weighted sum of the gradients to a total."""
        slopes = (self.slopes * scales[:, None, None]).flatten(0, 1)
        sides = (slopes, self.inputs.flatten(0, 1))
        left, right = sides if self.dim == 0 else sides[::-1]
        if self.outputs is None:
            total.addmm_(left.T, right)
        else:
            total.index_add_(self.dim, self.outputs, left.T @ right)


@final
@dataclass(frozen=True)
class Lookup:
    """Gradients of an embedding table: `ids` is [examples, tokens], `slopes` has widths too."""

    ids: Tensor
    slopes: Tensor

    def only(self, chosen: Tensor) -> Lookup:
        """Those of some examples."""
        return Lookup(self.ids[chosen], self.slopes[chosen])

    def squares(self) -> Tensor:
        """The squared length of each gradient: tokens with the same id share a row."""
        same = self.ids[:, :, None] == self.ids[:, None, :]
        products = _products(self.slopes).double() * same
        return (products + products.abs() * _ROUNDING).sum((1, 2))

    def add(self, total: Tensor, scales: Tensor) -> None:
        """Add the weighted sum of the gradients to a total."""
        slopes = (self.slopes * scales[:, None, None]).flatten(0, 1)
        total.index_add_(0, self.ids.flatten(), slopes)


@final
@dataclass(frozen=True)
class Whole:
    """Gradients of a small tensor, written out: the examples are the first dimension."""

    each: Tensor

    def only(self, chosen: Tensor) -> Whole:
        """Those of some examples."""
        return Whole(self.each[chosen])

    def squares(self) -> Tensor:
        """The squared length of each gradient."""
        return self.each.flatten(1).double().square().sum(1)

    def add(self, total: Tensor, scales: Tensor) -> None:
        """Add the weighted sum of the gradients to a total."""
        total.add_((scales @ self.each.flatten(1)).view(total.shape))


Factor = Outer | Lookup | Whole


def joined(factors: Sequence[Factor]) -> tuple[Factor, ...]:
    """One factor of each sort: a tensor that is used twice has the tokens of both uses."""
    if len(factors) == 1:
        return tuple(factors)
    outers = [f for f in factors if isinstance(f, Outer)]
    lookups = [f for f in factors if isinstance(f, Lookup)]
    wholes = [f.each for f in factors if isinstance(f, Whole)]
    found = list[Factor]()
    if outers:
        inputs = torch.cat([f.inputs for f in outers], 1)
        slopes = torch.cat([f.slopes for f in outers], 1)
        found.append(replace(outers[0], inputs=inputs, slopes=slopes))
    if lookups:
        ids = torch.cat([f.ids for f in lookups], 1)
        found.append(Lookup(ids, torch.cat([f.slopes for f in lookups], 1)))
    if wholes:
        found.append(Whole(torch.stack(wholes).sum(0)))
    return tuple(found)


def squares(factors: tuple[Factor, ...]) -> Tensor:
    """The squared length of each example's gradient, where that is the sum of some factors."""
    own = torch.stack([factor.squares().cpu() for factor in factors]).sum(0)
    match factors:
        case (_,):
            return own
        case (Outer(dim=0, outputs=None) as dense, Lookup() as table):
            return own + 2 * _crossed(dense, table).cpu()
        case _:
            raise Unfactored("a tensor is used in several ways of which only some have factors")


def _crossed(dense: Outer, table: Lookup) -> Tensor:
    """The product of both gradients of a table that is also the weight of a dense layer."""
    examples, tokens = dense.slopes.shape[:2]
    ids = table.ids[:, None, :].expand(examples, tokens, -1)
    products = (dense.inputs @ table.slopes.mT).double() * dense.slopes.gather(2, ids).double()
    return (products + products.abs() * _ROUNDING).sum((1, 2))


def _products(vectors: Tensor) -> Tensor:
    """Of each example, the products of all its tokens' vectors with each other."""
    return vectors @ vectors.mT
