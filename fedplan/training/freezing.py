# SPDX-License-Identifier: Apache-2.0
"""Sets which params of a model are trained, including parts of fused tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from fedplan.errors import FedplanError
from fedplan.language.plan import Roles
from fedplan.models.params import Param


@dataclass(frozen=True)
class _TrainedRows:
    """The trained rows (`param`) of a fused `tensor`, as a parameter `leaf` for an optimizer.

    `shared`: the rows are contiguous, so `leaf` shares the tensor's memory, and a step on `leaf` is
    a step on the tensor. Otherwise `leaf` is a copy, to be written back after each step.
    """

    # A copy, because fused optimizers write over the gaps between rows.

    param: Param
    tensor: nn.Parameter
    leaf: nn.Parameter
    shared: bool


class TrainableParams:
    """The params of a model that roles train (SHARE and KEEP); created by `trainable`.

    Build an optimizer from `parameters()`; `release()`, or leaving the context, restores the model.
    If a fused tensor is trained in part, the trained rows are separate parameters, and the frozen
    rows are in no optimizer, so that neither weight decay nor momentum changes them. Its backward
    pass raises FedplanError if the model was moved or cast, or `parameters()` was never called.
    """

    def __init__(self, model: nn.Module, roles: Roles) -> None:
        tensors = dict(model.named_parameters())
        self._original_flags = {tensor: tensor.requires_grad for tensor in tensors.values()}
        self._trained: dict[str, nn.Parameter] = {}
        self._hooks: list[RemovableHandle] = []
        self._copies: list[_TrainedRows] = []
        self._model, self._roles = model, roles
        self._parameters_read = False
        params: dict[str, list[Param]] = {}
        for param in roles:
            params.setdefault(param.name, []).append(param)
        for name, tensor in tensors.items():
            trained = [param for param in params.get(name, []) if roles[param].is_trained]
            tensor.requires_grad_(bool(trained))
            if trained and len(trained) == len(params[name]):
                self._trained[name] = tensor
            elif trained:
                self._split(tensor, trained)
        if self._copies:
            self._hooks.append(register_optimizer_step_post_hook(self._write_back))

    def _split(self, tensor: nn.Parameter, trained: list[Param]) -> None:
        """Register the trained rows of a fused tensor, and a hook that passes on the gradient."""
        views = [(param, param.view(tensor.detach())) for param in trained]
        rows = [
            _TrainedRows(param, tensor, nn.Parameter(view.contiguous()), view.is_contiguous())
            for param, view in views
        ]
        storage = tensor.untyped_storage()

        def pass_gradients(tensor: Tensor) -> None:
            if tensor.untyped_storage() is not storage:
                raise FedplanError(
                    "the model was moved or cast while fused tensors are trained in part: do that "
                    "before the run, or before trainable()"
                )
            if not self._parameters_read:
                raise FedplanError(
                    "a fused tensor is trained in part, which its own optimizer entry cannot do: "
                    "build the optimizer from trainable_params.parameters(), not from "
                    "model.parameters()"
                )
            assert tensor.grad is not None
            for each in rows:
                part, leaf = each.param.view(tensor.grad), each.leaf
                leaf.grad = part.clone() if leaf.grad is None else leaf.grad.add_(part)
            tensor.grad = None

        self._hooks.append(tensor.register_post_accumulate_grad_hook(pass_gradients))
        self._trained |= {part.param.key: part.leaf for part in rows}
        self._copies += [part for part in rows if not part.shared]

    @torch.no_grad()
    def _write_back(self, *_: Any) -> None:
        for rows in self._copies:
            rows.param.view(rows.tensor).copy_(rows.leaf)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return the parameters for an optimizer: `AdamW(trainable_params.parameters())`."""
        return (tensor for _, tensor in self.named_parameters())

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Return pairs of param key and parameter, for optimizers with param groups."""
        self._parameters_read = True
        return iter(self._trained.items())

    def leaves(self) -> Iterator[tuple[Param, nn.Parameter]]:
        """Return pairs of Param and parameter; a whole fused tensor has the first of its params."""
        params = reversed([*self._roles])
        first_params = {p.key if p.key in self._trained else p.name: p for p in params}
        return ((first_params[key], tensor) for key, tensor in self.named_parameters())

    def gradients(self) -> Iterator[tuple[Param, Tensor, Tensor]]:
        """Yield (param, value, gradient) for each trained param that has a gradient.

        Both tensors are views, so that a change of the gradient in place takes effect.
        """
        tensors = dict(self._model.named_parameters())
        for param, role in self._roles.items():
            leaf = self._trained.get(param.key) if param.key != param.name else None
            tensor = tensors[param.name]
            if leaf is not None and leaf.grad is not None:
                yield param, leaf.detach(), leaf.grad
            elif role.is_trained and leaf is None and tensor.grad is not None:
                yield param, param.view(tensor.detach()), param.view(tensor.grad)

    def release(self) -> None:
        """Restore the model's requires_grad flags, remove all hooks and gradients; values stay."""
        self._write_back()
        for hook in self._hooks:
            hook.remove()
        for tensor, requires_grad in self._original_flags.items():
            tensor.requires_grad_(requires_grad)
            tensor.grad = None  # else the next client's first step would add it to its own

    def __enter__(self) -> TrainableParams:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def trainable(model: nn.Module, roles: Roles) -> TrainableParams:
    """Set requires_grad of exactly the params with role SHARE or KEEP, in place.

    Build the optimizer from the result's `parameters()`, which also has parts of fused tensors. Use
    the result as a context manager, or call `release()`, to restore the model's original flags.

        with trainable(model, resolve(plan, describe(model), turn)) as trainable_params:
            optimizer = torch.optim.AdamW(trainable_params.parameters(), weight_decay=0.1)
            ...
    """
    return TrainableParams(model, roles)
