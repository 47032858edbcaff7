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

_A, _B, _HOST = "lora_A", "lora_B", "base_layer.weight"
_NOT_A_PRODUCT_TAGS = frozenset({"lora_m"})
"""Tags of tensors that make the change of a layer more than the product B A: DoRA."""


@dataclass(frozen=True)
class LoraLayer:
    """The params of one LoRA layer.

    `a`: the input factor. `bs`: the parts of the output factor, several if the host is fused.
    `hosts`: the host weight's part under each of `bs`; empty if its orientation is unknown.
    """

    a: Param
    bs: tuple[Param, ...]
    hosts: tuple[Param, ...]

    @property
    def name(self) -> str:
        """The path of the layer."""
        return self.a.name.partition(f".{_A}")[0]

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
        """The output factor B (outputs x rank): the values of `bs`, concatenated."""
        import torch

        return torch.cat([values[b.key].reshape(-1, self.rank) for b in self.bs])

    def split_b(self, factor: Tensor) -> dict[str, Tensor]:
        """The values of `bs`, by key, of an output factor B: the inverse of `concat_b`."""
        parts = self._split(factor)
        return {b.key: part.reshape(b.shape) for b, part in zip(self.bs, parts, strict=True)}

    def _split(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Split a tensor with a row for each output into the parts of `bs`."""
        sizes = [b.numel // self.rank for b in self.bs]
        return cast("tuple[Tensor, ...]", rows.split(sizes))

    def host_weight(self, values: Mapping[str, Tensor]) -> Tensor:
        """The host weight (outputs x inputs), aligned with B A, from the values of `hosts`."""
        import torch

        pairs = zip(self.hosts, self.bs, strict=True)
        parts = (
            _outputs_first(values[h.key], is_transposed=_is_transposed(h, b, self.a))
            for h, b in pairs
        )
        return torch.cat([part.reshape(-1, self.a.shape[1]) for part in parts])

    def split_host_weight(self, weight: Tensor) -> dict[str, Tensor]:
        """The values of `hosts`, by key, of a host weight: the inverse of `host_weight`."""
        triples = zip(self.hosts, self.bs, self._split(weight), strict=True)
        parts = (
            (h, part.T.contiguous() if _is_transposed(h, b, self.a) else part)
            for h, b, part in triples
        )
        return {host.key: part.reshape(host.shape) for host, part in parts}


def lora_layers(params: Params) -> tuple[LoraLayer, ...]:
    """The LoRA layers among params, without DoRA and AdaLoRA, which are no plain products."""
    by_key = {p.key: p for p in params}
    not_products = {
        p.name.partition(".lora_")[0]
        for p in params
        if p.tags & _NOT_A_PRODUCT_TAGS or ".lora_E" in p.name
    }
    has_transposed = any(p.rows and p.rows.dim == 1 and len(p.shape) > 2 for p in params)
    layers = list[LoraLayer]()
    for a in params:
        bs = _b_parts(a, params) if "lora_a" in a.tags and len(a.shape) == 2 else ()
        if bs and a.name.partition(".lora_")[0] not in not_products:
            hosts = _hosts(a, bs, by_key, has_transposed=has_transposed)
            layers.append(LoraLayer(a, bs, hosts))
    return tuple(layers)


def _b_parts(a: Param, params: Params) -> tuple[Param, ...]:
    """The parts of the output factor that belongs to the input factor `a`."""
    name = a.name.replace("lora_embedding_A", "lora_embedding_B").replace(_A, _B)
    return tuple(b for b in params if b.name == name != a.name and b.shape[-1:] == a.shape[:1])


def _hosts(
    a: Param, bs: tuple[Param, ...], by_key: Mapping[str, Param], *, has_transposed: bool
) -> tuple[Param, ...]:
    """The part of the host weight under each of `bs`; () if one is missing or ambiguous.

    `has_transposed`: the model has transposed weights (GPT-2), so the orientation of a square one
    is unknown.
    """
    name = f"{a.name.partition('.lora_')[0]}.{_HOST}"
    candidates = [by_key.get(f"{name}[{'+'.join(sorted(b.on))}]" if b.rows else name) for b in bs]
    hosts = tuple(h for h in candidates if h is not None)
    matching = len(hosts) == len(bs) and all(
        h.numel == prod(b.shape[:-1]) * a.shape[1] for h, b in zip(hosts, bs, strict=True)
    )
    square = any(not h.rows and h.shape[0] == h.shape[-1] for h in hosts)
    return () if not matching or (has_transposed and square) else hosts


def _is_transposed(host: Param, b: Param, a: Param) -> bool:
    """Whether a host weight is inputs x outputs, unlike the product B A."""
    outputs_first = host.shape == (*b.shape[:-1], a.shape[1])
    return not outputs_first or bool(host.rows and host.rows.dim)


def _outputs_first(value: Tensor, *, is_transposed: bool) -> Tensor:
    return value.reshape(value.shape[0], -1).T if is_transposed else value
