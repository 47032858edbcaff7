# SPDX-License-Identifier: Apache-2.0
"""LoRA layers: the factors A and B of each layer, and the weight that B A is added to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, cast

from fedplan.models.params import Param, Params

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class LoraLayer:
    """The params of one LoRA layer: the factors A and B, and the host weight that B A is added to.

    `a`: the input factor A (rank x inputs). `bs`: the parts of the output factor B, several if the
    host weight is fused. `hosts`: for each of `bs`, the part of the host weight that the product
    with `a` is added to; empty if a part is missing, or may be transposed or not. `concat_b` and
    `host_weight` join the values of the parts, `split_b` and `split_host_weight` divide a matrix.
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

    Returns () if a part is missing, or if `has_transposed` and the weight is square. `by_key` are
    all params of the model. `has_transposed`: the model has transposed weights (GPT-2), so the
    orientation of a square weight is ambiguous.
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
    """Whether a host weight (or part) is inputs x outputs, unlike the product B A."""
    outputs_first = host.shape == (*b.shape[:-1], a.shape[1])
    return not outputs_first or bool(host.rows and host.rows.dim)
