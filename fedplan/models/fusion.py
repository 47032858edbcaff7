# SPDX-License-Identifier: Apache-2.0
"""Fusion modules: one prompt from a common and an own prompt."""

from __future__ import annotations

from typing import Protocol, final

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

from fedplan.models.dual_encoder import ModelError

FUSIONS = ("attention", "replace", "mlp", "sum")
"""The kinds of fusion."""
QUERIES = ("own", "common", "both")
"""The prompts that may be the queries of the fusion attention."""


class Fuse(Protocol):
    """A function from a common and an own prompt, each (length, size), to the fused prompt."""

    def __call__(self, common: Tensor, own: Tensor) -> Tensor: ...


def sum_levels(common: Tensor, own: Tensor) -> Tensor:
    """The sum of both prompts: a fusion without parameters."""
    return own + common


@final
class DualFusion(nn.ModuleDict):
    """The fusion modules of a DualEncoder by tower, "text" and "vision"."""


@final
class AttentionFusion(nn.Module):
    """Fusion by cross-attention F between the prompts: `own + common + gate * F`.

    `size` is the width of the prompts, `width` the inner width (0: `size`). `query` is the prompt
    that gives the queries, "own" or "common"; with "both", F is the mean of both directions.
    `gated` adds the gate, which starts at zero; without a gate the result is F alone. Raises
    ModelError if `heads` does not divide the width.
    """

    def __init__(self, size: int, *, heads: int, width: int, query: str, gated: bool) -> None:
        super().__init__()
        width = width or size
        if heads < 1 or width % heads:
            raise ModelError(f"a fusion of width {width} cannot be divided into {heads} heads")
        self.heads, self.query_level = heads, query
        self.query, self.key, self.value = (nn.Linear(size, width, bias=False) for _ in range(3))
        self.out = nn.Linear(width, size, bias=False)
        self.gate = nn.Parameter(torch.zeros(())) if gated else None

    def forward(self, common: Tensor, own: Tensor) -> Tensor:
        """The prompt (length x size) fused from a common and an own prompt of that shape."""
        if self.query_level == "both":
            attended = (self._attend(own, common) + self._attend(common, own)) / 2
        else:
            own_queries = self.query_level == "own"
            attended = self._attend(*((own, common) if own_queries else (common, own)))
        return attended if self.gate is None else own + common + self.gate * attended

    def _attend(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Multi-head attention of `queries` to `keys`, both (length, size)."""
        inputs = ((self.query, queries), (self.key, keys), (self.value, keys))
        heads = [layer(x).unflatten(-1, (self.heads, -1)).transpose(0, 1) for layer, x in inputs]
        return self.out(scaled_dot_product_attention(*heads).transpose(0, 1).flatten(1))


@final
class MlpFusion(nn.Module):
    """Fusion by a gated feed-forward layer with as many parameters as AttentionFusion.

    A control experiment: each vector is fused only with the other prompt's vector at the same
    position. `size` is the width of the prompts, `width` the inner width (0: `size`). The gate
    starts at zero, so the result starts as the sum of both prompts.
    """

    def __init__(self, size: int, *, width: int) -> None:
        super().__init__()
        width = width or size
        layers = {n: nn.Linear(size, width, bias=False) for n in ("first", "second", "third")}
        self.mlp = nn.ModuleDict({**layers, "last": nn.Linear(width, size, bias=False)})
        self.gate = nn.Parameter(torch.zeros(()))

    def forward(self, common: Tensor, own: Tensor) -> Tensor:
        """The prompt (length x size) fused from a common and an own prompt of that shape."""
        inner = gelu(self.mlp["first"](own) + self.mlp["second"](common))
        mixed = self.mlp["last"](inner * self.mlp["third"](common))
        return own + common + self.gate * mixed


def make_fusion(kind: str, size: int, *, query: str, heads: int, width: int) -> nn.Module | None:
    """Make the fusion module of a kind (one of FUSIONS) for prompts of width `size`.

    "attention" is an AttentionFusion with gate, "replace" one without, "mlp" a MlpFusion, and "sum"
    is None. `query`, `heads` and `width`: see AttentionFusion. Raises ModelError for an
    unknown kind or query, and if `heads` does not divide the width.
    """
    if kind not in FUSIONS or query not in QUERIES:
        raise ModelError(
            f"there is no fusion {kind!r} with query {query!r}: use one of {', '.join(FUSIONS)}, "
            f"with query {', '.join(QUERIES)}"
        )
    if kind == "sum":
        return None
    if kind == "mlp":
        return MlpFusion(size, width=width)
    return AttentionFusion(size, heads=heads, width=width, query=query, gated=kind == "attention")
