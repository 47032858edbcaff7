# SPDX-License-Identifier: Apache-2.0
"""Values: those of a live model's params, taken and put back."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from fedplan.errors import FedplanError
from fedplan.models.params import Param
from fedplan.tensors.devices import HOST
from fedplan.tensors.named import Tensors


def take(model: nn.Module, params: Iterable[Param]) -> dict[str, Tensor]:
    """Copies, in host memory, of the values that params have in a model."""
    tensors = dict(model.named_parameters())
    return {p.key: p.view(tensors[p.name].detach()).to(HOST, copy=True) for p in params}


@torch.no_grad()
def put(model: nn.Module, values: Tensors, params: Iterable[Param]) -> None:
    """Give params of a model the values of their keys; params without one stay as they are."""
    tensors = dict(model.named_parameters())
    for p in params:
        if p.key in values:
            view, value = p.view(tensors[p.name]), values[p.key]
            if view.shape != value.shape:
                raise FedplanError(
                    f"{p.key} has shape {tuple(view.shape)}, and the value {tuple(value.shape)}"
                )
            view.copy_(value)
