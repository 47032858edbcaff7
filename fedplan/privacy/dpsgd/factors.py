# SPDX-License-Identifier: Apache-2.0
"""Factors of per-example gradients: norms and weighted sums without writing the gradients out.

The gradient of a dense layer's weight is, for each example, a sum over its tokens of outer products
of the output gradient (backprop) and the input (activation). Its norm, and a weighted sum over the
examples, follow from these factors alone (Li et al., Large Language Models Can Be Strong
Differentially Private Learners, 2022; Bu et al., Differentially Private Optimization on Large Model
at Small Cost, 2023).

Why the norm of an added gradient is never above its bound, whatever the factors hold: let g be the
exact gradient of the factors, R its `term_norm_sums` (the sum of the norms of its terms, so
|g| <= R) and u = 2**-53. Norms and sums are in float64, where no product of float32 numbers
overflows or underflows. A sum of n products has an error of at most nu times the sum of their
sizes, in any order (Higham, Accuracy and Stability of Numerical Algorithms, 2002, section 3.1), and
no sum here is of more than n = 2**24. So a computed square has an error of at most 2nu R**2, and an
added gradient has a norm of at most |g| + nu R, whose square is at most |g|**2 + 3nu R**2. Together
5nu R**2 is less than `ROUNDING_SHARE` R**2, which `squared_norm_bounds` adds. A gradient whose
terms cancel to less than 2**-13 of them thus counts as longer than it is, and is clipped more than
necessary, which is safe.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast, final

import torch
from torch import Tensor

from fedplan.errors import PrivacyError
from fedplan.privacy.dpsgd.per_example import squared_norm

ROUNDING_SHARE = 2.0**-26
"""Largest rounding error of a squared norm, relative to the squared sum of term norms."""
_SMALL = 2**14
"""Numbers of a weight up to which gradients of all examples are written out at once."""
_CHUNK = 2**9
"""Tokens that are made float64 at a time, so that temporary tensors stay in the cache."""


class GhostClippingError(PrivacyError):
    """The model or loss cannot be trained by ghost clipping; examples must run one by one."""


@final
@dataclass(frozen=True)
class DenseFactor:
    """Per-example gradients of a dense layer's weight, held as layer inputs and output gradients.

    activations, backprops: [examples, tokens, inputs or outputs]. output_dim: the weight's
    dimension of outputs: 0 as in nn.Linear, 1 as in Conv1D of GPT-2. trained_outputs: indices of
    the trained outputs, which `backprops` is restricted to; None: all. As every Factor:
    `squared_norms` and `term_norm_sums` (upper bounds of the norms) give one float64 per example,
    `select` restricts to some examples, `add_weighted_sum` adds to a total in place.
    """

    activations: Tensor
    backprops: Tensor
    output_dim: int = 0
    trained_outputs: Tensor | None = None

    def select(self, chosen: Tensor) -> DenseFactor:
        """Restrict to some examples, by index or mask."""
        return replace(self, activations=self.activations[chosen], backprops=self.backprops[chosen])

    def squared_norms(self) -> Tensor:
        """Squared norm of each example's gradient, in float64."""
        tokens, width, height = *self.activations.shape[1:], self.backprops.shape[2]
        # Writing a gradient out costs less than Gram matrices of its tokens.
        is_full_cheaper = tokens * (width + height) > width * height
        if is_full_cheaper and width * height <= _SMALL:
            full = self.backprops.double().mT @ self.activations.double()
            return FullGradients(full).squared_norms()
        squares = list[Tensor]()
        for backprops, activations in zip(self.backprops, self.activations, strict=True):
            b, a = backprops.double(), activations.double()
            square = (
                squared_norm(b.T @ a) if is_full_cheaper else _sum_by_rows((a @ a.T) * (b @ b.T))
            )
            squares.append(square)
        return torch.stack(squares)

    def term_norm_sums(self) -> Tensor:
        """Upper bound of each gradient's norm: the sum of the norms of its terms, one per token."""
        return (_norms(self.activations) * _norms(self.backprops)).sum(1)

    def add_weighted_sum(self, total: Tensor, weights: Tensor) -> None:
        """Add each example's gradient times the example's weight to a float64 total, in place."""
        token_weights = weights.repeat_interleave(self.backprops.shape[1])[:, None]
        sides = (self.backprops.flatten(0, 1), self.activations.flatten(0, 1), token_weights)
        chunks = (cast("tuple[Tensor, ...]", side.split(_CHUNK)) for side in sides)
        for backprops, activations, weight in zip(*chunks, strict=True):
            pair = (backprops.double() * weight, activations.double())
            left, right = pair if self.output_dim == 0 else pair[::-1]
            if self.trained_outputs is None:
                total.addmm_(left.T, right)
            else:
                total.index_add_(self.output_dim, self.trained_outputs, left.T @ right)


