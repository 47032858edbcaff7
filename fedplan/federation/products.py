# SPDX-License-Identifier: Apache-2.0
"""Products of a round: the exact sum of each client's product of LoRA's sides, and its error."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import sqrt

import torch
from torch import Tensor

from fedplan.errors import FedplanError
from fedplan.federation.messages import Rejected
from fedplan.methods.method import Method
from fedplan.methods.products import ProductRule, Sides
from fedplan.models.low_rank import LowRank, layers_of
from fedplan.models.params import Params
from fedplan.tensors.named import Tensors
from fedplan.tensors.sums import ExactSum

MOST = 2**22
"""Numbers of products, 8 bytes each, up to which a rule that needs none has its error measured.

A large model would else have its server hold a quarter of it again, to tell of an adapter.
"""
DIGITS = 6
"""Significant digits of an error that are told."""

Errors = tuple[float, float]
"""How far from the mean of the products: the product of the mean sides, and what the world got."""


@dataclass
class ProductSum:
    """A round's exact sum of products, over the layers of which both sides may be shared."""

    layers: tuple[LowRank, ...]
    rule: ProductRule
    base: Tensors
    total: ExactSum = field(default_factory=ExactSum)

    def require(self, values: Tensors) -> None:
        """Refuse one side without the other, where the rule needs their product."""
        for layer in () if self.rule.apart else self.layers:
            came = [p.key in values for p in layer.sides]
            if any(came) and not all(came):
                raise Rejected(f"it sends one side of {layer.name} without the other")

    def of(self, values: Tensors) -> dict[str, Tensor]:
        """One client's products, by the key of the input side."""
        whole = (each for each in self.layers if all(p.key in values for p in each.sides))
        return {each.a.key: _sides(each, values).product for each in whole}

    def close(self, means: Tensors, weights: Mapping[str, int]) -> tuple[Tensors, Errors | None]:
        """What the rule makes of the means, of which it is given those of each side; the errors.

        Where the product of the mean sides is the mean of the products but for rounding, as it is
        if only one client took part, the means stay.
        """
        made, squares = dict[str, Tensor](), torch.zeros(3, dtype=torch.float64)
        for layer, product in self._products(weights):
            before = _sides(layer, means, self.base if self.rule.folds else None)
            after, plain = before, _square(before.product - product)
            if plain > (2 * torch.finfo(before.a.dtype).eps) ** 2 * _square(product):
                after = self.rule(before, product)
                made |= {layer.a.key: after.a, **layer.parted(after.b)}
                made |= layer.hosted(after.weight) if after.weight is not None else {}
            else:
                plain = 0.0
            got = _square(self.rule.change(before, after) - product) if plain else 0.0
            squares += torch.tensor([_square(product), plain, got], dtype=torch.float64)
        whole, plain, got = (sqrt(float(each)) for each in squares)
        return made, (_short(plain / whole), _short(got / whole)) if whole else None

    def _products(self, weights: Mapping[str, int]) -> Iterator[tuple[LowRank, Tensor]]:
        """The mean product of each layer that came; one with a side that more clients sent is left.

        Of that there is no error to tell: the means of its sides are those of other clients.
        """
        products, senders = self.total.mean(), self.total.weights()
        for layer in self.layers:
            both = senders.get(layer.a.key)
            if both and all(weights[p.key] == both for p in layer.sides):
                yield layer, products[layer.a.key]


def shared_layers(method: Method, params: Params, shared: Params) -> tuple[LowRank, ...]:
    """The layers of which some turn may share every side; where that many numbers can be held."""
    keys = {p.key for p in shared}
    layers = tuple(e for e in layers_of(params) if all(p.key in keys for p in e.sides))
    fits = not method.product.apart or sum(layer.numel for layer in layers) <= MOST
    return layers if fits else ()


def require_layers(method: Method, params: Params, shared: Params, resting: Params) -> None:
    """Refuse a rule for products where it could not do what it says, and say what would."""
    if method.product.apart:
        return
    text, keys, rest = method.product.text, {p.key for p in shared}, {p.key for p in resting}
    layers = [e for e in layers_of(params) if any(p.key in keys for p in e.sides)]
    if not layers:
        raise FedplanError(
            f"{text} is a rule for LoRA's two sides, and the plan shares none of them: "
            "add LoRA and share(adapter), or take the rule away"
        )
    for layer in layers:
        if lone := [p.key for p in layer.sides if p.key not in keys]:
            raise FedplanError(
                f"{text} needs both sides of {layer.name}, and the plan does not share {lone[0]}: "
                "share(adapter), or average the sides apart"
            )
        if method.product.folds:
            _require_host(text, layer, rest)


def _require_host(text: str, layer: LowRank, resting: set[str]) -> None:
    """Refuse to fold into a weight that would not take it, or that is not the federation's."""
    if not layer.hosts:
        raise FedplanError(
            f"{text} cannot tell how the weight of {layer.name} lies (square, in a model that has "
            "its outputs last), or finds none: take by_svd()"
        )
    for host in layer.hosts:
        if host.dtype not in ("float32", "float64"):
            raise FedplanError(
                f"{text} adds small numbers to {host.key}, which is {host.dtype} and would round "
                "them away: take by_svd(), or load the model in float32"
            )
        if host.key not in resting:
            raise FedplanError(
                f"{text} changes {host.key} at the server, and the plan gives it to the clients: "
                "freeze it"
            )


def _sides(layer: LowRank, values: Tensors, base: Tensors | None = None) -> Sides:
    weight = layer.weight(base) if base is not None else None
    return Sides(values[layer.a.key], layer.joined(values), weight)


def _square(matrix: Tensor) -> float:
    return float(matrix.square().sum(dtype=torch.float64))


def _short(number: float) -> float:
    return float(f"{number:.{DIGITS}g}")
