# SPDX-License-Identifier: Apache-2.0
"""Examples of a client as tensors, and the batches that are taken from them."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar, cast, final, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from fedplan.data.row_digests import make_unique
from fedplan.data.tables import column_values
from fedplan.errors import FedplanError
from fedplan.tensors.named import Batch

if TYPE_CHECKING:
    from datasets import Dataset


Loss = Callable[[nn.Module, Batch], Tensor]
"""Returns the loss of a model on a batch."""

NO_LABEL = -100
"""Label of a position without a target, as in PyTorch's cross entropy."""


class Examples(Protocol):
    """A client's examples: `batch` takes a tensor of indices, and returns CPU tensors by name."""

    def __len__(self) -> int: ...
    def batch(self, indices: Tensor) -> dict[str, Tensor]: ...


@runtime_checkable
class SeededExamples(Protocol):
    """Examples with random parts, such as masks, that are redrawn for each turn."""

    def with_seed(self, seed: int) -> Examples: ...


@runtime_checkable
class RowExamples(Protocol):
    """Examples with the `raw_rows` that they were made from, for loops that prepare rows."""

    @property
    def raw_rows(self) -> Any: ...


@runtime_checkable
class SparseExamples(Protocol):
    """Examples that can make batches with placeholders for inputs that will not be read."""

    def batch_without_inputs(self, indices: Tensor) -> dict[str, Tensor]: ...


@dataclass(frozen=True)
class RaggedArray:
    """Rows of integers in one tensor: row i is `flat[starts[i]:starts[i+1]]`."""

    flat: Tensor
    starts: Tensor

    @staticmethod
    def from_lists(rows: Sequence[Sequence[int]]) -> RaggedArray:
        starts = torch.tensor([0, *map(len, rows)]).cumsum(0)
        flat = torch.tensor([number for row in rows for number in row], dtype=torch.int32)
        return RaggedArray(flat, starts)

    def pad(self, indices: Tensor, fill: int) -> tuple[Tensor, Tensor]:
        """Return the rows at these indices as int64, padded with `fill`, and a boolean mask of the
        rest."""
        starts, ends = self.starts[indices], self.starts[indices + 1]
        steps = torch.arange(int((ends - starts).max()))
        mask = steps < (ends - starts)[:, None]
        positions = (starts[:, None] + steps).clamp(max=len(self.flat) - 1)
        return torch.where(mask, self.flat[positions].long(), fill), mask


@final
@dataclass(frozen=True)
class TokenSequences:
    """Tokenized texts with a label for each sequence or for each token. Implements Examples.

    `labels` is a tensor with a label (or row of labels) per text, or a RaggedArray with a label per
    token; with `seq2seq` its rows are target sequences for a decoder. `segments` are token type
    ids.
    """

    ids: RaggedArray
    pad: int
    labels: Tensor | RaggedArray
    segments: RaggedArray | None = None
    seq2seq: bool = False

    def __len__(self) -> int:
        return len(self.ids.starts) - 1

    def batch(self, indices: Tensor) -> dict[str, Tensor]:
        """Return input_ids, attention_mask and labels, padded; token_type_ids of texts with
        `segments`."""
        ids, mask = self.ids.pad(indices, self.pad)
        batch = {"input_ids": ids, "attention_mask": mask.long()}
        if self.segments is not None:
            batch["token_type_ids"] = self.segments.pad(indices, 0)[0]
        if not isinstance(self.labels, RaggedArray):
            return {**batch, "labels": self.labels[indices]}
        labels, label_mask = self.labels.pad(indices, NO_LABEL)
        decoder_mask = {"decoder_attention_mask": label_mask.long()} if self.seq2seq else {}
        return {**batch, **decoder_mask, "labels": labels}


@final
@dataclass(frozen=True)
class PackedSequences:
    """Sequences of several texts each, for models that separate texts by position ids.

    Positions restart at 0 with each text. There is no attention mask: each padding token `pad` has
    position 0, as a text of one token.
    """

    ids: RaggedArray
    labels: RaggedArray
    positions: RaggedArray
    pad: int

    def __len__(self) -> int:
        return len(self.ids.starts) - 1

    def batch(self, indices: Tensor) -> dict[str, Tensor]:
        return {
            "input_ids": self.ids.pad(indices, self.pad)[0],
            "position_ids": self.positions.pad(indices, 0)[0],
            "labels": self.labels.pad(indices, NO_LABEL)[0],
        }


