# SPDX-License-Identifier: Apache-2.0
"""Values: those of a live model's params, taken and put back."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from fedplan.errors import FedplanError
from fedplan.models.params import Param
from fedplan.models.quantised import is_packed, value_in
from fedplan.tensors.devices import HOST
from fedplan.tensors.named import Tensors


def take(model: nn.Module, params: Iterable[Param], *, lent: bool = False) -> dict[str, Tensor]:
    """Copies, in host memory, of the values that params have in a model.

    Those that are `lent` and in host memory are the model's own, and change when it does.
    """
    tensors, copied = dict(model.named_parameters()), not lent
    return {p.key: value_in(model, p, tensors[p.name]).to(HOST, copy=copied) for p in params}


@torch.no_grad()
def put(model: nn.Module, values: Tensors, params: Iterable[Param]) -> None:
    """Give params of a model the values of their keys; params without one stay as they are."""
    tensors = dict(model.named_parameters())
    for p in params:
        if p.key in values and is_packed(tensors[p.name]):
            _require_same(p, value_in(model, p, tensors[p.name]), values[p.key])
        elif p.key in values:
            view, value = p.view(tensors[p.name]), values[p.key]
            if view.shape != value.shape:
                raise FedplanError(
                    f"{p.key} has shape {tuple(view.shape)}, and the value {tuple(value.shape)}"
                )
            view.copy_(value)


def _require_same(param: Param, now: Tensor, value: Tensor) -> None:
    """A packed weight is never written: one may give it the value that it has."""
    if now.shape != value.shape or not torch.equal(now.to(value.device), value):
        raise FedplanError(
            f"{param.key} is quantised and stays as it was loaded, and it is given another value: "
            "load the model that has it"
        )
