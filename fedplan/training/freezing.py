# SPDX-License-Identifier: Apache-2.0
"""Sets which params of a model are trained, including parts of fused tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
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
    """The trained rows of a fused tensor, as a parameter for an optimizer.

    `leaf`: the parameter. If the rows are contiguous it shares the tensor's memory (`shared`), so a
    step on it is a step on the tensor. Otherwise it is a copy, written back after each step, since
    fused optimizers write over the gaps.
    """

    param: Param
    tensor: nn.Parameter
    leaf: nn.Parameter
    shared: bool

    @staticmethod
    def of(param: Param, tensor: nn.Parameter) -> _TrainedRows:
        rows = param.view(tensor.detach())
        return _TrainedRows(param, tensor, nn.Parameter(rows.contiguous()), rows.is_contiguous())

    def take_gradient(self, gradient: Tensor) -> None:
        """Add the rows' part of the tensor's gradient to the leaf's gradient."""
        part = self.param.view(gradient)
        self.leaf.grad = part.clone() if self.leaf.grad is None else self.leaf.grad.add_(part)

    def write_back(self) -> None:
        """Copy the leaf's values into the tensor."""
        with torch.no_grad():
            self.param.view(self.tensor).copy_(self.leaf)


class TrainableParams:
    """The trained params of a model, for an optimizer; created by `trainable`.

    If a fused tensor is trained in part, its trained rows are parameters of their own that receive
    their part of the gradient. The frozen rows are in no optimizer: neither weight decay nor
    momentum can change them, and they need no optimizer state.
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
            self._set_trainable(tensor, params.get(name, []), roles)
        if self._copies:
            self._hooks.append(register_optimizer_step_post_hook(self._write_back))

    def _set_trainable(self, tensor: nn.Parameter, params: list[Param], roles: Roles) -> None:
        """Set a tensor's requires_grad by the roles of its params; split it if roles differ."""
        trained = [param for param in params if roles[param].is_trained]
        tensor.requires_grad_(bool(trained))
        if trained and len(trained) == len(params):
            self._trained[params[0].name] = tensor
        elif trained:
            self._split(tensor, [_TrainedRows.of(param, tensor) for param in trained])

    def _split(self, tensor: nn.Parameter, rows: list[_TrainedRows]) -> None:
        """Register a fused tensor's trained rows, and a hook that gives them their gradients."""
        storage = tensor.untyped_storage()

        def pass_gradients(tensor: Tensor) -> None:
            self._require_use(in_place=tensor.untyped_storage() is storage)
            assert tensor.grad is not None
            for part in rows:
                part.take_gradient(tensor.grad)
            tensor.grad = None

        self._hooks.append(tensor.register_post_accumulate_grad_hook(pass_gradients))
        self._trained |= {part.param.key: part.leaf for part in rows}
        self._copies += [part for part in rows if not part.shared]

    def _require_use(self, *, in_place: bool) -> None:
        """Raise FedplanError if the model was moved, or `parameters()` was never called."""
        if not in_place:
            raise FedplanError(
                "the model was moved or cast after trainable(): do that before the call"
            )
        if not self._parameters_read:
            raise FedplanError(
                "a fused tensor is trained in part, which its own optimizer entry cannot do: build "
                "the optimizer from trainable_params.parameters(), not from model.parameters()"
            )

    def _write_back(self, *_: Any) -> None:
        for rows in self._copies:
            rows.write_back()

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return the parameters for an optimizer: `AdamW(trainable_params.parameters())`."""
        return (tensor for _, tensor in self.named_parameters())

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Return pairs of key and parameter, for optimizers with param groups."""
        self._parameters_read = True
        return iter(self._trained.items())

    def leaves(self) -> Iterator[tuple[Param, nn.Parameter]]:
        """Return pairs of Param and parameter; a whole fused tensor has the first of its params."""
        params = reversed([*self._roles])
        first_params = {p.key if p.key in self._trained else p.name: p for p in params}
        return ((first_params[key], tensor) for key, tensor in self.named_parameters())

    def gradients(self) -> Iterator[tuple[Param, Tensor, Tensor]]:
        """Yield each trained param that has a gradient, with its value and its gradient.

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
        """Restore the model's original requires_grad flags and remove all hooks.

        Trained values stay.
        """
        self._write_back()
        for hook in self._hooks:
            hook.remove()
        for tensor, requires_grad in self._original_flags.items():
            tensor.requires_grad_(requires_grad)

    def __enter__(self) -> TrainableParams:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


def trainable(model: nn.Module, roles: Roles) -> TrainableParams:
    """Set requires_grad of exactly the SHARE and KEEP params, including parts of fused tensors.

    Build the optimizer from the result's `parameters()`. Use it as a context manager, or call
    `release()`, to restore the model's original flags.

        with trainable(model, resolve(plan, describe(model), turn)) as trainable_params:
            optimizer = torch.optim.AdamW(trainable_params.parameters(), weight_decay=0.1)
            ...
    """
    return TrainableParams(model, roles)
