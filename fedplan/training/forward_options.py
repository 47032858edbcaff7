# SPDX-License-Identifier: Apache-2.0
"""Options of forward passes in training: precision, gradient checkpointing, torch.compile."""

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
"""Autocast dtype of each precision; None turns autocast off."""


@contextmanager
def use_gradient_checkpointing(model: nn.Module, on: bool) -> Generator[None]:
    """Context manager that turns on a model's gradient checkpointing, if `on`, until exit.

    A model that already has gradient checkpointing on stays so. Raises FedplanError if the model
    has no method `gradient_checkpointing_enable`, or the method raises ValueError.
    """
    if not on or getattr(model, "is_gradient_checkpointing", False):
        yield
        return
    enable: Any = getattr(model, "gradient_checkpointing_enable", None)
    try:
        if enable is None:
            raise ValueError("the model has no gradient_checkpointing_enable")
        # Reentrant checkpointing loses gradients of blocks whose inputs need none, as under LoRA.
        enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    except ValueError as error:
        raise FedplanError(
            f"{type(model).__name__} does not support checkpointing: "
            "leave train.gradient_checkpointing out"
        ) from error
    try:
        yield
    finally:
        cast("Any", model).gradient_checkpointing_disable()


def compile_model(model: nn.Module, backend: str) -> nn.Module:
    """Return the model compiled by a backend of torch.compile, sharing the model's tensors.

    An empty backend returns the model itself. Raises FedplanError for an unknown backend.
    """
    if not backend:
        return model
    backends = sorted(torch.compiler.list_backends(None))
    if backend not in backends:
        raise FedplanError(f"torch.compile has no backend {backend!r}: use one of {backends}")
    return cast("nn.Module", torch.compile(model, backend=backend))
