# SPDX-License-Identifier: Apache-2.0
"""LoRA in a federation: its layers, rules to aggregate them, and training at a client's own rank.

The mean of products B A is not the product of the means of B and A.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf, prod
from typing import TYPE_CHECKING, ClassVar, Protocol, cast

import torch
from torch import Tensor

from fedplan.errors import FedplanError
from fedplan.language.canonical import format_call, with_text
from fedplan.models.params import Param, Params
from fedplan.models.values import get_values, set_values
from fedplan.tensors.devices import model_device, to_device
from fedplan.tensors.named import Tensors
from fedplan.training.fit import ClientHook, Fit, FitResult, Job

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class LoraLayer:
    """The params of one LoRA layer: the factors A and B, and the host weight that B A is added to.

    `bs`: the parts of the output factor B, several if the host weight is fused. `hosts`: for each
    of `bs`, the part of the host weight that the product with `a` is added to; empty if a part is
    missing, or may be transposed or not.
    """

    a: Param
    bs: tuple[Param, ...]
    hosts: tuple[Param, ...]

    @property
    def name(self) -> str:
        """The path of the layer."""
        return self.a.name.partition(".lora_A")[0]

    @property
    def factors(self) -> Params:
        """The params of both factors."""
        return (self.a, *self.bs)

    @property
    def rank(self) -> int:
        """The rank of the layer."""
        return self.a.shape[0]

    @property
    def numel(self) -> int:
        """The number of elements of the product B A."""
        return sum(b.numel for b in self.bs) // self.rank * self.a.shape[1]

    def concat_b(self, values: Mapping[str, Tensor]) -> Tensor:
        """The factor B (outputs x rank), concatenated from the values of `bs` by key."""
        import torch

        return torch.cat([values[b.key].reshape(-1, self.rank) for b in self.bs])

    def split_b(self, factor: Tensor) -> dict[str, Tensor]:
        """Split a factor B into views, the values of `bs` by key: the inverse of `concat_b`."""
        parts = self._split_outputs(factor)
        return {b.key: part.reshape(b.shape) for b, part in zip(self.bs, parts, strict=True)}

    def _split_outputs(self, matrix: Tensor) -> tuple[Tensor, ...]:
        sizes = [b.numel // self.rank for b in self.bs]
        return cast("tuple[Tensor, ...]", matrix.split(sizes))

    def host_weight(self, values: Mapping[str, Tensor]) -> Tensor:
        """The host weight (outputs x inputs, as B A), from the values of `hosts` by key."""
        import torch

        parts: list[Tensor] = []
        for host, b in zip(self.hosts, self.bs, strict=True):
            value = values[host.key]
            is_transposed = _is_transposed(host, b, self.a)
            value = value.reshape(value.shape[0], -1).T if is_transposed else value
            parts.append(value.reshape(-1, self.a.shape[1]))
        return torch.cat(parts)

    def split_host_weight(self, weight: Tensor) -> dict[str, Tensor]:
        """Split a host weight into the values of `hosts` by key: the inverse of `host_weight`."""
        values: dict[str, Tensor] = {}
        for host, b, part in zip(self.hosts, self.bs, self._split_outputs(weight), strict=True):
            part = part.T.contiguous() if _is_transposed(host, b, self.a) else part
            values[host.key] = part.reshape(host.shape)
        return values


def lora_layers(params: Params) -> tuple[LoraLayer, ...]:
    """The plain LoRA layers among a model's params, in order; DoRA and AdaLoRA are left out."""
    by_key = {p.key: p for p in params}
    # The change of these layers is more than the product B A.
    not_products = {
        p.name.partition(".lora_")[0] for p in params if "lora_m" in p.tags or ".lora_E" in p.name
    }
    has_transposed = any(p.rows and p.rows.dim == 1 and len(p.shape) > 2 for p in params)
    layers = list[LoraLayer]()
    for a in params:
        if "lora_a" not in a.tags or len(a.shape) != 2:
            continue
        name = a.name.replace("lora_embedding_A", "lora_embedding_B").replace("lora_A", "lora_B")
        bs = tuple(b for b in params if b.name == name != a.name and b.shape[-1:] == a.shape[:1])
        if bs and a.name.partition(".lora_")[0] not in not_products:
            layers.append(LoraLayer(a, bs, _hosts(a, bs, by_key, has_transposed=has_transposed)))
    return tuple(layers)


