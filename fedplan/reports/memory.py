# SPDX-License-Identifier: Apache-2.0
"""Estimate the device memory of a client's training step from param shapes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from fedplan.errors import FedplanError
from fedplan.language.plan import Roles
from fedplan.models.params import ITEMSIZE, TRAINABLE_DTYPES, Block, Kind, Param, Params

OPTIMIZER_STATES = {
    **{"adamw": 2, "adam": 2, "nadam": 2, "radam": 2, "adamax": 2, "sgd": 0, "momentum": 1},
    **{"rmsprop": 1, "adagrad": 1, "adafactor": 0},
}
"""Values that an optimizer stores for each trained value."""
SCALE_BYTES = 1 / 64 + 4 / (64 * 256)
"""Bytes of scales per 4-bit value: one byte per 64 values, and four bytes per 256 scales."""
QUANTIZED_BYTES = {"": 0.0, "nf4": 0.5 + SCALE_BYTES, "fp4": 0.5 + SCALE_BYTES, "int8": 1.0}
"""Bytes per value of a quantized weight in bitsandbytes; the few scales of int8 are not counted."""
PACKED_DTYPE = "uint8"
"""The dtype of a weight that is already quantized: two 4-bit values per byte."""
GPU_BYTES = 24 * 10**9
"""The memory of the GPU that a step is compared with."""
ATTENTION_INPUTS = (Kind.QUERY, Kind.KEY, Kind.VALUE)
"""The projections of an attention layer's input."""


@dataclass(frozen=True)
class TrainingStep:
    """A client's training step: examples per batch, tokens per example, optimizer and precision.

    `gradient_checkpointing` stores only the input of each block and recomputes the rest;
    `quantized` ("nf4", "fp4", "int8" or "") is the format of the blocks' linear weights; `autocast`
    computes in 16 bits. Raises FedplanError on an unknown optimizer or format, or a size below 1.
    """

    batch_size: int = 8
    sequence_length: int = 512
    optimizer: str = "adamw"
    gradient_checkpointing: bool = False
    quantized: str = ""
    autocast: bool = False

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZER_STATES:
            raise FedplanError(
                f"the state of the optimizer {self.optimizer!r} is unknown; use one of "
                f"{', '.join(OPTIMIZER_STATES)}"
            )
        if self.quantized not in QUANTIZED_BYTES:
            formats = ", ".join(filter(None, QUANTIZED_BYTES))
            raise FedplanError(f"quantized is {self.quantized!r}; use one of {formats}")
        if self.batch_size < 1 or self.sequence_length < 1:
            raise FedplanError(
                f"batch_size is {self.batch_size} and max_length is {self.sequence_length}: "
                "both must be at least 1"
            )

    @property
    def tokens(self) -> int:
        """The number of tokens in a batch."""
        return self.batch_size * self.sequence_length

    @property
    def text(self) -> str:
        """The step in words, for a heading."""
        quantized = f", weights in {self.quantized}" if self.quantized else ""
        recompute = ", gradient checkpointing" if self.gradient_checkpointing else ""
        sizes = f"batch {self.batch_size}, {self.sequence_length} tokens per example"
        return f"{sizes}, {self.optimizer}{quantized}{recompute}"


@dataclass(frozen=True)
class MemoryEstimate:
    """The bytes of a training step; activations and logits are estimated.

    `weights` are by dtype or format; `logits` are those of a language model.
    """

    weights: dict[str, int]
    gradients: int
    optimizer: int
    activations: int
    logits: int

    @property
    def total(self) -> int:
        """The sum, as if everything were in memory at the same time."""
        exact = sum(self.weights.values()) + self.gradients + self.optimizer
        return exact + self.activations + self.logits

    def json(self) -> dict[str, Any]:
        """Return the estimate as plain values in bytes."""
        return {
            "weights": self.weights,
            "gradients": self.gradients,
            "optimizer": self.optimizer,
            "activations_estimated": self.activations,
            "answers_estimated": self.logits,
            "total_estimated": self.total,
            "fits_24_gb": self.total < GPU_BYTES,
        }


