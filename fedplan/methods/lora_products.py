# SPDX-License-Identifier: Apache-2.0
"""Rules to aggregate LoRA: the mean of products B A is not the product of the means of B and A."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from math import inf
from typing import ClassVar, Protocol, cast

import torch
from torch import Tensor

from fedplan.errors import FedplanError

_SvdResult = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class LoraFactors:
    """Tensors of one LoRA layer on the server.

    `a`: the input factor (rank x inputs). `b`: the output factor (outputs x rank). `weight`: the
    frozen weight that LoRA is added to, for rules with `updates_weight`; else None.
    """

    a: Tensor
    b: Tensor
    weight: Tensor | None = None

    @property
    def product(self) -> Tensor:
        """The product B A, in float64."""
        return self.b.double() @ self.a.double()


class ProductRule(Protocol):
    """Callable by which the server makes the next global factors of a LoRA layer.

    `rule(means, product)` returns the next LoraFactors; `means` has the mean of each factor over
    the clients, `product` is the mean of the clients' products B A.
    `is_separate`: factors are averaged separately, and the mean of products is not needed.
    `updates_weight`: the rule also changes the frozen weight, which clients then download.
    """

    is_separate: ClassVar[bool]
    updates_weight: ClassVar[bool]

    @property
    def text(self) -> str:
        """Canonical text: the name of the rule with its settings."""
        ...

    def __call__(self, means: LoraFactors, product: Tensor) -> LoraFactors:
        """Return the next factors and weight, given mean factors and the mean of products B A."""
        ...

    def effective_change(self, before: LoraFactors, after: LoraFactors) -> Tensor:
        """Return the layer's addition to the weight before the round, divided by the LoRA scale."""
        ...


@dataclass(frozen=True)
class SeparateMeans:
    """ProductRule: each factor is the mean over the clients that sent the factor."""

    is_separate: ClassVar[bool] = True
    updates_weight: ClassVar[bool] = False

    @property
    def text(self) -> str:
        return "average_separately()"

    def __call__(self, means: LoraFactors, product: Tensor) -> LoraFactors:
        return means

    def effective_change(self, before: LoraFactors, after: LoraFactors) -> Tensor:
        return after.product


@dataclass(frozen=True)
class SvdOfMean:
    """ProductRule: factors of the layer's rank with the product nearest to the mean of products.

    Computed by a truncated SVD of the mean; the signs of singular vectors are fixed, so that
    results are reproducible. The weight does not change.
    """

    is_separate: ClassVar[bool] = False
    updates_weight: ClassVar[bool] = False

    @property
    def text(self) -> str:
        return "by_svd()"

    def __call__(self, means: LoraFactors, product: Tensor) -> LoraFactors:
        rank, dtype = means.a.shape[0], means.a.dtype
        left, values, right = cast("_SvdResult", torch.linalg.svd(product, full_matrices=False))
        left, values, right = _first_rows(left.T, rank), values[:rank], _first_rows(right, rank)
        # The largest entry of each left vector becomes positive; of equals, the first.
        largest = left.abs().argmax(dim=1, keepdim=True)
        signs = left.gather(1, largest).flatten().sign()
        signs = torch.where(signs == 0, torch.ones_like(signs), signs)
        roots = torch.zeros(rank, dtype=values.dtype)
        roots[: len(values)] = values.sqrt()
        b = (left * (signs * roots)[:, None]).T
        # If both factors of a direction were zero, its gradient would be zero for ever.
        alive = roots.square() > torch.finfo(dtype).eps * roots[0].square()
        a = right * (signs * torch.where(alive, roots, torch.ones_like(roots)))[:, None]
        return replace(means, a=a.to(dtype), b=torch.where(alive, b, 0.0).to(means.b.dtype))

    def effective_change(self, before: LoraFactors, after: LoraFactors) -> Tensor:
        return after.product


@dataclass(frozen=True)
class MeansAndResidual:
    """ProductRule: the mean of each factor; the residual is added to the frozen weight.

    The residual is `scale` times (mean of products - product of means). `scale`: the LoRA scale,
    alpha / r. Needs `LoraFactors.weight`.
    """

    scale: float
    is_separate: ClassVar[bool] = False
    updates_weight: ClassVar[bool] = True

    @property
    def text(self) -> str:
        return f"by_residual(scale={self.scale!r})"

    def __call__(self, means: LoraFactors, product: Tensor) -> LoraFactors:
        assert means.weight is not None
        residual = self.scale * (product - means.product)
        return replace(means, weight=(means.weight.double() + residual).to(means.weight.dtype))

    def effective_change(self, before: LoraFactors, after: LoraFactors) -> Tensor:
        assert before.weight is not None and after.weight is not None
        weight_change = after.weight.double() - before.weight.double()
        return after.product + weight_change / self.scale


def average_separately() -> ProductRule:
    """Return FedIT's rule: average each factor separately; inexact, as means do not multiply."""
    return SeparateMeans()


def by_svd() -> ProductRule:
    """Return FlexLoRA's rule: the truncated SVD of the mean of the products.

    Each factor gets the square root of each singular value. Exact if the mean has at most the rank
    of the layer, the nearest matrix of that rank otherwise.
    """
    return SvdOfMean()


def by_residual(scale: float = 1.0) -> ProductRule:
    """Return FedEx-LoRA's rule: average each factor, add the residual to the frozen weight; exact.

    `scale`: the LoRA scale, alpha / r. Raises FedplanError if `scale` is not positive and finite.
    """
    if not 0 < scale < inf:
        raise FedplanError(f"scale is {scale!r}: give the LoRA scale, alpha / r, which is above 0")
    return MeansAndResidual(float(scale))


def parse_product_rule(text: str) -> ProductRule:
    """Return the ProductRule whose property `text` is `text`; FedplanError if there is none."""
    rules = {rule.text: rule for rule in (average_separately(), by_svd(), by_residual())}
    if text in rules:
        return rules[text]
    match = re.fullmatch(r"by_residual\(scale=([0-9.e+-]+)\)", text)
    try:
        return by_residual(float(match[1] if match else ""))
    except ValueError:
        raise FedplanError(
            f"there is no product rule {text!r}; there are {', '.join(rules)}"
        ) from None


def _first_rows(rows: Tensor, count: int) -> Tensor:
    """Return the first `count` rows, padded with zeros: a rank may exceed the size of a layer."""
    padding = max(count - rows.shape[0], 0)
    return torch.cat([rows[:count], rows.new_zeros(padding, rows.shape[1])])