def _hosts(
    a: Param, bs: tuple[Param, ...], by_key: Mapping[str, Param], *, has_transposed: bool
) -> tuple[Param, ...]:
    """For each of `bs`, the part of the host weight that the product with `a` is added to.

    Returns () if a part is missing; and for a square weight if the model has transposed ones
    (GPT-2), whose orientation is then unknown.
    """
    name = f"{a.name.partition('.lora_')[0]}.base_layer.weight"
    candidates = [by_key.get(f"{name}[{'+'.join(sorted(b.on))}]" if b.rows else name) for b in bs]
    hosts = tuple(h for h in candidates if h is not None)
    matching = len(hosts) == len(bs) and all(
        h.numel == prod(b.shape[:-1]) * a.shape[1] for h, b in zip(hosts, bs, strict=True)
    )
    square = any(not h.rows and h.shape[0] == h.shape[-1] for h in hosts)
    return () if not matching or (has_transposed and square) else hosts


def _is_transposed(host: Param, b: Param, a: Param) -> bool:
    outputs_first = host.shape == (*b.shape[:-1], a.shape[1])
    return not outputs_first or bool(host.rows and host.rows.dim)


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


def train_at_client_rank(trait: str = "rank") -> ClientHook:
    """Return a client hook that trains LoRA at the rank given by a client's trait (`job.traits`).

    Rows of A and columns of B beyond the rank are set to zero in the model before training, and a
    gradient hook zeroes their gradients, so the client sends zeros, by which the server can see the
    rank. Put this hook after other client hooks that add gradient hooks. A client without the trait
    trains the full rank. The fit raises FedplanError if the trait is no whole number from 1 to the
    rank of each trained layer, or if a zeroed value was changed.
    """

    @with_text(format_call("narrowed", trait))
    def hook(fit: Fit) -> Fit:
        def fit_at_rank(job: Job) -> FitResult:
            if trait not in job.traits:
                return fit(job)
            layers = [e for e in lora_layers(tuple(job.roles)) if job.roles[e.a].is_trained]
            text, masks = job.traits[trait], dict[str, Tensor]()
            for layer in layers:
                if not text.isdecimal() or not 1 <= int(text) <= layer.rank:
                    raise FedplanError(
                        f"the trait {trait!r} is {text!r}: give a rank from 1 to {layer.rank}, as "
                        "in clients.traits"
                    )
                within = torch.arange(layer.rank) < int(text)
                masks |= {layer.a.key: within[:, None], **{b.key: within for b in layer.bs}}
            # Gradient hooks run at every step, so the masks are moved to the device once.
            on_device = to_device(masks, model_device(job.model))
            factors = [param for layer in layers for param in layer.factors]

            def masked(values: Tensors) -> dict[str, Tensor]:
                return {k: v * masks[k].to(v) if k in masks else v for k, v in values.items()}

            set_values(job.model, masked(get_values(job.model, factors)), factors)

            def mask_gradient(param: Param, value: Tensor, gradient: Tensor) -> None:
                if param.key in on_device:
                    gradient.mul_(on_device[param.key])

            gradient_hooks = (*job.gradient_hooks, mask_gradient)
            result = fit(replace(job, start=masked(job.start), gradient_hooks=gradient_hooks))
            trained = get_values(job.model, factors)
            for key, value in masked(trained).items():
                if not torch.equal(trained[key], value):
                    raise FedplanError(
                        f"{key} was trained beyond rank {int(text)}: this optimizer changes values "
                        "without gradient; use adamw or sgd"
                    )
            return result

        return fit_at_rank

    return hook
