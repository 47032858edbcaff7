# SPDX-License-Identifier: Apache-2.0
"""Probes: functions that score the blocks of a model, for `best` to choose blocks by."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor, nn

from fedplan import seeds
from fedplan.data.examples import NO_LABEL, Examples, Loss
from fedplan.errors import FedplanError
from fedplan.language.canonical import format_call, with_text
from fedplan.models.attention import align_mask, capture_attention, token_mask
from fedplan.models.description import block_modules
from fedplan.models.params import Block
from fedplan.naming import Registry
from fedplan.tensors.devices import eval_mode, model_device, read_floats, sum_dtype, to_device
from fedplan.tensors.named import Batch

PROBE_BATCH_SIZE = 8
"""Examples in one pass of a probe: attention maps grow with the square of the length."""


@dataclass(frozen=True)
class ProbeInput:
    """Inputs of a probe: the model at the start of the turn, the client's examples, and a seed.

    `blocks`: the blocks to be scored. A probe draws examples by `sample_batches`.
    """

    model: nn.Module
    examples: Examples
    blocks: tuple[Block, ...]
    seed: int
    loss: Loss

    def sample_batches(self, count: int) -> Iterator[Tensor]:
        """Yield indices of up to `count` examples, drawn by the seed, at most 8 at a time.

        Raises FedplanError if there are no examples.
        """
        order = torch.randperm(len(self.examples), generator=seeds.generator("probe", self.seed))
        if not len(order):
            raise FedplanError("a probe needs examples, and the client has none")
        yield from cast("tuple[Tensor, ...]", order[:count].split(PROBE_BATCH_SIZE))

    def batch(self, indices: Tensor) -> dict[str, Tensor]:
        """Return the batch of some examples, on the model's device."""
        return to_device(self.examples.batch(indices), model_device(self.model))


Probe = Callable[[ProbeInput], Mapping[Block, float]]
"""Returns a score for each block. A probe that uses no examples is marked by `data_independent`."""
Scorer = TypeVar("Scorer", bound=Probe)


def data_independent(probe: Scorer) -> Scorer:
    """Decorator that marks a probe as using no examples, in place, and returns the probe.

    The probe is then called with `data_independent_input`, so its scores reveal no examples.
    """
    probe.public = True  # pyright: ignore[reportFunctionMemberAccess]
    return probe


def is_data_independent(probe: Probe) -> bool:
    """Whether a probe is marked as using no examples."""
    return getattr(probe, "public", False) is True


@data_independent
@with_text("random")
def random_probe(inputs: ProbeInput) -> dict[Block, float]:
    """Return uniform random scores by the seed: the baseline that a probe must beat."""
    scores = torch.rand(len(inputs.blocks), generator=seeds.generator("probe", inputs.seed))
    return {block: float(score) for block, score in zip(inputs.blocks, scores, strict=True)}


@data_independent
@with_text("last")
def last_probe(inputs: ProbeInput) -> dict[Block, float]:
    """Return each block's number as its score, so that `best(k)` chooses the last k blocks."""
    return {block: float(block.number) for block in inputs.blocks}


@data_independent
@with_text("middle")
def middle_probe(inputs: ProbeInput) -> dict[Block, float]:
    """Return higher scores for blocks that are nearer to the middle of their stack."""
    counts = Counter(block.stack for block in inputs.blocks)
    return {b: -abs(b.number - counts[b.stack] / 2) for b in inputs.blocks}


@dataclass(frozen=True)
class FixedProbe:
    """A probe that always prefers the blocks with the given `numbers`, the first number most.

    `public` marks the probe as data-independent.
    """

    numbers: tuple[int, ...]
    public: ClassVar[bool] = True

    @property
    def text(self) -> str:
        """The probe in one line; part of the text that server and clients compare."""
        return format_call("fixed", *self.numbers)

    def __call__(self, inputs: ProbeInput) -> dict[Block, float]:
        """Return the score of each block; FedplanError if no block has one of the numbers."""
        if missing := set(self.numbers) - {block.number for block in inputs.blocks}:
            raise FedplanError(f"the model has no block {min(missing)}: name others in fixed")
        scores = {number: float(len(self.numbers) - i) for i, number in enumerate(self.numbers)}
        return {block: scores.get(block.number, 0.0) for block in inputs.blocks}


def fixed_probe(*numbers: int) -> Probe:
    """Return a probe for these blocks of each stack; those named first have higher scores."""
    return FixedProbe(numbers)


