# SPDX-License-Identifier: Apache-2.0
"""Traces of a forward pass: attention maps, contexts and outputs of blocks, and their replay.

Attention is recorded at the level of torch operators, as softmaxes and the matrix products after
them, so it does not depend on module names or on modules that return their probabilities.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fedplan.models.params import Block

Tensors = tuple[Tensor, ...]
"""Tensors recorded in order."""
SOFTMAX_OPS = ("aten::_softmax", "aten::_safe_softmax", "aten::softmax")
MATMUL_OPS = ("aten::bmm", "aten::baddbmm")
FUSED_ATTENTION_OP = "aten::_scaled_dot_product"
TOP_K_OP = "aten::topk"


class AttentionRecorder(TorchDispatchMode):
    """Context manager that records all attention computed by torch operators in the body.

    `maps`: copies of the attention probabilities, in order; of fused kernels (which give none) the
    products of query and key instead. `contexts`: the products of maps and values. `choices`: the
    number of top-k operations, as of routers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.maps: list[Tensor] = []
        self.contexts: list[Tensor] = []
        self.choices = 0
        self._awaits_context = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        name = str(func.name()).split(".")[0]
        # Routers use a softmax too, but of two dimensions only: tokens and experts.
        if name in SOFTMAX_OPS and out.dim() > 2:
            self.maps.append(out.clone())
            self._awaits_context = True
        elif name in MATMUL_OPS and self._awaits_context:
            self.contexts.append(out.clone())
            self._awaits_context = False
        elif name == TOP_K_OP:
            self.choices += 1
        elif name.startswith(FUSED_ATTENTION_OP):
            self.maps.append(args[0] @ args[1].transpose(-1, -2))
            self.contexts.append(out[0].clone())
        return out


@dataclass(frozen=True)
class BlockCall:
    """A recorded call of a block's `module`, with copies of `args` and `kwargs`.

    `replay()` calls the module again and returns a BlockTrace.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def replay(self) -> BlockTrace:
        """Call the block again with copies of the same arguments, and return the trace."""
        with AttentionRecorder() as recorder:
            out = self.module(*_copy_arguments(self.args), **_copy_arguments(dict(self.kwargs)))
        return BlockTrace(
            tuple(recorder.maps), tuple(recorder.contexts), tensors_in(out), recorder.choices
        )


@dataclass(frozen=True)
class BlockTrace:
    """The tensors of one call of a block, in order.

    `maps`: attention maps. `contexts`: products of maps and values. `outputs`: the float tensors
    that the block returned. `choices`: the number of top-k operations.
    """

    maps: Tensors
    contexts: Tensors
    outputs: Tensors
    choices: int = 0


@dataclass
class ModelTrace:
    """The tensors of a forward pass of a model; made by `trace_model`.

    By block, for the first call of the block: `calls`, the call; `block_inputs` and
    `block_outputs`, the floating-point inputs and outputs. Of the whole model: `maps`, all
    attention maps; `outputs`, the floating-point outputs.
    """

    calls: dict[Block, BlockCall] = field(default_factory=dict[Block, BlockCall])
    block_inputs: dict[Block, Tensors] = field(default_factory=dict[Block, Tensors])
    block_outputs: dict[Block, Tensors] = field(default_factory=dict[Block, Tensors])
    maps: Tensors = ()
    outputs: Tensors = ()


def trace_model(
    model: nn.Module, batch: Mapping[str, Tensor], blocks: Mapping[Block, nn.Module]
) -> ModelTrace:
    """Run a model on a batch (inputs by name) without gradients, and record the given blocks.

    The model should be in eval mode, and use eager attention; several blocks may have the same
    module. A block that does not run is not in the trace. If the first argument of a block is all
    zero, noise is recorded instead, for replays.
    """
    trace = ModelTrace()

    def record_call(block: Block, module: nn.Module, args: Any, kwargs: Any) -> None:
        # A block that runs several times (ALBERT) is checked by its first run.
        if block in trace.calls:
            return
        args, kwargs = _copy_arguments(args), _copy_arguments(kwargs)
        # The first block of DETR's decoder has an all-zero input.
        if args and isinstance(args[0], Tensor) and not args[0].any():
            noise = torch.randn(args[0].shape, generator=torch.Generator().manual_seed(3))
            args = (noise.to(args[0]), *args[1:])
        trace.calls[block] = BlockCall(module, args, kwargs)
        trace.block_inputs[block] = tensors_in((args, kwargs))

    def record_output(block: Block, module: nn.Module, args: Any, out: Any) -> None:
        trace.block_outputs.setdefault(block, tuple(each.clone() for each in tensors_in(out)))

    with ExitStack() as undo, torch.no_grad():
        for block, module in blocks.items():
            call_hook = partial(record_call, block)
            undo.callback(module.register_forward_pre_hook(call_hook, with_kwargs=True).remove)
            undo.callback(module.register_forward_hook(partial(record_output, block)).remove)
        with AttentionRecorder() as recorder:
            out = model(**batch)
    trace.maps, trace.outputs = tuple(recorder.maps), tensors_in(out)
    return trace


def _copy_arguments(value: Any) -> Any:
    """Copy nested arguments for a replay: tensors are cloned, key-value caches become None."""
    if isinstance(value, Tensor):
        return value.clone()
    if type(value) in (tuple, list):
        return type(value)(_copy_arguments(each) for each in value)
    if type(value) is dict:
        return {name: _copy_arguments(each) for name, each in value.items()}  # pyright: ignore[reportUnknownVariableType]
    return None if type(value).__name__.endswith("Cache") else value


def tensors_in(value: Any) -> Tensors:
    """All floating-point tensors in a value of nested tuples, lists and mappings, in order."""
    if isinstance(value, Tensor):
        return (value,) if value.is_floating_point() else ()
    if isinstance(value, Mapping):
        value = tuple(value.values())  # pyright: ignore[reportUnknownVariableType,reportUnknownArgumentType]
    if isinstance(value, tuple | list):
        return tuple(t for each in value for t in tensors_in(each))  # pyright: ignore[reportUnknownVariableType]
    return ()


def same_tensors(ones: Tensors, others: Tensors) -> bool:
    """Whether two tuples of tensors have equal shapes and values; NaNs are equal to each other."""
    return len(ones) == len(others) and all(
        one.shape == other.shape and torch.equal(one.nan_to_num(), other.nan_to_num())
        for one, other in zip(ones, others, strict=True)
    )
