# SPDX-License-Identifier: Apache-2.0
"""Low-rank layers: LoRA's two sides of one layer, and the weight that their product is added to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, cast

from fedplan.models.params import Param, Params

if TYPE_CHECKING:
    from torch import Tensor

_INPUT, _OUTPUT, _HOST = "lora_A", "lora_B", "base_layer.weight"
_OTHER = frozenset({"lora_m"})
"""Words for what makes a layer's change another thing than the product of its sides: DoRA."""


@dataclass(frozen=True)
class LowRank:
    """One layer: its input side, the parts of its output side, and the host's part under each.

    Fused layers have one input side and several parts of the output side. `hosts` is empty where
    nobody can tell how the product lies on the host's weight.
    """

    a: Param
    bs: tuple[Param, ...]
    hosts: tuple[Param, ...]

    @property
    def name(self) -> str:
        """The name of the layer, as its input side says it."""
        return self.a.name.partition(f".{_INPUT}")[0]

    @property
    def sides(self) -> Params:
        """All that is multiplied."""
        return (self.a, *self.bs)

    @property
    def rank(self) -> int:
        """The rank of its product, at most."""
        return self.a.shape[0]

    @property
    def numel(self) -> int:
        """How many numbers its product has."""
        return sum(b.numel for b in self.bs) // self.rank * self.a.shape[1]

    def joined(self, values: Mapping[str, Tensor]) -> Tensor:
        """The whole output side: a row for each of the layer's outputs, part after part."""
        import torch

        return torch.cat([values[b.key].reshape(-1, self.rank) for b in self.bs])

    def parted(self, whole: Tensor) -> dict[str, Tensor]:
        """The parts of an output side."""
        parts = self._split(whole)
        return {b.key: part.reshape(b.shape) for b, part in zip(self.bs, parts, strict=True)}

    def _split(self, whole: Tensor) -> tuple[Tensor, ...]:
        sizes = [b.numel // self.rank for b in self.bs]
        return cast("tuple[Tensor, ...]", whole.split(sizes))

    def weight(self, values: Mapping[str, Tensor]) -> Tensor:
        """The hosts' weight as the product lies on it: a row for each of the layer's outputs."""
        import torch

        each = zip(self.hosts, self.bs, strict=True)
        lying = (_lying(values[h.key], upright=_upright(h, b, self.a)) for h, b in each)
        return torch.cat([part.reshape(-1, self.a.shape[1]) for part in lying])

    def hosted(self, whole: Tensor) -> dict[str, Tensor]:
        """The hosts of a weight that has a row for each output."""
        parts = self._split(whole)
        each = zip(self.hosts, self.bs, parts, strict=True)
        lying = (
            (h, part if _upright(h, b, self.a) else part.T.contiguous()) for h, b, part in each
        )
        return {host.key: part.reshape(host.shape) for host, part in lying}


def layers_of(params: Params) -> tuple[LowRank, ...]:
    """The low-rank layers among params; those that are more than a product of two are left out."""
    by_key = {p.key: p for p in params}
    other = {
        p.name.partition(".lora_")[0] for p in params if p.tags & _OTHER or ".lora_E" in p.name
    }
    crosswise = any(p.rows and p.rows.dim == 1 and len(p.shape) > 2 for p in params)
    found = list[LowRank]()
    for a in params:
        bs = _outputs(a, params) if "lora_a" in a.tags and len(a.shape) == 2 else ()
        if bs and a.name.partition(".lora_")[0] not in other:
            found.append(LowRank(a, bs, _hosts(a, bs, by_key, crosswise=crosswise)))
    return tuple(found)


def _outputs(a: Param, params: Params) -> tuple[Param, ...]:
    """The parts of the output side that belong to an input side."""
    name = a.name.replace("lora_embedding_A", "lora_embedding_B").replace(_INPUT, _OUTPUT)
    return tuple(b for b in params if b.name == name != a.name and b.shape[-1:] == a.shape[:1])


def _hosts(
    a: Param, bs: tuple[Param, ...], by_key: Mapping[str, Param], *, crosswise: bool
) -> tuple[Param, ...]:
    """The host's part under each part of the output side; () where one cannot be told.

    A model that has fused tensors with their outputs crosswise (GPT-2's) may have square ones,
    and of a square one nobody sees which way it lies.
    """
    name = f"{a.name.partition('.lora_')[0]}.{_HOST}"
    found = [by_key.get(f"{name}[{'+'.join(sorted(b.on))}]" if b.rows else name) for b in bs]
    hosts = tuple(h for h in found if h is not None)
    fit = len(hosts) == len(bs) and all(
        h.numel == prod(b.shape[:-1]) * a.shape[1] for h, b in zip(hosts, bs, strict=True)
    )
    square = any(not h.rows and h.shape[0] == h.shape[-1] for h in hosts)
    return () if not fit or (crosswise and square) else hosts


def _upright(host: Param, b: Param, a: Param) -> bool:
    """Whether a host has its outputs first, as the product has."""
    return host.shape == (*b.shape[:-1], a.shape[1]) and not (host.rows and host.rows.dim)


def _lying(value: Tensor, *, upright: bool) -> Tensor:
    return value if upright else value.reshape(value.shape[0], -1).T