def data_independent_input(blocks: tuple[Block, ...], seed: int) -> ProbeInput:
    """Return the inputs of a data-independent probe: only `blocks` and `seed`.

    Loading a batch or computing the loss raises FedplanError.
    """

    def no_loss(model: nn.Module, batch: Batch) -> Tensor:
        raise FedplanError("a probe that is marked as data_independent computed a loss")

    return ProbeInput(nn.Module(), _NoExamples(), blocks, seed, no_loss)


class _NoExamples:
    """An empty set of examples."""

    def __len__(self) -> int:
        return 0

    def batch(self, indices: Tensor) -> dict[str, Tensor]:
        raise FedplanError("a probe that is marked as data_independent loaded examples")


def _require_count(count: int) -> None:
    if count < 1:
        raise FedplanError(f"a probe cannot use examples = {count}: give 1 or more")


def _first(tokens: Tensor) -> Tensor:
    return tokens & (tokens.cumsum(1) == 1)


def _last(tokens: Tensor) -> Tensor:
    return _first(tokens.flip(1)).flip(1)


_TOKEN_MASKS: dict[str, Callable[[Tensor], Tensor]] = {
    "all": Tensor.clone,
    "first": _first,
    "last": _last,
    "content": lambda tokens: tokens & ~_first(tokens) & ~_last(tokens),
}
"""Functions from a mask of real tokens to a mask of the tokens that a name selects."""
_CHOICES = {
    "to": ("first", "last", "content", "labelled", "entities"),
    "by": ("all", "first", "last"),
}


def attention_probe(to: str = "", by: str = "", examples: int = 64, bounded: bool = False) -> Probe:
    """Return a probe that scores a block by its attention probabilities (SAFL's formula 1).

    The score is the sum over heads, queries and keys; the mean over up to `examples` sampled
    examples.
    `by`: the queries: all, first or last token.
    `to`: the keys: first, last, content (all but first and last), labelled tokens, or entities
    (tokens with another label than "O").
    `bounded`: divide each example's sum by the number of heads times queries.
    Empty values mean: all queries to the first token, where [CLS] is; in a causal decoder the last
    query to the content. Raises FedplanError for other values; the probe raises FedplanError if
    there are no examples, a block has no attention, or labels per token, or a label "O" for
    entities, are missing.
    """
    # In a decoder the first token attracts attention in all tasks, and only the last token can
    # attend to all others.
    _require_count(examples)
    for argument, value in (("to", to), ("by", by)):
        if value and value not in _CHOICES[argument]:
            choices = ", ".join(_CHOICES[argument])
            raise FedplanError(f"attention has no {argument} = {value!r}; use {choices}")

    @with_text(format_call("attention", to=to, by=by, examples=examples, bounded=bounded))
    def score_by_attention(inputs: ProbeInput) -> dict[Block, float]:
        totals, count = dict.fromkeys(inputs.blocks, 0.0), 0
        config = getattr(inputs.model, "config", None)
        label_ids: Any = getattr(config, "label2id", None) or {}
        for indices in inputs.sample_batches(examples):
            batch = inputs.batch(indices)
            sums = _AttentionSums(batch, to, by, label_ids.get("O"))
            capture_attention(inputs.model, batch, sums)
            for block in inputs.blocks:
                totals[block] += sums.score(block, bounded)
            count += len(indices)
        return {block: total / count for block, total in totals.items()}

    return score_by_attention


