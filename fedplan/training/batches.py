# SPDX-License-Identifier: Apache-2.0
"""Batches of a client's training steps: epoch order, splitting a step, and prefetching."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from fedplan.data.examples import NO_LABEL, Examples
from fedplan.errors import FedplanError

T = TypeVar("T")
Result = TypeVar("Result")
_STEPS_PER_POOL = 50
"""With grouping by length, examples are sorted by length within pools of so many steps."""
_CHUNK_SIZE = 1000
"""Examples that are loaded at once to read their lengths."""


class WeightedBatch(NamedTuple):
    """One batch of a step.

    `share`: weight of the batch's loss in the step; the shares of a step sum to 1.
    `indices`: indices of the batch's examples.
    """

    batch: dict[str, Tensor]
    share: float
    indices: Tensor


def epoch_steps(
    count: int, size: int, generator: torch.Generator, lengths: Tensor | None = None
) -> Iterator[Tensor]:
    """Return the example indices of each step of one epoch, in an order drawn by `generator`.

    Every index below `count` occurs once; a step has `size` indices, one step may have fewer. With
    `lengths` (one number for each example), a step has examples of similar length.
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
    """Return the number of tokens of each example, by the attention mask; loads all examples.

    Raises FedplanError if the examples have no attention_mask.
    """
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

    The weight of a batch is the share of the labels that are not NO_LABEL, or of the examples if
    labels are floating-point or absent. So the weighted sum of the batches' mean losses equals the
    mean loss of one large batch.
    """
    if len(indices) <= size:
        return [WeightedBatch(examples.batch(indices), 1.0, indices)]
    parts = _split(indices, size)
    batches = [examples.batch(part) for part in parts]
    counts = [len(part) for part in parts]
    for i, batch in enumerate(batches):
        labels = batch.get("labels")
        if labels is not None and not labels.is_floating_point():
            counts[i] = int((labels != NO_LABEL).sum())
    total = sum(counts)
    shares = [count / total for count in counts] if total else [1 / len(batches)] * len(batches)
    return [WeightedBatch(*fields) for fields in zip(batches, shares, parts, strict=True)]


def prefetch(
    function: Callable[[T], Result], items: Iterable[T], num_workers: int
) -> Iterator[Result]:
    """Yield `function(item)` for each item, in order.

    With `num_workers` threads, up to twice as many results are computed ahead; with 0, each result
    is computed on request, in the calling thread. An exception of `function` is raised in order.
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
