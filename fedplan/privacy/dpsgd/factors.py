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

from fedplan.privacy.dpsgd.per_example import squared_norm
from fedplan.privacy.errors import PrivacyError

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
    """Per-example gradients of a dense layer's weight.

    activations: the layer's inputs, [examples, tokens, inputs].
    backprops: gradients of the loss in its outputs, [examples, tokens, outputs].
    output_dim: dimension of the weight that counts outputs.
    trained_outputs: indices of the trained outputs, which `backprops` is restricted to; None: all.
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
        width, height = self.activations.shape[2], self.backprops.shape[2]
        if self._is_full_cheaper and width * height <= _SMALL:
            full = self.backprops.double().mT @ self.activations.double()
            return FullGradients(full).squared_norms()
        pairs = zip(self.backprops, self.activations, strict=True)
        return torch.stack([self._squared_norm(b.double(), a.double()) for b, a in pairs])

    def _squared_norm(self, backprops: Tensor, activations: Tensor) -> Tensor:
        """Squared norm of one example's gradient, of the gradient itself or of Gram matrices."""
        if self._is_full_cheaper:
            return squared_norm(backprops.T @ activations)
        return _sum_by_rows((activations @ activations.T) * (backprops @ backprops.T))

    @property
    def _is_full_cheaper(self) -> bool:
        """Whether writing a gradient out costs less than Gram matrices of its tokens."""
        tokens, width, height = *self.activations.shape[1:], self.backprops.shape[2]
        return tokens * (width + height) > width * height

    def term_norm_sums(self) -> Tensor:
        """Sum of the norms of each gradient's terms, one per token: an upper bound of its norm."""
        return (_norms(self.activations) * _norms(self.backprops)).sum(1)

    def add_weighted_sum(self, total: Tensor, weights: Tensor) -> None:
        """Add the sum of the gradients, each times its example's weight, to a float64 total."""
        token_weights = weights.repeat_interleave(self.backprops.shape[1])[:, None]
        chunks = map(
            _token_chunks,
            (self.backprops.flatten(0, 1), self.activations.flatten(0, 1), token_weights),
        )
        for backprops, activations, weight in zip(*chunks, strict=True):
            sides = (backprops.double() * weight, activations.double())
            left, right = sides if self.output_dim == 0 else sides[::-1]
            if self.trained_outputs is None:
                total.addmm_(left.T, right)
            else:
                total.index_add_(self.output_dim, self.trained_outputs, left.T @ right)


@final
@dataclass(frozen=True)
class EmbeddingFactor:
    """Per-example gradients of an embedding table.

    ids: [examples, tokens]; backprops: gradients in the embeddings, [examples, tokens, width].
    """

    ids: Tensor
    backprops: Tensor

    def select(self, chosen: Tensor) -> EmbeddingFactor:
        """Restrict to some examples, by index or mask."""
        return EmbeddingFactor(self.ids[chosen], self.backprops[chosen])

    def squared_norms(self) -> Tensor:
        """Squared norm of each example's gradient: tokens with the same id share a row."""
        pairs = zip(self.ids, self.backprops.double(), strict=True)
        return torch.stack([_sum_by_rows((b @ b.T) * (i[:, None] == i)) for i, b in pairs])

    def term_norm_sums(self) -> Tensor:
        """Sum of the norms of each gradient's terms, one per token: an upper bound of its norm."""
        return _norms(self.backprops).sum(1)

    def add_weighted_sum(self, total: Tensor, weights: Tensor) -> None:
        """Add the sum of the gradients, each times its example's weight, to a float64 total."""
        weighted = (self.backprops.double() * weights[:, None, None]).flatten(0, 1)
        total.index_add_(0, self.ids.flatten(), weighted)


@final
@dataclass(frozen=True)
class FullGradients:
    """Per-example gradients of a small tensor, written out; the first dimension is the example."""

    gradients: Tensor

    def select(self, chosen: Tensor) -> FullGradients:
        """Restrict to some examples, by index or mask."""
        return FullGradients(self.gradients[chosen])

    def squared_norms(self) -> Tensor:
        """Squared norm of each example's gradient, in float64."""
        return self.gradients.flatten(1).double().square().sum(1)

    def term_norm_sums(self) -> Tensor:
        """Norm of each example's gradient: it is one term."""
        return self.squared_norms().sqrt()

    def add_weighted_sum(self, total: Tensor, weights: Tensor) -> None:
        """Add the sum of the gradients, each times its example's weight, to a float64 total."""
        total.add_((weights @ self.gradients.flatten(1).double()).view(total.shape))


Factor = DenseFactor | EmbeddingFactor | FullGradients
"""Per-example gradients of one tensor, in one of three forms."""


def merge_factors(factors: Sequence[Factor]) -> tuple[Factor, ...]:
    """Merge the factors of one tensor's uses in the model to at most one of each type."""
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
    """Upper bound of the squared norm of each example's gradient of one tensor, on the CPU.

    The gradient is the sum of the factors, as `add_weighted_sum` adds it, rounding included. Raises
    a GhostClippingError for a combination of factors whose norm is not known.
    """
    norm_sums = torch.stack([factor.term_norm_sums().cpu() for factor in factors]).sum(0)
    return _squared_norms(factors) + ROUNDING_SHARE * norm_sums.square()


def _squared_norms(factors: tuple[Factor, ...]) -> Tensor:
    """Computed squared norm of each example's sum of factors, without a margin for rounding."""
    squares = torch.stack([factor.squared_norms().cpu() for factor in factors]).sum(0)
    match factors:
        case (_,):
            return squares
        case (DenseFactor(output_dim=0, trained_outputs=None) as dense, EmbeddingFactor() as table):
            return squares + 2 * _cross_products(dense, table).cpu()
        case _:
            raise GhostClippingError(
                "a tensor is used in several ways, whose gradients have no common factors"
            )


def _cross_products(dense: DenseFactor, table: EmbeddingFactor) -> Tensor:
    """Inner product, per example, of the two gradients of an embedding tied to a dense weight."""
    examples, tokens = dense.backprops.shape[:2]
    ids = table.ids[:, None, :].expand(examples, tokens, -1)
    gathered = dense.backprops.gather(2, ids).double()
    triples = zip(dense.activations.double(), table.backprops.double(), gathered, strict=True)
    return torch.stack([_sum_by_rows((a @ b.T) * at_ids) for a, b, at_ids in triples])


def _token_chunks(tokens: Tensor) -> tuple[Tensor, ...]:
    return cast("tuple[Tensor, ...]", tokens.split(_CHUNK))


def _norms(vectors: Tensor) -> Tensor:
    """Norm of each token's vector, [examples, tokens], in float64."""
    return torch.stack([example.double().square().sum(1).sqrt() for example in vectors])


def _sum_by_rows(products: Tensor) -> Tensor:
    """Sum of a matrix, row by row: no single sum has more terms than a side."""
    return products.sum(1).sum()
