# SPDX-License-Identifier: Apache-2.0
"""Exact mean of the clients' LoRA products B @ A, and the error of averaging A and B separately."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import sqrt

import torch
from torch import Tensor

from fedplan.errors import FedplanError
from fedplan.federation.aggregation.drift import round_digits
from fedplan.federation.messages import UpdateRejected
from fedplan.methods.lora import LoraFactors, LoraLayer, ProductRule, lora_layers
from fedplan.methods.method import Method
from fedplan.models.params import Params
from fedplan.tensors.named import Tensors
from fedplan.tensors.sums import GRID, ExactSum

MAX_MEASURED_NUMEL = 2**22
"""Largest product matrices, in total numbers of 8 bytes, for which the error is measured although
the rule needs no products. A large model would take too much memory at the server."""

Errors = tuple[float, float]
"""Relative errors of the product of mean factors, and of the new global model, against the mean
product (Frobenius norm)."""


@dataclass
class ProductSum:
    """Weighted exact sum of the clients' LoRA products B @ A in one round.

    `layers`: LoRA layers of which clients may share all factors. `rule`: how the method puts the
    mean product into the global factors. `base`: global values before the round. `total`: sum of
    products by the key of factor A. The caller adds `client_products` of each update to `total`,
    and then calls `close`.
    """

    layers: tuple[LoraLayer, ...]
    rule: ProductRule
    base: Tensors
    total: ExactSum = field(default_factory=ExactSum)

    def require_both_sides(self, values: Tensors) -> None:
        """Raise UpdateRejected if the rule needs products and `values` has a part of a layer."""
        for layer in () if self.rule.is_separate else self.layers:
            present = [p.key in values for p in layer.factors]
            if any(present) and not all(present):
                raise UpdateRejected(f"it sends one side of {layer.name} without the other")

    def client_products(self, values: Tensors) -> dict[str, Tensor]:
        """Return by the key of factor A one client's product of each layer sent completely."""
        complete = (e for e in self.layers if all(p.key in values for p in e.factors))
        return {layer.a.key: _factors(layer, values).product for layer in complete}

    def close(self, means: Tensors, weights: Mapping[str, int]) -> tuple[Tensors, Errors | None]:
        """Return (values that replace the means of some params, relative errors over all layers).

        `means`: mean of each param. `weights`: total weight of the senders of each param. A layer
        keeps the means if their product equals the mean product up to rounding, or if the factors
        have different senders. Errors: of the product of mean factors, and of what the rule makes
        of the mean product; None if no layer was sent completely, or if all products are 0.
        """
        replaced, squares = dict[str, Tensor](), torch.zeros(3, dtype=torch.float64)
        products, product_weights = self.total.mean(), self.total.weights()
        for layer in self.layers:
            weight = product_weights.get(layer.a.key)
            if not weight or any(weights[p.key] != weight for p in layer.factors):
                continue
            product = products[layer.a.key]
            before = _factors(layer, means, self.base if self.rule.updates_weight else None)
            after, mean_error = before, _squared_norm(before.product - product)
            if sqrt(mean_error) > _rounding(before, product):
                after = self.rule(before, product)
                replaced |= {layer.a.key: after.a, **layer.split_b(after.b)}
                if after.weight is not None:
                    replaced |= layer.split_host_weight(after.weight)
                change = self.rule.effective_change(before, after)
                rule_error = _squared_norm(change - product)
            else:
                mean_error = rule_error = 0.0
            squares += torch.tensor(
                [_squared_norm(product), mean_error, rule_error], dtype=torch.float64
            )
        norm, mean_error, rule_error = (sqrt(float(square)) for square in squares)
        if not norm:
            return replaced, None
        return replaced, (round_digits(mean_error / norm), round_digits(rule_error / norm))


def check_product_rule(method: Method, params: Params, shared: Params, frozen: Params) -> None:
    """Raise FedplanError, with a remedy, if the method's product rule does not fit the plan.

    `shared`: params that some turn may share. `frozen`: params that are frozen in all turns. A rule
    that needs products requires a LoRA layer in `params` with a shared factor, and all factors of
    each such layer shared. A rule that updates weights also requires each layer's weight known,
    float32 or float64, and frozen. Does nothing if the rule averages factors separately.
    """
    if method.lora_aggregation.is_separate:
        return
    text, keys = method.lora_aggregation.text, {p.key for p in shared}
    frozen_keys = {p.key for p in frozen}
    layers = [e for e in lora_layers(params) if any(p.key in keys for p in e.factors)]
    if not layers:
        raise FedplanError(
            f"{text} is a rule for LoRA's two sides, and the plan shares none of them: "
            "add LoRA and share(adapter), or take the rule away"
        )
    hosts = [host.key for layer in layers for host in layer.hosts]
    for layer in layers:
        if unshared := [p.key for p in layer.factors if p.key not in keys]:
            raise FedplanError(
                f"{text} needs both sides of {layer.name}, and the plan does not share "
                f"{unshared[0]}: share(adapter), or average the sides apart"
            )
        if not method.lora_aggregation.updates_weight:
            continue
        if not layer.hosts:
            raise FedplanError(
                f"{text} cannot tell the layout of the weight of {layer.name} (square, in a model "
                "with outputs last), or finds none: take by_svd()"
            )
        for host in layer.hosts:
            if hosts.count(host.key) > 1:
                raise FedplanError(
                    f"{text} adds the residual of one LoRA layer to {host.key}, and the plan "
                    "shares two there: share one adapter, or take by_svd()"
                )
            if host.dtype not in ("float32", "float64"):
                raise FedplanError(
                    f"{text} adds small numbers to {host.key}, which is {host.dtype} and would "
                    "round them away: take by_svd(), or load the model in float32"
                )
            if host.key not in frozen_keys:
                raise FedplanError(
                    f"{text} changes {host.key} at the server, and the plan gives it to the "
                    "clients: freeze it"
                )


def _factors(layer: LoraLayer, values: Tensors, base: Tensors | None = None) -> LoraFactors:
    weight = layer.host_weight(base) if base is not None else None
    return LoraFactors(values[layer.a.key], layer.concat_b(values), weight)


def _rounding(factors: LoraFactors, product: Tensor) -> float:
    """Return by how much (Frobenius norm) a product differs by rounding to its dtype and to GRID,
    which exact sums have."""
    norms = [sqrt(_squared_norm(matrix)) for matrix in (factors.a, factors.b)]
    a_error, b_error, error = (sqrt(m.numel()) for m in (factors.a, factors.b, product))
    grid = GRID * (a_error * norms[1] + b_error * norms[0] + error)
    return 2 * torch.finfo(factors.a.dtype).eps * sqrt(_squared_norm(product)) + grid


def _squared_norm(matrix: Tensor) -> float:
    return float(matrix.square().sum(dtype=torch.float64))
