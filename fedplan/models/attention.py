# SPDX-License-Identifier: Apache-2.0
"""Attention maps: capturing them by block in a forward pass, and comparing them."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from functools import partial
from inspect import signature
from itertools import takewhile
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from fedplan.errors import FedplanError
from fedplan.models.architectures import EAGER, GIVES_ATTENTION
from fedplan.models.description import describe
from fedplan.models.params import Block, Kind, Params
from fedplan.models.values import get_values, set_values
from fedplan.tensors.devices import eval_mode, model_device, sum_dtype, to_device
from fedplan.tensors.named import Batch, Tensors

AttentionCallback = Callable[[Block, Tensor], None]
"""Called with a block and its attention probabilities: [examples, heads, queries, keys]."""
_ATTENTION_KINDS = (Kind.QUERY, Kind.KEY, Kind.VALUE, Kind.OUT)


@torch.no_grad()
def capture_attention(model: nn.Module, batch: Batch, callback: AttentionCallback) -> None:
    """Run a batch without gradients and call `callback(block, map)` for each block.

    `map` has the probabilities of self-attention, [examples, heads, queries, keys]; for Swin the
    first dimension is windows, those of one image next to each other. A block that runs several
    times (ALBERT) is reported each time, one without probabilities not at all. Labels are not
    passed to the model. Raises FedplanError for packed batches.
    """
    if "position_ids" in batch and "attention_mask" not in batch:
        raise FedplanError(
            "attention cannot be captured for packed examples: leave task.packing out"
        )
    inputs = {name: each for name, each in batch.items() if name != "labels"}
    if "decoder_attention_mask" in batch and "decoder_input_ids" not in batch:
        shift = cast("Any", model).prepare_decoder_input_ids_from_labels
        inputs["decoder_input_ids"] = cast("Tensor", shift(batch["labels"]))
    with ExitStack() as undo:
        undo.enter_context(eval_mode(model))
        undo.enter_context(eager_attention(model))
        for block, module in _self_attention_modules(model).items():
            pre_hook = module.register_forward_pre_hook(_request_attention, with_kwargs=True)
            undo.callback(pre_hook.remove)
            hook = module.register_forward_hook(partial(_report_attention, block, callback))
            undo.callback(hook.remove)
        model(**to_device(inputs, model_device(model)))


@contextmanager
def eager_attention(model: nn.Module) -> Generator[None]:
    """Context manager that sets a model's attention implementation to eager until exit.

    Until exit torch's fast path of multi-head attention is disabled too, for the whole process.
    """
    # Fast attention kernels never compute the probabilities.
    configs: dict[int, Any] = {}
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, EAGER, None) is not None:
            configs[id(config)] = config
    implementations = [(config, getattr(config, EAGER)) for config in configs.values()]
    fast_path = torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        for config, _ in implementations:
            setattr(config, EAGER, {"": "eager"})
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)
        for config, implementation in implementations:
            # A dict sets it for this config only, and not for those inside it.
            setattr(config, EAGER, {"": implementation})


def _self_attention_modules(model: nn.Module) -> dict[Block, nn.Module]:
    """For each block, the smallest module with all its query, key, value and out params."""
    owners: dict[Block, list[list[str]]] = {}
    for p in describe(model):
        if p.block_id and p.kind in _ATTENTION_KINDS and "cross" not in p.tags:
            owners.setdefault(p.block_id, []).append(p.name.split(".")[:-1])
    modules = dict[Block, nn.Module]()
    for block, paths in owners.items():
        shared = takewhile(lambda level: len(set(level)) == 1, zip(*paths, strict=False))
        modules[block] = model.get_submodule(".".join(level[0] for level in shared))
    return modules


def _request_attention(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Forward pre-hook: set those arguments of GIVES_ATTENTION that the module's forward has."""
    parameters = signature(module.forward)
    bound = parameters.bind(*args, **kwargs)
    bound.arguments |= {
        name: value for name, value in GIVES_ATTENTION.items() if name in parameters.parameters
    }
    return bound.args, bound.kwargs


def _report_attention(
    block: Block, callback: AttentionCallback, module: nn.Module, args: Any, output: Any
) -> None:
    """Forward hook: call `callback(block, map)` with the last 4-dimensional tensor in `output`."""
    outputs = cast("tuple[Any, ...]", output) if isinstance(output, tuple) else ()
    # T5 returns its position bias, of the same shape, before the probabilities.
    maps = [each for each in outputs if isinstance(each, Tensor) and each.dim() == 4]
    if maps:
        callback(block, maps[-1])


def token_mask(batch: Batch, stack: str = "") -> Tensor | None:
    """Which tokens of a batch are not padding, as bool [examples, tokens]; None without a mask.

    By the mask that blocks of `stack` read; "vision" has none. Raises FedplanError for a mask that
    is not two-dimensional.
    """
    if stack == "vision":
        return None
    names = ("decoder_input_ids", "decoder_attention_mask")
    is_decoder = stack == "decoder" and any(name in batch for name in names)
    mask = batch.get("decoder_attention_mask" if is_decoder else "attention_mask")
    if mask is not None and mask.dim() != 2:
        raise FedplanError(
            f"an attention mask of shape {tuple(mask.shape)} does not say which tokens are real: "
            "give one of [examples, tokens]"
        )
    return None if mask is None else mask.bool()


def align_mask(mask: Tensor, size: int) -> Tensor:
    """A token mask [examples, tokens] padded on the left with False to `size` positions.

    Prompts of peft come first and are in no mask. Raises FedplanError if the mask is longer.

    >>> align_mask(torch.tensor([[True, True]]), 3).tolist()
    [[False, True, True]]
    """
    if mask.shape[1] > size:
        raise FedplanError(
            f"the attention mask has {mask.shape[1]} positions, but the attention map {size}: "
            "they cannot be aligned"
        )
    return pad(mask, (size - mask.shape[1], 0))


def attention_distance(first: Tensor, second: Tensor, mask: Tensor | None = None) -> float:
    """The mean total variation distance of two attention maps, in [0, 1].

    The mean is over examples, heads and queries; with a token mask, over queries that are True in
    it; 0 without such queries.
    """
    wide = sum_dtype(first.device)
    distances = (first.to(wide) - second.to(wide)).abs().sum(-1).transpose(1, 2) / 2
    if mask is not None:
        distances = distances[align_mask(mask.to(first.device), first.shape[2])]
    return min(float(distances.mean()), 1.0) if distances.numel() else 0.0


def attention_shift(
    model: nn.Module, params: Params, states: tuple[Tensors, Tensors], batch: Batch
) -> dict[Block, float]:
    """The `attention_distance` of each block between two states of a model, on a batch.

    For a block that runs several times, the mean over the runs. The model's own values are restored
    at the end. All maps of the first state are kept in memory, so use a small batch.
    """
    original, (first, second) = get_values(model, params), states
    batch = to_device(batch, model_device(model))
    first_maps: dict[Block, list[Tensor]] = {}
    distances: dict[Block, list[float]] = {}

    def keep(block: Block, attention: Tensor) -> None:
        first_maps.setdefault(block, []).append(attention)

    def compare(block: Block, attention: Tensor) -> None:
        mask = token_mask(batch, block.stack)
        distance = attention_distance(first_maps[block].pop(0), attention, mask)
        distances.setdefault(block, []).append(distance)

    try:
        set_values(model, first, params)
        capture_attention(model, batch, keep)
        set_values(model, second, params)
        capture_attention(model, batch, compare)
    finally:
        set_values(model, original, params)
    return {block: sum(runs) / len(runs) for block, runs in distances.items()}
