# SPDX-License-Identifier: Apache-2.0
"""Batches: which rows each step of a turn takes, and the batches of them, made ahead or in time."""

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
Made = TypeVar("Made")
_POOL = 50
"""Among the rows of so many steps, those of similar length are put together."""
_PIECE = 1000


class Weighed(NamedTuple):
    """A batch, its share of the step that it is part of, and the numbers of its rows."""

    batch: dict[str, Tensor]
    share: float
    rows: Tensor


def epoch(
    count: int, size: int, generator: torch.Generator, lengths: Tensor | None = None
) -> Iterator[Tensor]:
    """The rows of each step of one epoch: every row once, in an order by chance.

    With lengths, rows of similar length are in one step.
    """
    order = torch.randperm(count, generator=generator)
    if lengths is None:
        return iter(_split(order, size))
    pools = _split(order, _POOL * size)
    steps = [s for p in pools for s in _split(p[lengths[p].argsort(stable=True)], size)]
    # A step of long rows must not always come last.
    shuffled = cast("list[int]", torch.randperm(len(steps), generator=generator).tolist())
    return (steps[place] for place in shuffled)


def lengths_of(rows: Examples) -> Tensor:
    """How many tokens each row has."""
    found = list[Tensor]()
    for piece in _split(torch.arange(len(rows)), _PIECE):
        batch = rows.batch(piece)
        if "attention_mask" not in batch:
            raise FedplanError(
                "by_length puts texts of similar length together, and these rows have no "
                "attention_mask that would tell their length: leave it out"
            )
        found.append(batch["attention_mask"].flatten(1).sum(1).cpu())
    return torch.cat(found) if found else torch.zeros(0)


def weighed(rows: Examples, indices: Tensor, size: int) -> list[Weighed]:
    """The rows of one step in batches of a size, each with its share of what the step is a mean of.

    That is a mean over answers: labels, wherever there is one; or over rows, if no label is a whole
    number. So a step in parts is the step of one large batch.
    """
    if len(indices) <= size:
        return [Weighed(rows.batch(indices), 1.0, indices)]
    parts = _split(indices, size)
    found = [rows.batch(each) for each in parts]
    counts = [_answers(batch, len(each)) for batch, each in zip(found, parts, strict=True)]
    whole = sum(counts)
    shares = [count / whole for count in counts] if whole else [1 / len(found)] * len(found)
    return [Weighed(*each) for each in zip(found, shares, parts, strict=True)]


def _answers(batch: dict[str, Tensor], rows: int) -> int:
    labels = batch.get("labels")
    if labels is None or labels.is_floating_point():
        return rows
    return int((labels != NO_LABEL).sum())


def ahead(make: Callable[[T], Made], of: Iterable[T], workers: int) -> Iterator[Made]:
    """What is made of each, in their order; by threads ahead of its use, if there are workers."""
    if not workers:
        yield from map(make, of)
        return
    left, waiting = iter(of), deque[Future[Made]]()
    with ThreadPoolExecutor(workers, "fedplan-batches") as pool:
        try:
            waiting.extend(pool.submit(make, each) for each in islice(left, 2 * workers))
            while waiting:
                first = waiting.popleft().result()
                waiting.extend(pool.submit(make, each) for each in islice(left, 1))
                yield first
        finally:
            for each in waiting:
                each.cancel()


def _split(indices: Tensor, size: int) -> tuple[Tensor, ...]:
    return cast("tuple[Tensor, ...]", indices.split(size))