@final
@dataclass(frozen=True)
class EmbeddingFactor:
    """Per-example gradients of an embedding table, [examples, tokens], as a Factor."""

    ids: Tensor
    backprops: Tensor

    def select(self, chosen: Tensor) -> EmbeddingFactor:
        return EmbeddingFactor(self.ids[chosen], self.backprops[chosen])

    def squared_norms(self) -> Tensor:
        """Squared norm of each example's gradient: tokens with the same id share a row."""
        pairs = zip(self.ids, self.backprops.double(), strict=True)
        return torch.stack([_sum_by_rows((b @ b.T) * (i[:, None] == i)) for i, b in pairs])

    def term_norm_sums(self) -> Tensor:
        return _norms(self.backprops).sum(1)

    def add_weighted_sum(self, total: Tensor, weights: Tensor) -> None:
        weighted = (self.backprops.double() * weights[:, None, None]).flatten(0, 1)
        total.index_add_(0, self.ids.flatten(), weighted)


@final
@dataclass(frozen=True)
class FullGradients:
    """Per-example gradients of a small tensor, [examples, *shape], with a Factor's methods."""

    gradients: Tensor

    def select(self, chosen: Tensor) -> FullGradients:
        return FullGradients(self.gradients[chosen])

    def squared_norms(self) -> Tensor:
        return self.gradients.flatten(1).double().square().sum(1)

    def term_norm_sums(self) -> Tensor:
        """Norm of each example's gradient: it is one term."""
        return self.squared_norms().sqrt()

    def add_weighted_sum(self, total: Tensor, weights: Tensor) -> None:
        total.add_((weights @ self.gradients.flatten(1).double()).view(total.shape))


Factor = DenseFactor | EmbeddingFactor | FullGradients
"""Per-example gradients of one tensor, in one of three forms."""


def merge_factors(factors: Sequence[Factor]) -> tuple[Factor, ...]:
    """Merge the factors of one tensor's uses in the model; returns at most one of each type."""
    if len(factors) == 1:
        return tuple(factors)
    dense = [f for f in factors if isinstance(f, DenseFactor)]
    embeddings = [f for f in factors if isinstance(f, EmbeddingFactor)]
    full = [f.gradients for f in factors if isinstance(f, FullGradients)]
    merged = list[Factor]()
    if dense:
        activations = torch.cat([f.activations for f in dense], 1)
        backprops = torch.cat([f.backprops for f in dense], 1)
        merged.append(replace(dense[0], activations=activations, backprops=backprops))
    if embeddings:
        ids = torch.cat([f.ids for f in embeddings], 1)
        merged.append(EmbeddingFactor(ids, torch.cat([f.backprops for f in embeddings], 1)))
    if full:
        merged.append(FullGradients(torch.stack(full).sum(0)))
    return tuple(merged)


def squared_norm_bounds(factors: tuple[Factor, ...]) -> Tensor:
    """Upper bound of the squared norm of each example's gradient of one tensor.

    The gradient is the sum of the factors, as `add_weighted_sum` computes it with its rounding.
    Returns [examples], float64, on the CPU. Raises a GhostClippingError for several factors, unless
    they are a dense weight and an embedding table that share the tensor.
    """
    norm_sums = torch.stack([factor.term_norm_sums().cpu() for factor in factors]).sum(0)
    squares = torch.stack([factor.squared_norms().cpu() for factor in factors]).sum(0)
    match factors:
        case (_,):
            pass
        case (DenseFactor(output_dim=0, trained_outputs=None) as dense, EmbeddingFactor() as table):
            # Inner products of the two gradients, at the rows of the table's ids.
            ids = table.ids[:, None, :].expand(*dense.backprops.shape[:2], -1)
            gathered = dense.backprops.gather(2, ids).double()
            triples = zip(
                dense.activations.double(), table.backprops.double(), gathered, strict=True
            )
            products = [_sum_by_rows((a @ b.T) * at_ids) for a, b, at_ids in triples]
            squares = squares + 2 * torch.stack(products).cpu()
        case _:
            raise GhostClippingError(
                "a tensor is used in several ways, whose gradients have no common factors"
            )
    return squares + ROUNDING_SHARE * norm_sums.square()


def _norms(vectors: Tensor) -> Tensor:
    return torch.stack([example.double().square().sum(1).sqrt() for example in vectors])


def _sum_by_rows(products: Tensor) -> Tensor:
    """Sum of a matrix, row by row: no single sum has more terms than a side."""
    return products.sum(1).sum()