@final
@dataclass(frozen=True)
class MaskedTokens:
    """Blocks of tokens with BERT's random masks, redrawn by `with_seed`. Implements Examples.

    Of `mask_fraction` of the tokens, 80 % become `mask_token`, 10 % a random token, and 10 % stay;
    `special_tokens` are never chosen. The masks of a block depend only on its entry in
    `block_seeds` and on `seed`.
    """

    blocks: TokenSequences
    block_seeds: Tensor
    mask_token: int
    special_tokens: Tensor
    vocabulary_size: int
    mask_fraction: float = 0.15
    seed: int = 0

    def __len__(self) -> int:
        return len(self.blocks)

    def with_seed(self, seed: int) -> MaskedTokens:
        return replace(self, seed=seed)

    def batch(self, indices: Tensor) -> dict[str, Tensor]:
        """Return the blocks with masked input_ids, and labels at chosen tokens, one at least."""
        batch, size = self.blocks.batch(indices), self.vocabulary_size
        ids = batch["input_ids"]
        noise = _block_noise(self.block_seeds[indices], ids.shape[1], self.seed)
        maskable = batch["attention_mask"].bool() & ~torch.isin(ids, self.special_tokens)
        draw = noise[..., 0].masked_fill(~maskable, 2.0)
        chosen = maskable & ((draw < self.mask_fraction) | (draw == draw.amin(1, keepdim=True)))
        labels, action = ids.masked_fill(~chosen, NO_LABEL), noise[..., 1]
        random_tokens = ((action - 0.8) * 10 * size).long().clamp(0, size - 1)
        ids = torch.where(chosen & (action < 0.8), self.mask_token, ids)
        ids = torch.where(chosen & (action >= 0.8) & (action < 0.9), random_tokens, ids)
        return {**batch, "input_ids": ids, "labels": labels}


def block_seeds(blocks: RaggedArray) -> Tensor:
    """Return an int64 hash of each block's tokens; equal blocks get different numbers."""
    starts = cast("list[int]", blocks.starts.tolist())
    flat = blocks.flat.numpy()
    contents = (flat[start:end].tobytes() for start, end in pairwise(starts))
    digests = make_unique([hashlib.sha256(content).digest() for content in contents])
    return torch.tensor([int.from_bytes(digest[:8], signed=True) for digest in digests]).long()


