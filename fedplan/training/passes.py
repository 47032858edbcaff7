# SPDX-License-Identifier: Apache-2.0
"""Passes: how a model runs while it trains: in what dtype, what it remembers, and compiled."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn

from fedplan.errors import FedplanError

PRECISIONS: dict[str, torch.dtype | None] = {
    "float32": None,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
"""What forward passes compute in where that is safe; float32 leaves all in the model's own."""


@contextmanager
def checkpointed(model: nn.Module, on: bool) -> Generator[None]:
    """A model that works out each block's inside again for its gradients, and remembers less."""
    if not on or getattr(model, "is_gradient_checkpointing", False):
        yield
        return
    enable: Any = getattr(model, "gradient_checkpointing_enable", _no_checkpoints)
    try:
        # The other way forgets the gradients of a block whose inputs need none, as under LoRA.
        enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    except ValueError as error:
        raise FedplanError(
            f"{type(model).__name__} does not support checkpointing: leave train.checkpointing out"
        ) from error
    try:
        yield
    finally:
        cast("Any", model).gradient_checkpointing_disable()


def _no_checkpoints(**_: Any) -> None:
    raise ValueError("it has no such switch")


def compiled(model: nn.Module, backend: str) -> nn.Module:
    """A model whose passes torch compiles by a backend, on the same tensors; the model stays."""
    if not backend:
        return model
    if backend not in (known := _backends()):
        raise FedplanError(f"there is no backend {backend!r} to compile; there are {known}")
    return cast("nn.Module", torch.compile(model, backend=backend))


def _backends() -> list[str]:
    return sorted(torch.compiler.list_backends(None))
