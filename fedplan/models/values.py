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
    """The values of `params` in a model, on the CPU, by param key.

    With `copy=False` a value that is already on the CPU shares the model's memory.
    """
    tensors = dict(model.named_parameters())
    return {p.key: param_value(model, p, tensors[p.name]).to(CPU, copy=copy) for p in params}


@torch.no_grad()
def set_values(model: nn.Module, values: Tensors, params: Iterable[Param]) -> None:
    """Copy `values`, by param key, into a model; params without a value stay unchanged.

    Raises FedplanError for a value of another shape, and for a quantized param whose value differs
    from the present one: packed weights are never written.
    """
    tensors = dict(model.named_parameters())
    for p in params:
        if p.key in values and is_packed(tensors[p.name]):
            _require_same(p, param_value(model, p, tensors[p.name]), values[p.key])
        elif p.key in values:
            view, value = p.view(tensors[p.name]), values[p.key]
            if view.shape != value.shape:
                raise FedplanError(
                    f"{p.key} has shape {tuple(view.shape)}, but its value {tuple(value.shape)}"
                )
            view.copy_(value)


def _require_same(param: Param, now: Tensor, value: Tensor) -> None:
    """Raise FedplanError unless `value` equals the present value of a packed weight."""
    if now.shape != value.shape or not torch.equal(now.to(value.device), value):
        raise FedplanError(
            f"{param.key} is quantized and cannot be changed, but its new value differs: "
            "load the model that has this value"
        )
