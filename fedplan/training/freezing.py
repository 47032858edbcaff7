# SPDX-License-Identifier: Apache-2.0
"""Freezing: a live model's params marked as trainable or not, rows of fused tensors too."""

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
class _Rows:
    """Trained rows of a fused tensor, as a parameter that an optimiser can hold.

    Dense rows share the tensor's memory: a step on them is a step on the tensor. Rows with gaps
    are a copy that is written back after each step, because fused optimisers write over the gaps.
    """

    param: Param
    tensor: nn.Parameter
    leaf: nn.Parameter
    shared: bool

    @staticmethod
    def of(param: Param, tensor: nn.Parameter) -> _Rows:
        rows = param.view(tensor.detach())
        return _Rows(param, tensor, nn.Parameter(rows.contiguous()), rows.is_contiguous())

    def take_gradient(self, whole: Tensor) -> None:
        """Add this share of the tensor's gradient to the leaf's."""
        mine = self.param.view(whole)
        self.leaf.grad = mine.clone() if self.leaf.grad is None else self.leaf.grad.add_(mine)

    def write_back(self) -> None:
        """Carry what a step did to the leaf over to the tensor."""
        with torch.no_grad():
            self.param.view(self.tensor).copy_(self.leaf)


class Marked:
    """A model whose trained params, and only those, an optimiser can reach.

    Where a fused tensor is trained in part, its trained rows are parameters of their own that
    receive their share of the gradient. The frozen rows are in no optimiser, so neither decay nor
    momentum can move them, and they cost it no memory.
    """

    def __init__(self, model: nn.Module, roles: Roles) -> None:
        tensors = dict(model.named_parameters())
        self._found = {tensor: tensor.requires_grad for tensor in tensors.values()}
        self._trained: dict[str, nn.Parameter] = {}
        self._hooks: list[RemovableHandle] = []
        self._copies: list[_Rows] = []
        self._model, self._roles = model, roles
        self._asked = False
        held: dict[str, list[Param]] = {}
        for param in roles:
            held.setdefault(param.name, []).append(param)
        for name, tensor in tensors.items():
            self._mark(tensor, held.get(name, []), roles)
        if self._copies:
            self._hooks.append(register_optimizer_step_post_hook(self._write_back))

    def _mark(self, tensor: nn.Parameter, held: list[Param], roles: Roles) -> None:
        trained = [param for param in held if roles[param].trained]
        tensor.requires_grad_(bool(trained))
        if trained and len(trained) == len(held):
            self._trained[held[0].name] = tensor
        elif trained:
            self._split(tensor, [_Rows.of(param, tensor) for param in trained])

    def _split(self, tensor: nn.Parameter, rows: list[_Rows]) -> None:
        place = tensor.untyped_storage()

        def hand_over(tensor: Tensor) -> None:
            self._require_use(tensor.untyped_storage() is place)
            assert tensor.grad is not None
            for each in rows:
                each.take_gradient(tensor.grad)
            tensor.grad = None

        self._hooks.append(tensor.register_post_accumulate_grad_hook(hand_over))
        self._trained |= {each.param.key: each.leaf for each in rows}
        self._copies += [each for each in rows if not each.shared]

    def _require_use(self, in_place: bool) -> None:
        if not in_place:
            raise FedplanError(
                "the model was moved or cast after mark: do that first, then mark it"
            )
        if not self._asked:
            raise FedplanError(
                "a fused tensor is trained in part, which its own optimiser entry cannot do: build "
                "the optimiser from marked.parameters(), not from model.parameters()"
            )

    def _write_back(self, *_: Any) -> None:
        for rows in self._copies:
            rows.write_back()

    def parameters(self) -> Iterator[nn.Parameter]:
        """What an optimiser gets: `torch.optim.AdamW(marked.parameters())`."""
        return (tensor for _, tensor in self.named_parameters())

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The same by key, for optimisers with groups."""
        self._asked = True
        return iter(self._trained.items())

    def leaves(self) -> Iterator[tuple[Param, nn.Parameter]]:
        """The same with the param of each; of a whole tensor of several, its first."""
        params = reversed([*self._roles])
        firsts = {p.key if p.key in self._trained else p.name: p for p in params}
        return ((firsts[key], tensor) for key, tensor in self.named_parameters())

    def gradients(self) -> Iterator[tuple[Param, Tensor, Tensor]]:
        """Each trained param that has a gradient, with its value and gradient, to be changed."""
        tensors = dict(self._model.named_parameters())
        for param, role in self._roles.items():
            leaf = self._trained.get(param.key) if param.key != param.name else None
            whole = tensors[param.name]
            if leaf is not None and leaf.grad is not None:
                yield param, leaf.detach(), leaf.grad
            elif role.trained and leaf is None and whole.grad is not None:
                yield param, param.view(whole.detach()), param.view(whole.grad)

    def release(self) -> None:
        """Give the model its own flags back; what was trained stays trained."""
        self._write_back()
        for hook in self._hooks:
            hook.remove()
        for tensor, trained in self._found.items():
            tensor.requires_grad_(trained)

    def __enter__(self) -> Marked:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


def mark(model: nn.Module, roles: Roles) -> Marked:
    """Make exactly the SHARE and KEEP params of a model trainable, rows of fused tensors included.

    Give the optimiser `marked.parameters()`. Leave the `with` block, or call `release`, and the
    model's own flags are back.

        with mark(model, resolve(plan, describe(model), turn)) as marked:
            optimiser = torch.optim.AdamW(marked.parameters(), weight_decay=0.1)
            ...
    """
    return Marked(model, roles)
