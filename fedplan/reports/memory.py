# SPDX-License-Identifier: Apache-2.0
"""Estimate the device memory of a client's training step from param shapes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from fedplan.data.tasks import CHUNK_LOGITS
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
LOGIT_BYTES = 12.5
"""Bytes per logit at the peak of a loss: research/results/bench_turn.txt has 12.1 to 13.1."""
GPU_BYTES = 24 * 10**9
"""The memory of the GPU that a step is compared with."""
ATTENTION_INPUTS = (Kind.QUERY, Kind.KEY, Kind.VALUE)
"""The projections of an attention layer's input."""


@dataclass(frozen=True)
class TrainingStep:
    """The settings that determine the memory of a client's training step.

    `optimizer` is a key of OPTIMIZER_STATES; `sequence_length` is in tokens per example.
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
    """The bytes of a training step; activations and logits are estimated, the rest is exact.

    `weights` are by dtype or quantized format; `gradients`, `optimizer` (its state), `activations`
    (stored for the backward pass) and `logits` (of a language model, else 0) are one sum each.
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
            "logits_estimated": self.logits,
            "total_estimated": self.total,
            "fits_24_gb": self.total < GPU_BYTES,
        }


def estimate_memory(params: Params, roles: Roles, step: TrainingStep) -> MemoryEstimate:
    """Estimate the memory of a training step of a model; `roles` says which params are trained."""
    trained = frozenset(p for p in params if roles[p].is_trained)
    weights = Counter[str]()
    for p in params:
        linear = p.kind in (*ATTENTION_INPUTS, Kind.OUT, Kind.MLP) and len(p.shape) > 1
        quantized = step.quantized and linear and p.block_id is not None and "bias" not in p.tags
        nbytes = int(p.numel * QUANTIZED_BYTES[step.quantized]) if quantized else p.nbytes
        if p.dtype == PACKED_DTYPE:
            nbytes = int(_value_count(p) * QUANTIZED_BYTES["nf4"])
        weights[step.quantized if quantized else p.dtype] += nbytes
    if step.autocast:
        # Autocast keeps a copy of each weight that it has cast until the end of the step.
        cast = (p for p in params if p.block_id and ITEMSIZE[p.dtype] > 2)
        weights["16-bit copies"] = sum(2 * p.numel for p in cast)
    gradients = sum(p.nbytes for p in trained)
    vocabulary, logits = vocabulary_size(params), 0
    if trained and vocabulary:
        # The logits of one chunk of tokens, their log-probabilities and gradients; and where chunks
        # of a trained head are summed, its gradients in float32 (see `find_head`).
        trained_heads = (p.numel for p in _heads(params) if p in trained)
        tokens, sums = step.tokens, max(trained_heads, default=0)
        if tokens * vocabulary > max(CHUNK_LOGITS, sums):
            tokens, logits = max(CHUNK_LOGITS // vocabulary, 1), 4 * sums
        logits += int(tokens * vocabulary * LOGIT_BYTES)
    return MemoryEstimate(
        {name: n for name, n in weights.items() if n},
        gradients,
        OPTIMIZER_STATES[step.optimizer] * gradients,
        _activation_bytes(params, trained, step),
        logits,
    )


def vocabulary_size(params: Params) -> int:
    """Return the number of logits per token of a language model; 0 for other models.

    The head of a classifier with many labels has other rows than the embedding of tokens.
    """
    embedded = {p.shape[0] for p in params if p.kind is Kind.EMBED and len(p.shape) == 2}
    sizes = (p.shape[0] for p in _heads(params) if p.shape[0] in embedded)
    size = max(sizes, default=0)
    return size if size >= 1000 else 0  # below, the model is a classifier


def _heads(params: Params) -> list[Param]:
    """Return the matrices that may be the head of a language model."""
    heads = [p for p in params if p.kind is Kind.HEAD and len(p.shape) > 1]
    return heads + [p for p in params if p.kind is Kind.EMBED and p.tied]


def _value_count(param: Param) -> int:
    """Return the number of values of a param; packed weights have two per byte."""
    return 2 * param.numel if param.dtype == PACKED_DTYPE else param.numel


def _activation_bytes(params: Params, trained: frozenset[Param], step: TrainingStep) -> int:
    """Return the bytes stored for the backward pass; 0 without blocks or trained params.

    In each stack, blocks count from the lowest with a trained param up; all blocks count if
    embeddings or prompts are trained, and all of a decoder if its encoder is trained. With gradient
    checkpointing, the input of each of these blocks counts, and all activations of the largest.
    Else the result is at least the input and the MLP activation of the widest block.
    """
    blocks, lowest = dict[Block, list[Param]](), dict[str, int]()
    for p in params:
        if p.block_id is not None:
            blocks.setdefault(p.block_id, []).append(p)
    if not trained or not blocks:
        return 0
    for stack in {at.stack for at in blocks}:
        numbers = [p.block for p in trained if p.stack == stack and p.block is not None]
        if any(p.kind in (Kind.EMBED, Kind.PROMPT) and p.stack in ("", stack) for p in trained):
            numbers.append(0)
        if numbers:
            lowest[stack] = min(numbers)
    if "encoder" in lowest and any(at.stack == "decoder" for at in blocks):
        lowest["decoder"] = 0  # cross-attention: the gradient of the encoder passes all of it
    active = [ps for at, ps in blocks.items() if at.number >= lowest.get(at.stack, at.number + 1)]
    stored = [_block_activations(ps, trained, step) for ps in active]
    forward = step.tokens * max(
        (_hidden_size(b) + _mlp_width(b)) * _compute_itemsize(b, step) for b in blocks.values()
    )
    if step.gradient_checkpointing and stored:
        inputs = (step.tokens * _hidden_size(ps) * _compute_itemsize(ps, step) for ps in active)
        return sum(inputs) + max(stored)
    return max(sum(stored), forward)


def _block_activations(params: list[Param], trained: frozenset[Param], step: TrainingStep) -> int:
    """Return the bytes that one block, given by its params, stores for the backward pass.

    Per token: the input of each norm; query, key, value and the attention output; the input of the
    MLP's activation; and the input of every layer with a trained weight or adapter. RMSNorm (no
    bias) stores twice as much as LayerNorm.
    """
    width, inner = _hidden_size(params), _mlp_width(params)

    def output_width(kind: Kind) -> int:
        matrices = (p for p in params if p.kind is kind and len(p.shape) > 1)
        return sum(_value_count(p) for p in matrices if "bias" not in p.tags) // width

    def stores_input(*kinds: Kind) -> bool:
        weights = (p for p in params if p in trained and len(p.shape) > 1)
        return any(p.kind in kinds or not p.on.isdisjoint(kinds) for p in weights)

    norms = [p for p in params if p.kind is Kind.NORM and p.numel == width and "bias" not in p.tags]
    rms_norm = not any(p.kind is Kind.NORM and "bias" in p.tags for p in params)
    values = width * len(norms) * (2 if rms_norm else 1)
    values += width * sum(p in trained for p in norms) * rms_norm
    values += sum(map(output_width, ATTENTION_INPUTS))
    values += output_width(Kind.QUERY)  # the attention output has the width of the query
    gated = output_width(Kind.MLP) > 2.5 * inner  # a gated MLP has three matrices
    values += (3 * inner if gated else inner) + stores_input(Kind.MLP) * (width + inner)
    values += width * stores_input(*ATTENTION_INPUTS)
    adapters = [p for p in params if p in trained and p.kind is Kind.ADAPTER and "lora_a" in p.tags]
    values += sum(p.shape[0] for p in adapters)
    return step.tokens * values * _compute_itemsize(params, step)


def _mlp_width(params: list[Param]) -> int:
    """Return the inner width of a block's MLP, given the block's params; 0 without an MLP."""
    width = _hidden_size(params)
    sizes = [_value_count(p) // width for p in params if p.kind is Kind.MLP and len(p.shape) > 1]
    return min(sizes, default=0)


def _hidden_size(params: list[Param]) -> int:
    """Return the hidden size of a block: of its largest norm, or the largest last dimension."""
    norms = [p.numel for p in params if p.kind is Kind.NORM]
    return max(norms or [p.shape[-1] for p in params])


def _compute_itemsize(params: list[Param], step: TrainingStep) -> int:
    """Return the bytes of one activation value in a block: as most weights have, adapters apart."""
    if step.autocast:
        return 2
    sizes = Counter[str]()
    for p in params:
        if p.dtype in TRAINABLE_DTYPES and p.kind is not Kind.ADAPTER:
            sizes[p.dtype] += p.numel
    return ITEMSIZE[sizes.most_common(1)[0][0]] if sizes else 4
