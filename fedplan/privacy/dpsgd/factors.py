# SPDX-License-Identifier: Apache-2.0
"""Factors: the gradients of many examples at once, none of them written out.

The gradient of a dense layer's weight is, for each example, a sum over its tokens of slopes times
inputs. Its length, and a weighted sum over the examples, follow from these factors alone (Li et
al., Large Language Models Can Be Strong Differentially Private Learners, 2022; Bu et al.,
Differentially Private Optimization on Large Model at Small Cost, 2023).

Why what is added is no longer than its bound says, whatever the factors hold. Let g be the exact
gradient that the factors stand for, R its `reaches` (the sum of its terms' lengths, so |g| <= R)
and u = 2**-53. Lengths and sums are in float64, where no product of float32 numbers is too large
or too small. A sum of n products is wrong by at most nu of the sum of their sizes, in any order
(Higham, Accuracy and Stability of Numerical Algorithms, 2002, section 3.1), and no sum here is of
more than n = 2**24. So a computed square is wrong by at most 2nu R**2, and what is added has the
length |g| + nu R at most, whose square is at most |g|**2 + 3nu R**2. Together 5nu R**2 is less than
`ROUNDING` R**2, which `bounds` adds. A gradient whose terms cancel to less than 2**-13 of them is
thus taken for longer than it is, and clipped to less than it might be: that is the safe side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast, final

import torch
from torch import Tensor

from fedplan.privacy.dpsgd.per_example import square
from fedplan.privacy.errors import PrivacyError

ROUNDING = 2.0**-26
"""What rounding may do to a squared length, as a share of the squared reach: see above."""
_SMALL = 2**14
_ROWS = 2**9
"""Tokens that are made float64 at a time: their scratch stays in a core's cache."""


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
        width, height = self.inputs.shape[2], self.slopes.shape[2]
        if self._written and width * height <= _SMALL:
            return Whole(self.slopes.double().mT @ self.inputs.double()).squares()
        pairs = zip(self.slopes, self.inputs, strict=True)
        return torch.stack([self._square(s.double(), i.double()) for s, i in pairs])

    def _square(self, slopes: Tensor, inputs: Tensor) -> Tensor:
        if self._written:
            return square(slopes.T @ inputs)
        return _total((inputs @ inputs.T) * (slopes @ slopes.T))

    @property
    def _written(self) -> bool:
        tokens, width, height = *self.inputs.shape[1:], self.slopes.shape[2]
        return tokens * (width + height) > width * height

    def reaches(self) -> Tensor:
        """The length of each gradient, were its tokens all to add up."""
        return (_lengths(self.inputs) * _lengths(self.slopes)).sum(1)

    def add(self, total: Tensor, scales: Tensor) -> None:
        """Add the weighted sum of the gradients to a total in float64."""
        weights = scales.repeat_interleave(self.slopes.shape[1])[:, None]
        parts = map(_portions, (self.slopes.flatten(0, 1), self.inputs.flatten(0, 1), weights))
        for slopes, inputs, weight in zip(*parts, strict=True):
            sides = (slopes.double() * weight, inputs.double())
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
        pairs = zip(self.ids, self.slopes.double(), strict=True)
        return torch.stack([_total((s @ s.T) * (i[:, None] == i)) for i, s in pairs])

    def reaches(self) -> Tensor:
        """The length of each gradient, were its tokens all to add up."""
        return _lengths(self.slopes).sum(1)

    def add(self, total: Tensor, scales: Tensor) -> None:
        """Add the weighted sum of the gradients to a total in float64."""
        slopes = (self.slopes.double() * scales[:, None, None]).flatten(0, 1)
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

    def reaches(self) -> Tensor:
        """The length of each gradient: it is one term."""
        return self.squares().sqrt()

    def add(self, total: Tensor, scales: Tensor) -> None:
        """Add the weighted sum of the gradients to a total in float64."""
        total.add_((scales @ self.each.flatten(1).double()).view(total.shape))


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


def bounds(factors: tuple[Factor, ...]) -> Tensor:
    """No less than the squared length of what `add` will add for each example, unscaled.

    The example's gradient of one tensor is the sum of some factors.
    """
    reaches = torch.stack([factor.reaches().cpu() for factor in factors]).sum(0)
    return _squares(factors) + ROUNDING * reaches.square()


def _squares(factors: tuple[Factor, ...]) -> Tensor:
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
    slopes = dense.slopes.gather(2, ids).double()
    sides = zip(dense.inputs.double(), table.slopes.double(), slopes, strict=True)
    return torch.stack([_total((inputs @ rows.T) * there) for inputs, rows, there in sides])


def _portions(rows: Tensor) -> tuple[Tensor, ...]:
    return cast("tuple[Tensor, ...]", rows.split(_ROWS))


def _lengths(vectors: Tensor) -> Tensor:
    """The length of every vector, example by example."""
    return torch.stack([each.double().square().sum(1).sqrt() for each in vectors])


def _total(products: Tensor) -> Tensor:
    """Their sum, row by row: no sum is then longer than a side."""
    return products.sum(1).sum()
