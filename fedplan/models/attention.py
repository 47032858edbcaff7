# SPDX-License-Identifier: Apache-2.0
"""Attention: what each block of a model looks at, heard while the model runs and not kept."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
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
from fedplan.models.values import put, take
from fedplan.tensors.devices import at_rest, brought, device_of, widest
from fedplan.tensors.named import Batch, Tensors

See = Callable[[Block, Tensor], None]
"""Takes a block and its probabilities: [rows, heads, queries, keys]."""


@torch.no_grad()
def listen(model: nn.Module, batch: Batch, see: See) -> None:
    """Run a batch and show each block's self-attention, one after the other; none is kept.

    A block that runs several times (ALBERT) is shown each time; Swin's rows are windows, those of
    one image next to each other. Labels are not given to the model, which is left as it was.
    """
    inputs = _inputs(model, batch)
    with ExitStack() as undo:
        undo.enter_context(at_rest(model))
        undo.enter_context(eager(model))
        for block, module in _self_attention(model).items():
            asked = module.register_forward_pre_hook(_ask, with_kwargs=True)
            undo.callback(asked.remove)
            undo.callback(module.register_forward_hook(_show(block, see)).remove)
        model(**brought(inputs, device_of(model)))


def _inputs(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """What a model is shown of a batch: of two texts, also the one that it is to say so far."""
    if "position_ids" in batch and "attention_mask" not in batch:
        raise FedplanError("attention is not looked at in packed rows: leave task.packing out")
    inputs = {name: each for name, each in batch.items() if name != "labels"}
    if "decoder_attention_mask" in batch and "decoder_input_ids" not in batch:
        begun = cast("Any", model).prepare_decoder_input_ids_from_labels(batch["labels"])
        inputs["decoder_input_ids"] = cast("Tensor", begun)
    return inputs


@contextmanager
def eager(model: nn.Module) -> Generator[None]:
    """A model whose attention has probabilities: fast kernels never write them down."""
    found = {id(config): config for config in _configs(model)}
    were = [(config, getattr(config, EAGER)) for config in found.values()]
    fast = torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        for config, _ in were:
            setattr(config, EAGER, {"": "eager"})
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for config, was in were:
            # As a table it is said of this configuration only, and not of those inside it.
            setattr(config, EAGER, {"": was})


def _configs(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, EAGER, None) is not None:
            yield config


_KINDS = (Kind.QUERY, Kind.KEY, Kind.VALUE, Kind.OUT)


def _self_attention(model: nn.Module) -> dict[Block, nn.Module]:
    """Of each block, the smallest module that holds all that its self-attention is made of."""
    owners: dict[Block, list[list[str]]] = {}
    for p in describe(model):
        if p.at and p.kind in _KINDS and "cross" not in p.tags:
            owners.setdefault(p.at, []).append(p.name.split(".")[:-1])
    return {block: model.get_submodule(_above(paths)) for block, paths in owners.items()}


def _above(paths: list[list[str]]) -> str:
    """The path down to which all of some paths are one."""
    levels = zip(*paths, strict=False)
    return ".".join(level[0] for level in takewhile(lambda level: len(set(level)) == 1, levels))


def _ask(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Ask a module for its probabilities, if it is one that wants to be asked."""
    takes = signature(module.forward)
    bound = takes.bind(*args, **kwargs)
    bound.arguments |= {
        word: said for word, said in GIVES_ATTENTION.items() if word in takes.parameters
    }
    return bound.args, bound.kwargs


def _show(block: Block, see: See) -> Callable[[nn.Module, Any, Any], None]:
    def hook(_: nn.Module, __: Any, output: Any) -> None:
        several = cast("tuple[Any, ...]", output) if isinstance(output, tuple) else ()
        # T5 gives its position bias, of the same shape, before the probabilities.
        found = [each for each in several if isinstance(each, Tensor) and each.dim() == 4]
        if found:
            see(block, found[-1])

    return hook


def places(batch: Batch, stack: str = "") -> Tensor | None:
    """Which positions of a stack are real, [rows, tokens]; None where nothing says, as of images.

    The decoder of an encoder-decoder has a mask of its own.
    """
    if stack == "vision":
        return None
    words = ("decoder_input_ids", "decoder_attention_mask")
    own = stack == "decoder" and any(word in batch for word in words)
    mask = batch.get("decoder_attention_mask" if own else "attention_mask")
    if mask is not None and mask.dim() != 2:
        raise FedplanError(
            f"an attention mask of shape {tuple(mask.shape)} does not say which tokens are real: "
            "give one of [rows, tokens]"
        )
    return None if mask is None else mask.bool()


def aligned(inside: Tensor, size: int) -> Tensor:
    """Positions of a batch as positions of a map: what stands before them, as prompts do, is not.

    >>> aligned(torch.tensor([[True, True]]), 3).tolist()
    [[False, True, True]]
    """
    if inside.shape[1] > size:
        raise FedplanError(
            f"the mask has {inside.shape[1]} positions and the attention {size}: "
            "it does not say which of them are real"
        )
    return pad(inside, (size - inside.shape[1], 0))


def apart(one: Tensor, other: Tensor, inside: Tensor | None = None) -> float:
    """How far two maps are from each other, in [0, 1]: the mean total variation distance.

    The mean is over rows, heads and queries; with `inside` ([rows, tokens]) over real queries.
    """
    wide = widest(one.device)
    distances = (one.to(wide) - other.to(wide)).abs().sum(-1).transpose(1, 2) / 2
    if inside is not None:
        distances = distances[aligned(inside.to(one.device), one.shape[2])]
    return min(float(distances.mean()), 1.0) if distances.numel() else 0.0


def moved(
    model: nn.Module, params: Params, states: tuple[Tensors, Tensors], batch: Batch
) -> dict[Block, float]:
    """How far each block's attention is apart between two states of a model, on a batch.

    The maps of the first state are held meanwhile: give it few rows. The model's own values are
    back in the end.
    """
    own, (first, second) = take(model, params), states
    batch = brought(batch, device_of(model))
    held: dict[Block, list[Tensor]] = {}
    found: dict[Block, list[float]] = {}

    def compare(block: Block, seen: Tensor) -> None:
        inside = places(batch, block.stack)
        found.setdefault(block, []).append(apart(held[block].pop(0), seen, inside))

    try:
        put(model, first, params)
        listen(model, batch, lambda block, seen: held.setdefault(block, []).append(seen))
        put(model, second, params)
        listen(model, batch, compare)
    finally:
        put(model, own, params)
    return {block: sum(runs) / len(runs) for block, runs in found.items()}
