# SPDX-License-Identifier: Apache-2.0
"""Products: what the server makes of LoRA's two sides, whose mean is not that of their products."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from math import inf
from typing import ClassVar, Protocol, cast

import torch
from torch import Tensor

from fedplan.errors import FedplanError

_Three = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Sides:
    """One layer as the server has it: both sides, and the weight that their product is added to."""

    a: Tensor
    b: Tensor
    weight: Tensor | None = None

    @property
    def product(self) -> Tensor:
        """The product of the sides, in float64."""
        return self.b.double() @ self.a.double()


class ProductRule(Protocol):
    """From the mean of each side and the mean of the clients' products: the world's next sides.

    One that `folds` changes the weight below, too: then this is a part of the world, and travels.
    One that is `apart` needs no product. Its `text` says it with its settings.
    """

    apart: ClassVar[bool]
    folds: ClassVar[bool]

    @property
    def text(self) -> str:
        """It with its settings."""
        ...

    def __call__(self, means: Sides, product: Tensor) -> Sides:
        """The next sides, and the next weight."""
        ...

    def change(self, before: Sides, after: Sides) -> Tensor:
        """What the layer now adds to the weight that it had before, over the adapter's scale."""
        ...


@dataclass(frozen=True)
class Apart:
    """Each side is the mean of its senders, by itself."""

    apart: ClassVar[bool] = True
    folds: ClassVar[bool] = False

    @property
    def text(self) -> str:
        """Its name."""
        return "apart()"

    def __call__(self, means: Sides, product: Tensor) -> Sides:
        return means

    def change(self, before: Sides, after: Sides) -> Tensor:
        """The product of the sides."""
        return after.product


@dataclass(frozen=True)
class BySvd:
    """The two sides of the layer's rank whose product is nearest to the mean of the products."""

    apart: ClassVar[bool] = False
    folds: ClassVar[bool] = False

    @property
    def text(self) -> str:
        """Its name."""
        return "by_svd()"

    def __call__(self, means: Sides, product: Tensor) -> Sides:
        rank, dtype = means.a.shape[0], means.a.dtype
        left, values, right = cast("_Three", torch.linalg.svd(product, full_matrices=False))
        left, values, right = _padded(left.T, rank), values[:rank], _padded(right, rank)
        signs = _signs(left)
        roots = torch.zeros(rank, dtype=values.dtype)
        roots[: len(values)] = values.sqrt()
        b = (left * (signs * roots)[:, None]).T
        # A row of nothing would never learn again: both sides must not be zero at once.
        alive = roots.square() > torch.finfo(dtype).eps * roots[0].square()
        a = right * (signs * torch.where(alive, roots, torch.ones_like(roots)))[:, None]
        return replace(means, a=a.to(dtype), b=torch.where(alive, b, 0.0).to(means.b.dtype))

    def change(self, before: Sides, after: Sides) -> Tensor:
        """The product of the sides."""
        return after.product


@dataclass(frozen=True)
class ByResidual:
    """The mean of each side; what their product lacks is added to the weight below.

    `scale` is the adapter's alpha / r.
    """

    scale: float
    apart: ClassVar[bool] = False
    folds: ClassVar[bool] = True

    @property
    def text(self) -> str:
        """It with its scale."""
        return f"by_residual(scale={self.scale!r})"

    def __call__(self, means: Sides, product: Tensor) -> Sides:
        assert means.weight is not None
        lacking = self.scale * (product - means.product)
        return replace(means, weight=(means.weight.double() + lacking).to(means.weight.dtype))

    def change(self, before: Sides, after: Sides) -> Tensor:
        """The product of the sides, and what the weight took."""
        assert before.weight is not None and after.weight is not None
        taken = after.weight.double() - before.weight.double()
        return after.product + taken / self.scale


def apart() -> ProductRule:
    """FedIT's rule: each side is averaged by itself, and the product of the means is what it is."""
    return Apart()


def by_svd() -> ProductRule:
    """FlexLoRA's rule: the mean of the products, cut back to the rank by its singular values.

    Both sides get the root of each singular value. It is exact if the mean has no more than the
    rank, and the nearest of that rank otherwise.
    """
    return BySvd()


def by_residual(scale: float = 1.0) -> ProductRule:
    """FedEx-LoRA's rule: sides are averaged apart, the rest goes into the weight: always exact."""
    if not 0 < scale < inf:
        raise FedplanError(f"scale is {scale!r}: give the adapter's alpha / r, which is above 0")
    return ByResidual(float(scale))


def product_told(text: str) -> ProductRule:
    """The rule that has a text."""
    rules = {rule.text: rule for rule in (apart(), by_svd(), by_residual())}
    if text in rules:
        return rules[text]
    said = re.fullmatch(r"by_residual\(scale=([0-9.e+-]+)\)", text)
    try:
        return by_residual(float(said[1] if said else ""))
    except ValueError:
        raise FedplanError(
            f"there is no rule for products {text!r}; there are {', '.join(rules)}"
        ) from None


def _signs(left: Tensor) -> Tensor:
    """Signs that make the largest number of each row positive, of equals the first."""
    largest = left.abs().argmax(dim=1, keepdim=True)
    found = left.gather(1, largest).flatten().sign()
    return torch.where(found == 0, torch.ones_like(found), found)


def _padded(rows: Tensor, count: int) -> Tensor:
    """The first rows, with rows of nothing where there are too few: a rank may exceed a layer."""
    lacking = max(count - rows.shape[0], 0)
    return torch.cat([rows[:count], rows.new_zeros(lacking, rows.shape[1])])
