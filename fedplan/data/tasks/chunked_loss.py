# SPDX-License-Identifier: Apache-2.0
"""Cross entropy of a language model in chunks of tokens, without the logits of a whole batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedplan.data.tasks import CHUNK_LOGITS
from fedplan.tensors.devices import fork_rng_state, model_device

_IS_PLAIN = WeakKeyDictionary[nn.Module, bool]()
"""Whether a model returns what its head makes of each position, by models that were tried."""


def find_head(
    model: nn.Module, inputs: Mapping[str, Any], positions: torch.Size
) -> nn.Module | None:
    """Return the layer that makes a model's logits, if a batch is better given to it in chunks.

    `inputs`: of the batch; `positions`: examples and tokens of its labels. None if the logits fit
    one chunk, or are no more numbers than a trained head, if the forward pass of the layer or the
    model is replaced or has hooks after it, or under float16, where a gradient could overflow
    before it is scaled. Also None if the model changes what the layer returns, as by a soft cap:
    the first call for a model runs it to see.
    """
    find: Any = getattr(model, "get_output_embeddings", None)
    head: Any = None if find is None else find()
    weight: Any = getattr(head, "weight", None)
    if weight is None:
        return None
    # The sums of a trained head's gradients in float32 are as large as logits of so many numbers.
    least = max(CHUNK_LOGITS, weight.numel() if weight.requires_grad else 0)
    if positions.numel() * weight.shape[0] <= least:
        return None
    device = model_device(model)
    is_cast = torch.is_autocast_enabled(device.type)
    dtype = torch.get_autocast_dtype(device.type) if is_cast else weight.dtype
    is_replaced = "forward" in vars(model) or "forward" in vars(head)
    if is_replaced or head._forward_hooks or dtype is torch.float16:
        return None
    if model not in _IS_PLAIN:
        with torch.no_grad(), fork_rng_state(device):
            hidden, _IS_PLAIN[model] = _run(model, inputs, head)
            _IS_PLAIN[model] &= hidden.shape[:-1] == positions
        torch.clear_autocast_cache()  # older versions of torch keep casts of it without gradient
    return head if _IS_PLAIN[model] else None


def head_inputs(model: nn.Module, inputs: Mapping[str, Any], head: nn.Module) -> Tensor:
    """Run a model on a batch, all but the layer that makes logits; return this layer's input."""
    return _run(model, inputs, head)[0]


def _run(model: nn.Module, inputs: Mapping[str, Any], head: nn.Module) -> tuple[Tensor, bool]:
    """Run a model, with its head at one position of one example.

    Returns (input of the head, whether the model returns the head's output as logits).
    """
    hidden, logits = list[Tensor](), list[Tensor]()

    def shorten(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden.extend(args)
        return tuple(each[:1, :1] for each in args)

    def record(_: nn.Module, __: Any, output: Tensor) -> None:
        logits.append(output)

    hooks = [head.register_forward_pre_hook(shorten), head.register_forward_hook(record)]
    try:
        output: Any = model(**inputs)
    finally:
        for hook in hooks:
            hook.remove()
    returned = cast("Tensor", output if isinstance(output, Tensor) else output.logits)
    if len(hidden) != 1 or returned.shape != logits[0].shape:
        return returned, False
    return hidden[0], returned is logits[0]


def chunk_rows(head: nn.Module, count: int) -> Iterator[slice]:
    """Yield slices of `count` rows, as long as a head's logits fit one chunk."""
    rows = max(CHUNK_LOGITS // cast("Tensor", head.weight).shape[0], 1)
    return (slice(start, start + rows) for start in range(0, count, rows))


def chunked_cross_entropy(head: nn.Module, hidden: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross entropy of `head(hidden)` at the labels, one row or more.

    Equals the loss on all logits up to rounding. If a gradient is needed, it is computed with the
    loss, chunk by chunk, and kept until the backward pass in place of the logits.
    """
    trained = [param for param in head.parameters() if param.requires_grad]
    if torch.is_grad_enabled() and (hidden.requires_grad or trained):
        return cast("Any", _ChunkedCrossEntropy.apply)(head, hidden, labels, *trained)
    chunks = [(hidden[rows], labels[rows]) for rows in chunk_rows(head, len(labels))]
    # Hooks before the head have run, on all of its input.
    sums = [cross_entropy(head.forward(h).float(), y, reduction="sum") for h, y in chunks]
    return torch.stack(sums).sum() / len(labels)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """`chunked_cross_entropy` with gradients in `hidden` and in the `trained` params of `head`."""

    @staticmethod
    def forward(
        ctx: Any, head: nn.Module, hidden: Tensor, labels: Tensor, *trained: Tensor
    ) -> Tensor:
        total, gradient = torch.zeros((), device=hidden.device), torch.empty_like(hidden)
        # In 16 bits, the gradient of a chunk would round away beside those of many others.
        sums = [torch.zeros_like(param, dtype=torch.float32) for param in trained]
        for rows in chunk_rows(head, len(labels)):
            with torch.enable_grad():
                part = hidden[rows].detach().requires_grad_()
                loss = cross_entropy(head.forward(part).float(), labels[rows], reduction="sum")
            found: Any = torch.autograd.grad(loss, [part, *trained], allow_unused=True)
            total += loss.detach()
            gradient[rows] = found[0]
            for added, each in zip(sums, found[1:], strict=True):
                if each is not None:  # as of an adapter that is not active
                    added += each
        means = [each.div_(len(labels)) for each in (gradient, *sums)]
        dtypes = [each.dtype for each in (hidden, *trained)]
        ctx.save_for_backward(*(m.to(dtype) for m, dtype in zip(means, dtypes, strict=True)))
        return total / len(labels)

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> Any:
        gradient, *sums = (saved * outputs[0] for saved in ctx.saved_tensors)
        return None, gradient, None, *sums
