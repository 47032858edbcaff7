# SPDX-License-Identifier: Apache-2.0
"""Hearing: what a model's blocks attend to, pass on and give, and one block played again alone.

Attention is heard where it is made: as softmaxes, and the products that follow them. So it does
not matter what a module is called, or whether it gives its probabilities when it is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fedplan.models.params import Block

Tensors = tuple[Tensor, ...]
SOFTMAX = ("aten::_softmax", "aten::_safe_softmax", "aten::softmax")
PRODUCTS = ("aten::bmm", "aten::baddbmm")
FAST = "aten::_scaled_dot_product"
CHOICE = "aten::topk"


class Ears(TorchDispatchMode):
    """Hears attention: its maps, and what it makes of the values."""

    def __init__(self) -> None:
        super().__init__()
        self.maps: list[Tensor] = []
        self.contexts: list[Tensor] = []
        self.choices = 0
        self._open = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        name = str(func.name()).split(".")[0]
        # Routers choose experts by a softmax too, over tokens and experts only.
        if name in SOFTMAX and out.dim() > 2:
            self.maps.append(out.clone())
            self._open = True
        elif name in PRODUCTS and self._open:
            self.contexts.append(out.clone())
            self._open = False
        elif name == CHOICE:
            self.choices += 1
        elif name.startswith(FAST):
            self.maps.append(args[0] @ args[1].transpose(-1, -2))
            self.contexts.append(out[0].clone())
        return out


@dataclass(frozen=True)
class BlockCall:
    """A module with what it was first called with."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def awake(self) -> BlockCall:
        """The call with noise where nothing comes in: DETR's first decoder starts from zeros."""
        if self.args and isinstance(self.args[0], Tensor) and not self.args[0].any():
            generator = torch.Generator().manual_seed(3)
            noise = torch.randn(self.args[0].shape, generator=generator).to(self.args[0])
            return replace(self, args=(noise, *self.args[1:]))
        return self

    def again(self) -> Seen:
        """Call it once more, and hear it."""
        with Ears() as ears:
            out = self.module(*_copied(self.args), **_copied(dict(self.kwargs)))
        return Seen(tuple(ears.maps), tuple(ears.contexts), tensors_in(out), ears.choices)


@dataclass(frozen=True)
class Seen:
    """What a block attended to, what its attention passed on, and what it gave.

    `choices` is how often it took the best of something, as routers do.
    """

    maps: Tensors
    contexts: Tensors
    outputs: Tensors
    choices: int = 0


@dataclass
class Hearing:
    """A whole run: the first call of each block, what the blocks gave, and what the model did."""

    calls: dict[Block, BlockCall] = field(default_factory=dict[Block, BlockCall])
    inputs: dict[Block, Tensors] = field(default_factory=dict[Block, Tensors])
    given: dict[Block, Tensors] = field(default_factory=dict[Block, Tensors])
    maps: Tensors = ()
    outputs: Tensors = ()


def heard(
    model: nn.Module, batch: Mapping[str, Tensor], blocks: Mapping[Block, nn.Module]
) -> Hearing:
    """Run a batch and keep what was heard. The model should be at rest, and eager."""
    run = Hearing()
    with ExitStack() as undo, torch.no_grad():
        for block, module in blocks.items():
            before = module.register_forward_pre_hook(_came(run, block), with_kwargs=True)
            undo.callback(before.remove)
            undo.callback(module.register_forward_hook(_went(run, block)).remove)
        with Ears() as ears:
            out = model(**batch)
    run.maps, run.outputs = tuple(ears.maps), tensors_in(out)
    return run


def _came(run: Hearing, block: Block) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # A block that is run several times (ALBERT) is judged by its first run.
        if block not in run.calls:
            run.calls[block] = BlockCall(module, _copied(args), _copied(kwargs)).awake()
            run.inputs[block] = tensors_in((run.calls[block].args, run.calls[block].kwargs))

    return hook


def _went(run: Hearing, block: Block) -> Callable[..., None]:
    def hook(_: nn.Module, __: Any, out: Any) -> None:
        run.given.setdefault(block, tuple(each.clone() for each in tensors_in(out)))

    return hook


def _copied(value: Any) -> Any:
    """Arguments that can be given again: own memory for tensors, and no memory of earlier calls."""
    if isinstance(value, Tensor):
        return value.clone()
    if type(value) in (tuple, list):
        return type(value)(_copied(each) for each in value)
    if type(value) is dict:
        return {name: _copied(each) for name, each in value.items()}  # pyright: ignore[reportUnknownVariableType]
    return None if type(value).__name__.endswith("Cache") else value


def tensors_in(value: Any) -> Tensors:
    """All tensors of real numbers in something, in order."""
    if isinstance(value, Tensor):
        return (value,) if value.is_floating_point() else ()
    if isinstance(value, Mapping):
        value = tuple(value.values())  # pyright: ignore[reportUnknownVariableType,reportUnknownArgumentType]
    if isinstance(value, tuple | list):
        return tuple(t for each in value for t in tensors_in(each))  # pyright: ignore[reportUnknownVariableType]
    return ()


def same(ones: Tensors, others: Tensors) -> bool:
    """Whether two hearings are the same, bit for bit."""
    return len(ones) == len(others) and all(
        one.shape == other.shape and torch.equal(one.nan_to_num(), other.nan_to_num())
        for one, other in zip(ones, others, strict=True)
    )
