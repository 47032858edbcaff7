# SPDX-License-Identifier: Apache-2.0
"""Small federations for tests: a few clients with a few rows for any tiny model."""

from __future__ import annotations

import torch
import zoo
from torch import Tensor, nn


class Few:
    """Rows for a tiny model: its own inputs, shifted by a seed so that clients differ."""

    def __init__(self, name: str, seed: int, count: int = 4) -> None:
        generator = torch.Generator().manual_seed(seed)
        rows = {k: v.repeat(count, *[1] * (v.dim() - 1))[:count] for k, v in zoo.feed(name).items()}
        self.rows = {k: self._shifted(v, generator) for k, v in rows.items()}

    def _shifted(self, rows: Tensor, generator: torch.Generator) -> Tensor:
        if rows.is_floating_point():
            return rows + torch.randn(rows.shape, generator=generator)
        return torch.randint(3, 60, rows.shape, generator=generator)

    def __len__(self) -> int:
        return len(next(iter(self.rows.values())))

    def batch(self, indices: Tensor) -> dict[str, Tensor]:
        return {k: v[indices] for k, v in self.rows.items()}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Any differentiable number: how far the model's answers are from one."""
    return (zoo.loss(model(**batch)) - 1).square().float()


def few(name: str, clients: int = 2) -> dict[str, Few]:
    return {f"client-{i}": Few(name, i, count=3 + i) for i in range(clients)}
