# SPDX-License-Identifier: Apache-2.0
"""Fusion: one prompt out of a common and an own one, by a module that a client keeps."""

from __future__ import annotations

from typing import Protocol, final

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

from fedplan.models.dual import ModelError

FUSIONS = ("attention", "replace", "mlp", "sum")
QUERIES = ("own", "common", "both")


class Fuse(Protocol):
    """What makes one prompt of two."""

    def __call__(self, common: Tensor, own: Tensor) -> Tensor: ...


def total(common: Tensor, own: Tensor) -> Tensor:
    """The sum of the levels: no module at all."""
    return own + common


@final
class DualFusion(nn.ModuleDict):
    """The fusion of each modality."""


@final
class Attention(nn.Module):
    """Cross-attention between the levels: `own + common + gate * F`, the gate zero at first.

    `query` says which level asks; with both, F is the mean of both directions. Without a gate the
    result is F alone.
    """

    def __init__(self, size: int, *, heads: int, width: int, query: str, gated: bool) -> None:
        super().__init__()
        width = width or size
        if heads < 1 or width % heads:
            raise ModelError(f"a fusion of width {width} cannot be cut into {heads} heads")
        self.heads, self.asks = heads, query
        self.query, self.key, self.value = (nn.Linear(size, width, bias=False) for _ in range(3))
        self.out = nn.Linear(width, size, bias=False)
        self.gate = nn.Parameter(torch.zeros(())) if gated else None

    def forward(self, common: Tensor, own: Tensor) -> Tensor:
        """One prompt of the two."""
        if self.asks == "both":
            found = (self._attend(own, common) + self._attend(common, own)) / 2
        else:
            found = self._attend(*((own, common) if self.asks == "own" else (common, own)))
        return found if self.gate is None else own + common + self.gate * found

    def _attend(self, asking: Tensor, asked: Tensor) -> Tensor:
        sides = ((self.query, asking), (self.key, asked), (self.value, asked))
        heads = [side(x).unflatten(-1, (self.heads, -1)).transpose(0, 1) for side, x in sides]
        return self.out(scaled_dot_product_attention(*heads).transpose(0, 1).flatten(1))


@final
class Gated(nn.Module):
    """The control for the attention: a gated feed-forward layer with as many numbers.

    Each vector is fused with the one at its own place only.
    """

    def __init__(self, size: int, *, width: int) -> None:
        super().__init__()
        width = width or size
        sizes = {"first": (size, width), "second": (size, width), "third": (size, width)}
        sizes["last"] = (width, size)
        self.mlp = nn.ModuleDict({name: nn.Linear(*s, bias=False) for name, s in sizes.items()})
        self.gate = nn.Parameter(torch.zeros(()))

    def forward(self, common: Tensor, own: Tensor) -> Tensor:
        """One prompt of the two."""
        inner = gelu(self.mlp["first"](own) + self.mlp["second"](common))
        found = self.mlp["last"](inner * self.mlp["third"](common))
        return own + common + self.gate * found


def fusion_of(kind: str, size: int, *, query: str, heads: int, width: int) -> nn.Module | None:
    """The fusion module of a kind for prompts of this size; a sum needs none."""
    if kind not in FUSIONS or query not in QUERIES:
        raise ModelError(
            f"there is no fusion {kind!r} asked by {query!r}: take one of {', '.join(FUSIONS)}, "
            f"asked by {', '.join(QUERIES)}"
        )
    if kind == "sum":
        return None
    if kind == "mlp":
        return Gated(size, width=width)
    return Attention(size, heads=heads, width=width, query=query, gated=kind == "attention")