def estimate_memory(params: Params, roles: Roles, step: TrainingStep) -> MemoryEstimate:
    """Estimate the memory of a training step in which the params have these roles."""
    trained = frozenset(p for p in params if roles[p].is_trained)
    weights = Counter[str]()
    for p in params:
        weights[_weight_dtype(p, step)] += _weight_bytes(p, step)
    if step.autocast:
        # Autocast keeps a copy of each weight that it has cast until the end of the step.
        cast = (p for p in params if p.block_id and ITEMSIZE[p.dtype] > 2)
        weights["16-bit copies"] = sum(2 * p.numel for p in cast)
    gradients = sum(p.nbytes for p in trained)
    return MemoryEstimate(
        {name: n for name, n in weights.items() if n},
        gradients,
        OPTIMIZER_STATES[step.optimizer] * gradients,
        _activation_bytes(params, trained, step),
        _logit_bytes(params, trained, step),
    )


def _weight_dtype(param: Param, step: TrainingStep) -> str:
    """Return the dtype, or the quantized format, in which a param is held."""
    return step.quantized if _is_quantized(param, step) else param.dtype


def _is_quantized(param: Param, step: TrainingStep) -> bool:
    """Whether a step quantizes a param: only linear weights of blocks, without adapters."""
    linear = param.kind in (*ATTENTION_INPUTS, Kind.OUT, Kind.MLP) and len(param.shape) > 1
    return (
        bool(step.quantized) and linear and param.block_id is not None and "bias" not in param.tags
    )


def _weight_bytes(param: Param, step: TrainingStep) -> int:
    """Return the bytes in which a param is held, quantized or not."""
    if param.dtype == PACKED_DTYPE:
        return int(_value_count(param) * QUANTIZED_BYTES["nf4"])
    packed = _is_quantized(param, step)
    return int(param.numel * QUANTIZED_BYTES[step.quantized]) if packed else param.nbytes


def _value_count(param: Param) -> int:
    """Return the number of values of a param; packed weights have two per byte."""
    return 2 * param.numel if param.dtype == PACKED_DTYPE else param.numel


def _activation_bytes(params: Params, trained: frozenset[Param], step: TrainingStep) -> int:
    """Return the bytes that blocks store for the backward pass, 0 if nothing is trained.

    They count from the lowest block with a gradient up. With gradient checkpointing they are the
    input of each such block and all of the largest one. The minimum is the input and output of the
    widest layer in a forward pass.
    """
    blocks = _blocks(params)
    if not trained or not blocks:
        return 0
    active = _blocks_with_gradient(blocks, trained)
    stored = [_block_activations(ps, trained, step) for ps in active]
    forward = step.tokens * max(
        (_hidden_size(b) + _mlp_width(b)) * _compute_itemsize(b, step) for b in blocks.values()
    )
    if step.gradient_checkpointing and stored:
        inputs = (step.tokens * _hidden_size(ps) * _compute_itemsize(ps, step) for ps in active)
        return sum(inputs) + max(stored)
    return max(sum(stored), forward)


def _blocks(params: Params) -> dict[Block, list[Param]]:
    """Return the params of each block."""
    blocks = dict[Block, list[Param]]()
    for p in params:
        if p.block_id is not None:
            blocks.setdefault(p.block_id, []).append(p)
    return blocks


def _blocks_with_gradient(
    blocks: dict[Block, list[Param]], trained: frozenset[Param]
) -> list[list[Param]]:
    """Return the params of each block that the backward pass reaches."""
    lowest = {stack: _lowest_block(stack, trained) for stack in {at.stack for at in blocks}}
    if lowest.get("encoder") is not None and "decoder" in lowest:
        lowest["decoder"] = 0  # cross-attention: the gradient of the encoder passes all of it
    reached = list[list[Param]]()
    for at, params in blocks.items():
        low = lowest[at.stack]
        if low is not None and at.number >= low:
            reached.append(params)
    return reached


def _lowest_block(stack: str, trained: frozenset[Param]) -> int | None:
    """Return the lowest block of a stack with a gradient, 0 if embeddings are trained, or None."""
    below = any(p.kind in (Kind.EMBED, Kind.PROMPT) and p.stack in ("", stack) for p in trained)
    numbers = [p.block for p in trained if p.stack == stack and p.block is not None]
    return 0 if below else min(numbers, default=None)