def _block_noise(block_seeds: Tensor, width: int, seed: int) -> Tensor:
    """Return pseudorandom numbers in [0, 1], two per token, by the block's seed and `seed`."""
    mixed_seed = _mix_bits(np.array([seed % 2**64], dtype=np.uint64))
    states = _mix_bits(block_seeds.numpy().view(np.uint64) ^ mixed_seed)
    steps = np.arange(2 * width, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    numbers = (_mix_bits(states[:, None] + steps) >> np.uint64(11)) * 2.0**-53
    return torch.from_numpy(numbers).float().reshape(len(block_seeds), width, 2)


def _mix_bits(x: np.ndarray) -> np.ndarray:
    """Return the finalizer of SplitMix64: each input bit changes about half of the output bits."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@final
@dataclass(frozen=True)
class ImageExamples:
    """Images as RGB bytes with a class index, or a row of 0 and 1, each. Implements Examples.

    `pixels` is uint8 of shape (images, 3, height, width). Batches are normalized by `mean` and
    `std`.
    """

    pixels: Tensor
    labels: Tensor
    mean: Tensor
    std: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: Tensor) -> dict[str, Tensor]:
        pixels = (self.pixels[indices].float() / 255 - self.mean) / self.std
        return {"pixel_values": pixels, "labels": self.labels[indices]}

    def batch_without_inputs(self, indices: Tensor) -> dict[str, Tensor]:
        """Return a batch of labels, with NaN of the right shape in place of the images."""
        blank = torch.full((), torch.nan).expand(len(indices), *self.pixels.shape[1:])
        return {"pixel_values": blank, "labels": self.labels[indices]}


def first_examples(examples: Iterable[Examples]) -> Examples | None:
    """Return the first of several data sets that has an example; None if there is none."""
    return next((each for each in examples if len(each)), None)


def chunk_slices(count: int, chunk_size: int = 1000) -> Iterator[slice]:
    """Yield slices of `chunk_size` that cover `count` rows, to bound the memory of a chunk."""
    return (slice(start, start + chunk_size) for start in range(0, count, chunk_size))


def read_images(table: Dataset, column: str) -> Iterator[Any]:
    """Yield the cells of an image column; DataError if the column is unknown or a cell is missing.

    Encoded images are not decoded (a dict of bytes and path); numbers become numpy arrays.
    """
    import datasets

    feature = cast("Any", table.features).get(column)
    if isinstance(feature, datasets.Image):
        table = table.cast_column(column, datasets.Image(decode=False))
    elif isinstance(feature, datasets.Array2D | datasets.Array3D | datasets.List):
        table = table.select_columns([column]).with_format("numpy")
    for chunk in chunk_slices(len(table)):
        yield from column_values(table.select(range(*chunk.indices(len(table)))), column)


T = TypeVar("T")
Result = TypeVar("Result")
_STEPS_PER_POOL = 50
"""With grouping by length, examples are sorted by length within pools of so many steps."""
_CHUNK_SIZE = 1000
"""Examples that are loaded at once to read their lengths."""


class WeightedBatch(NamedTuple):
    """One batch of a step, its weight in the step's loss, and its examples; shares sum to 1."""

    batch: dict[str, Tensor]
    share: float
    indices: Tensor


def epoch_steps(
    count: int, size: int, generator: torch.Generator, lengths: Tensor | None = None
) -> Iterator[Tensor]:
    """Return the example indices of each step of one epoch, in an order drawn by `generator`.

    One step may have fewer than `size`. With `lengths`, a step has examples of similar length.
    """
    order = torch.randperm(count, generator=generator)
    if lengths is None:
        return iter(_split(order, size))
    pools = _split(order, _STEPS_PER_POOL * size)
    steps = [s for p in pools for s in _split(p[lengths[p].argsort(stable=True)], size)]
    # Without this shuffle the steps with the longest examples would come last in each pool.
    shuffled = cast("list[int]", torch.randperm(len(steps), generator=generator).tolist())
    return (steps[i] for i in shuffled)


def token_lengths(examples: Examples) -> Tensor:
    """Return the number of tokens of each example; FedplanError without attention_mask."""
    lengths = list[Tensor]()
    for indices in _split(torch.arange(len(examples)), _CHUNK_SIZE):
        batch = examples.batch(indices)
        if "attention_mask" not in batch:
            raise FedplanError(
                "group_by_length groups texts of similar length, and these examples have no "
                "attention_mask to read their length from: leave group_by_length out"
            )
        lengths.append(batch["attention_mask"].flatten(1).sum(1).cpu())
    return torch.cat(lengths) if lengths else torch.zeros(0)


def split_step(examples: Examples, indices: Tensor, size: int) -> list[WeightedBatch]:
    """Load the examples at `indices` as batches of at most `size` examples, with loss weights.

    The weight of a batch is its share of the labels, as of `count_labels`: the weighted sum of mean
    losses is that of one large batch. No indices give no batches.
    """
    parts = _split(indices, size) if len(indices) else ()
    batches = [WeightedBatch(examples.batch(part), 1.0, part) for part in parts]
    if len(batches) < 2:
        return batches
    counts = [count_labels([batch]) for batch in batches]
    total = sum(counts)
    shares = [count / total for count in counts] if total else [1 / len(batches)] * len(batches)
    return [each._replace(share=share) for each, share in zip(batches, shares, strict=True)]


def count_labels(batches: Iterable[WeightedBatch]) -> int:
    """Return the number of labels that are not NO_LABEL: the weight of a mean loss.

    An example counts as one if labels are floating-point or absent.
    """
    total = 0
    for batch, _, indices in batches:
        labels = batch.get("labels")
        if labels is None or labels.is_floating_point():
            total += len(indices)
        else:
            total += int((labels != NO_LABEL).sum())
    return total


def prefetch(
    function: Callable[[T], Result], items: Iterable[T], num_workers: int
) -> Iterator[Result]:
    """Yield `function(item)` for each item, in order, computed ahead by `num_workers` threads.

    With 0 in the calling thread, on request. An exception of `function` is raised in order.
    """
    if not num_workers:
        yield from map(function, items)
        return
    remaining, pending = iter(items), deque[Future[Result]]()
    with ThreadPoolExecutor(num_workers, "fedplan-batches") as pool:
        try:
            pending.extend(pool.submit(function, i) for i in islice(remaining, 2 * num_workers))
            while pending:
                result = pending.popleft().result()
                pending.extend(pool.submit(function, item) for item in islice(remaining, 1))
                yield result
        finally:
            for future in pending:
                future.cancel()


def _split(indices: Tensor, size: int) -> tuple[Tensor, ...]:
    return cast("tuple[Tensor, ...]", indices.split(size))
