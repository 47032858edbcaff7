# SPDX-License-Identifier: Apache-2.0
"""Reading and writing the values of params in a live model."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from fedplan.errors import FedplanError
from fedplan.models.params import Param
from fedplan.models.quantized import is_packed, param_value
from fedplan.tensors.devices import CPU
from fedplan.tensors.named import Tensors


def get_values(
    model: nn.Module, params: Iterable[Param], *, copy: bool = True
) -> dict[str, Tensor]:
    """The values of `params` in a model as detached CPU tensors, by param key.

    With `copy=False` a value that is already on the CPU shares the model's memory, except for
    packed (quantized) weights: see `param_value`.
    """
    tensors = dict(model.named_parameters())
    return {p.key: param_value(model, p, tensors[p.name]).to(CPU, copy=copy) for p in params}


@torch.no_grad()
def set_values(model: nn.Module, values: Tensors, params: Iterable[Param]) -> None:
    """Copy `values`, by param key, into a model; params without a value stay unchanged.

    Packed (quantized) weights are never written. Raises FedplanError for a value of another shape,
    and for a packed weight if the given value differs from the present value; the params before the
    failing param are already written.
    """
    tensors = dict(model.named_parameters())
    for p in params:
        if p.key not in values:
            continue
        value = values[p.key]
        if is_packed(tensors[p.name]):
            now = param_value(model, p, tensors[p.name])
            if now.shape != value.shape or not torch.equal(now.to(value.device), value):
                raise FedplanError(
                    f"{p.key} is quantized and cannot be changed, but its new value differs: "
                    "load the model that has this value"
                )
            continue
        view = p.view(tensors[p.name])
        if view.shape != value.shape:
            raise FedplanError(
                f"{p.key} has shape {tuple(view.shape)}, but its value {tuple(value.shape)}"
            )
        view.copy_(value)