@dataclass(frozen=True)
class _AttentionSums:
    """Attention sums of one batch: a callback for `capture_attention`, then read by `score`.

    `to`, `by`: the selected keys and queries, as in `attention_probe`.
    `outside`: the index of the label "O", if there is one.
    `sums`: by block, each example's sum of the selected probabilities.
    `sizes`: by block, each example's number of heads times queries.
    """

    batch: Batch
    to: str
    by: str
    outside: int | None = None
    sums: dict[Block, Tensor] = field(default_factory=dict[Block, Tensor])
    sizes: dict[Block, Tensor] = field(default_factory=dict[Block, Tensor])

    def __call__(self, block: Block, maps: Tensor) -> None:
        """Add the attention maps of a block: a tensor (examples, heads, queries, keys)."""
        tokens = token_mask(self.batch, block.stack)
        if tokens is None:
            tokens = maps.new_ones(maps.shape[0], maps.shape[2], dtype=torch.bool)
        causal = block.stack == "decoder"
        to = self.to or ("content" if causal else "first")
        by = self.by or ("last" if causal else "all")
        if to in ("labelled", "entities"):
            labels = self.batch.get("labels")
            if labels is None or labels.shape != tokens.shape:
                raise FedplanError(f'attention(to="{to}") needs a label for each token')
            labels = labels.to(tokens.device)
            keys = tokens & (labels != NO_LABEL)
            if to == "entities":
                if self.outside is None:
                    raise FedplanError(
                        'attention(to="entities") needs a model with the label "O" in its '
                        "configuration, for tokens outside of entities"
                    )
                keys &= labels != self.outside
        else:
            keys = _TOKEN_MASKS[to](tokens)
        queries = align_mask(_TOKEN_MASKS[by](tokens).to(maps.device), maps.shape[2])
        keys = align_mask(keys.to(maps.device), maps.shape[3])
        dtype = sum_dtype(maps.device)
        # Example by example: the probabilities of a padded query may be nan.
        sums = [
            each[:, query][..., key].sum(dtype=dtype)
            for each, query, key in zip(maps, queries, keys, strict=True)
        ]
        self._add(self.sums, block, torch.stack(sums))
        self._add(self.sizes, block, queries.sum(1).to(dtype) * maps.shape[1])

    def _add(self, totals: dict[Block, Tensor], block: Block, values: Tensor) -> None:
        """Add `values`, in the order of the batch's examples, to a block's `totals` by example.

        An example may have several values, one for each window of an image. If the text tower reads
        class texts instead of inputs of the batch, the sum of all values is added to every example.
        """
        examples = len(next(iter(self.batch.values())))
        if block.stack == "text" and "input_ids" not in self.batch:
            values = values.sum().expand(examples)
        totals[block] = values.reshape(examples, -1).sum(1).cpu().double() + totals.get(block, 0.0)

    def score(self, block: Block, bounded: bool) -> float:
        """Return a block's sum over all examples of the batch; `bounded`: see `attention_probe`."""
        if block not in self.sums:
            raise FedplanError(
                f"{block.stack} block {block.number} gives no attention probabilities: use another "
                "probe"
            )
        sums = self.sums[block]
        return float((sums / self.sizes[block].clamp(min=1) if bounded else sums).sum())


def gradient_probe(examples: int = 64) -> Probe:
    """Return a probe that scores a block by the norm of the gradient of the mean loss.

    The gradient is in all params of the block, frozen ones too, over `examples` sampled examples.
    Raises FedplanError if `examples` is below 1; the probe raises FedplanError without examples.
    """
    _require_count(examples)

    @with_text(format_call("gradient", examples=examples))
    def score_by_gradient(inputs: ProbeInput) -> dict[Block, float]:
        modules = block_modules(inputs.model)
        params = [w for b in inputs.blocks for w in modules[b].parameters()]
        flags = {param: param.requires_grad for param in params if param.is_floating_point()}
        mean = {param: torch.zeros_like(param) for param in flags}
        batches = list(inputs.sample_batches(examples))
        try:
            for param in flags:
                param.requires_grad_(True)
            with eval_mode(inputs.model), torch.enable_grad():
                for indices in batches:
                    share = len(indices) / sum(map(len, batches))
                    loss = inputs.loss(inputs.model, inputs.batch(indices)) * share
                    gradients = torch.autograd.grad(loss, list(flags), materialize_grads=True)
                    for param, gradient in zip(flags, gradients, strict=True):
                        mean[param] += gradient
        finally:
            for param, flag in flags.items():
                param.requires_grad_(flag)
        dtype = sum_dtype(model_device(inputs.model))
        sums = [each.to(dtype).square().sum() for each in mean.values()]
        squares = dict(zip(mean, read_floats(sums), strict=True))
        return {
            block: sum(squares.get(weight, 0.0) for weight in modules[block].parameters()) ** 0.5
            for block in inputs.blocks
        }

    return score_by_gradient


PROBES: dict[str, Probe] = {
    "attention": attention_probe(),
    "gradient": gradient_probe(),
    "random": random_probe,
    "last": last_probe,
    "middle": middle_probe,
}
"""The built-in probes, with their default settings."""
PROBE_NAMES: Registry[Probe] = Registry("probe", PROBES)
"""All probes that a study can name."""


def get_probe(name: str) -> Probe:
    """Return the probe of a name, or at `package.module:attribute`.

    Raises UnknownName if there is none.
    """
    return PROBE_NAMES.find(name).value