def _block_activations(params: list[Param], trained: frozenset[Param], step: TrainingStep) -> int:
    """Return the bytes that one block stores for the backward pass.

    Per token: the input of each norm; query, key, value and the attention output; the input of the
    MLP's activation; and the input of every layer whose weight, or adapter, is trained. RMSNorm
    (no bias) stores twice as much as LayerNorm.
    """
    width = _hidden_size(params)
    norms = [p for p in params if p.kind is Kind.NORM and p.numel == width and "bias" not in p.tags]
    rms_norm = not any(p.kind is Kind.NORM and "bias" in p.tags for p in params)
    values = width * len(norms) * (2 if rms_norm else 1)
    values += width * sum(p in trained for p in norms) * rms_norm
    values += sum(_output_width(params, kind, width) for kind in ATTENTION_INPUTS)
    values += _output_width(
        params, Kind.QUERY, width
    )  # the attention output has the width of the query
    values += _mlp_values(params, trained, width)
    values += width * _stores_input(params, trained, *ATTENTION_INPUTS)
    adapters = [p for p in params if p in trained and p.kind is Kind.ADAPTER and "lora_a" in p.tags]
    values += sum(p.shape[0] for p in adapters)
    return step.tokens * values * _compute_itemsize(params, step)


def _mlp_values(params: list[Param], trained: frozenset[Param], width: int) -> int:
    """Return the values that an MLP stores per token; a gated MLP has three matrices."""
    output, inner = _output_width(params, Kind.MLP, width), _mlp_width(params)
    gated = output > 2.5 * inner
    stores_input = _stores_input(params, trained, Kind.MLP)
    return (3 * inner if gated else inner) + stores_input * (width + inner)


def _mlp_width(params: list[Param]) -> int:
    """Return the inner width of a block's MLP, 0 without an MLP."""
    width = _hidden_size(params)
    sizes = [_value_count(p) // width for p in params if p.kind is Kind.MLP and len(p.shape) > 1]
    return min(sizes, default=0)


def _output_width(params: list[Param], kind: Kind, width: int) -> int:
    """Return the summed output width of a block's layers of a kind."""
    matrices = (p for p in params if p.kind is kind and len(p.shape) > 1 and "bias" not in p.tags)
    return sum(map(_value_count, matrices)) // width


def _stores_input(params: list[Param], trained: frozenset[Param], *kinds: Kind) -> bool:
    """Whether a weight of these kinds, or an adapter on one, is trained, so its input is stored."""
    hosts = set(kinds)
    return any(
        p in trained and len(p.shape) > 1 and (p.kind in hosts or not hosts.isdisjoint(p.on))
        for p in params
    )


def _hidden_size(params: list[Param]) -> int:
    """Return the hidden size of a block, taken from its norms."""
    norms = [p.numel for p in params if p.kind is Kind.NORM]
    return max(norms or [p.shape[-1] for p in params])


def _compute_itemsize(params: list[Param], step: TrainingStep) -> int:
    """Return the bytes of one activation in a block: 2 under autocast, else as most weights."""
    if step.autocast:
        return 2
    sizes = Counter[str]()
    for p in params:
        if p.dtype in TRAINABLE_DTYPES and p.kind is not Kind.ADAPTER:
            sizes[p.dtype] += p.numel
    return ITEMSIZE[sizes.most_common(1)[0][0]] if sizes else 4


def _logit_bytes(params: Params, trained: frozenset[Param], step: TrainingStep) -> int:
    """Return the bytes of logits, log-probabilities and their gradients of a language model.

    They are 0 for a classifier, below 1,000 outputs, and if nothing is trained.
    """
    heads = [p for p in params if p.kind is Kind.HEAD and len(p.shape) > 1]
    tied = [p for p in params if p.kind is Kind.EMBED and p.tied]
    vocabulary = max((p.shape[0] for p in (*heads, *tied)), default=0)
    if not trained or vocabulary < 1000:
        return 0
    item = 2 if step.autocast else ITEMSIZE[(heads or tied)[0].dtype]
    return step.tokens * vocabulary * (item + 8)
