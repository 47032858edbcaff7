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
    """One LoRA layer on the server.

    `a`: the input factor (rank x inputs). `b`: the output factor (outputs x rank). `weight`: the
    frozen weight below them, for rules that change it.
    """

    a: Tensor
    b: Tensor
    weight: Tensor | None = None

    @property
    def product(self) -> Tensor:
        """The product B A, in float64."""
        return self.b.double() @ self.a.double()


class ProductRule(Protocol):
    """How the server makes the next global factors of a LoRA layer.

    `is_separate`: factors are averaged separately, and the mean of products is not needed.
    `updates_weight`: the rule also changes the weight below, which is then global and downloaded.
    """

    is_separate: ClassVar[bool]
    updates_weight: ClassVar[bool]

    @property
    def text(self) -> str:
        """Canonical text: the name of the rule with its settings."""
        ...

    def __call__(self, means: LoraFactors, product: Tensor) -> LoraFactors:
        """The next factors and weight, from the mean factors and the mean of the products."""
        ...

    def effective_change(self, before: LoraFactors, after: LoraFactors) -> Tensor:
        """The addition of the layer to its weight before the round, divided by the LoRA scale."""
        ...


@dataclass(frozen=True)
class SeparateMeans:
    """Each factor is the mean of its senders."""

    is_separate: ClassVar[bool] = True
    updates_weight: ClassVar[bool] = False

    @property
    def text(self) -> str:
        """Canonical text."""
        return "average_separately()"

    def __call__(self, means: LoraFactors, product: Tensor) -> LoraFactors:
        return means

    def effective_change(self, before: LoraFactors, after: LoraFactors) -> Tensor:
        """The product of the factors."""
        return after.product


@dataclass(frozen=True)
class SvdOfMean:
    """The factors of the layer's rank whose product is nearest to the mean of the products."""

    is_separate: ClassVar[bool] = False
    updates_weight: ClassVar[bool] = False

    @property
    def text(self) -> str:
        """Canonical text."""
        return "by_svd()"

    def __call__(self, means: LoraFactors, product: Tensor) -> LoraFactors:
        rank, dtype = means.a.shape[0], means.a.dtype
        left, values, right = cast("_SvdResult", torch.linalg.svd(product, full_matrices=False))
        left, values, right = _first_rows(left.T, rank), values[:rank], _first_rows(right, rank)
        # Singular vectors are unique up to sign: fix the sign, so that results are reproducible.
        signs = _signs_of_largest(left)
        roots = torch.zeros(rank, dtype=values.dtype)
        roots[: len(values)] = values.sqrt()
        b = (left * (signs * roots)[:, None]).T
        # If both factors of a direction were zero, its gradient would be zero for ever.
        alive = roots.square() > torch.finfo(dtype).eps * roots[0].square()
        a = right * (signs * torch.where(alive, roots, torch.ones_like(roots)))[:, None]
        return replace(means, a=a.to(dtype), b=torch.where(alive, b, 0.0).to(means.b.dtype))

    def effective_change(self, before: LoraFactors, after: LoraFactors) -> Tensor:
        """The product of the factors."""
        return after.product


@dataclass(frozen=True)
class MeansAndResidual:
    """The mean of each factor; the residual of their product is added to the weight below.

    `scale` is the LoRA scale, alpha / r.
    """

    scale: float
    is_separate: ClassVar[bool] = False
    updates_weight: ClassVar[bool] = True

    @property
    def text(self) -> str:
        """Canonical text."""
        return f"by_residual(scale={self.scale!r})"

    def __call__(self, means: LoraFactors, product: Tensor) -> LoraFactors:
        assert means.weight is not None
        residual = self.scale * (product - means.product)
        return replace(means, weight=(means.weight.double() + residual).to(means.weight.dtype))

    def effective_change(self, before: LoraFactors, after: LoraFactors) -> Tensor:
        """The product of the factors, plus the change of the weight divided by the scale."""
        assert before.weight is not None and after.weight is not None
        weight_change = after.weight.double() - before.weight.double()
        return after.product + weight_change / self.scale


def average_separately() -> ProductRule:
    """FedIT's rule: average each factor separately; inexact, as means do not multiply."""
    return SeparateMeans()


def by_svd() -> ProductRule:
    """FlexLoRA's rule: the truncated SVD of the mean of the products.

    Each factor gets the square root of each singular value. Exact if the mean has at most the rank
    of the layer, the nearest matrix of that rank otherwise.
    """
    return SvdOfMean()


def by_residual(scale: float = 1.0) -> ProductRule:
    """FedEx-LoRA's rule: average each factor, add the residual to the frozen weight; exact.

    `scale` is the LoRA scale, alpha / r; raises FedplanError unless it is positive and finite.
    """
    if not 0 < scale < inf:
        raise FedplanError(f"scale is {scale!r}: give the LoRA scale, alpha / r, which is above 0")
    return MeansAndResidual(float(scale))


def parse_product_rule(text: str) -> ProductRule:
    """The rule with this canonical text; raises FedplanError for an unknown text."""
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


def _signs_of_largest(rows: Tensor) -> Tensor:
    """The sign of the entry of largest magnitude in each row, the first of equals; 1 for zero."""
    largest = rows.abs().argmax(dim=1, keepdim=True)
    signs = rows.gather(1, largest).flatten().sign()
    return torch.where(signs == 0, torch.ones_like(signs), signs)


def _first_rows(rows: Tensor, count: int) -> Tensor:
    """The first `count` rows, padded with zeros: a rank may exceed the size of a layer."""
    padding = max(count - rows.shape[0], 0)
    return torch.cat([rows[:count], rows.new_zeros(padding, rows.shape[1])])
