# SPDX-License-Identifier: Apache-2.0
"""Row losses: the loss of every row by itself, though the model runs only once.

A loss is asked for all rows together, and then for each; when it turns to the model again, the
model repeats what it said of that row. So any loss will do that asks the model once.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from fedplan.privacy.dpsgd.factors import Unfactored
from fedplan.privacy.dpsgd.hooks import row
from fedplan.privacy.dpsgd.per_example import Subject


def losses(subject: Subject, batch: Mapping[str, Tensor], count: int) -> Tensor:
    """The loss of each row of a batch, by one run of the model."""
    if not all(_has_rows(tensor, count) for tensor in batch.values()):
        raise Unfactored("a batch holds tensors without a row for each example")
    said = list[_Said]()
    run = subject.model.forward

    def listen(*args: Any, **kwargs: Any) -> Any:
        said.append(_Said(args, kwargs, run(*args, **kwargs), count))
        return said[-1].output

    with _answering(subject.model, listen), subject.autocast():
        subject.loss(subject.model, batch)
    if len(said) != 1:
        raise Unfactored(f"the loss asks the model {len(said)} times")
    found = list[Tensor]()
    for i in range(count):
        with _answering(subject.model, said[0].of_row(i)), subject.autocast():
            one = {name: tensor[i : i + 1] for name, tensor in batch.items()}
            found.append(subject.loss(subject.model, one).reshape(()))
    return torch.stack(found)


@dataclass(frozen=True)
class _Said:
    """What a model was asked of `count` rows, and what it said."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    output: Any
    count: int

    def of_row(self, i: int) -> Callable[..., Any]:
        """The same of one row, for who asks the same of it."""

        def answer(*args: Any, **kwargs: Any) -> Any:
            if len(args) != len(self.args) or kwargs.keys() != self.kwargs.keys():
                raise Unfactored("the loss asks the model in another way of one row")
            pairs = [*zip(self.args, args, strict=True)]
            pairs += [(self.kwargs[name], each) for name, each in kwargs.items()]
            for was, now in pairs:
                if isinstance(was, Tensor) and not _same(row(was, i, self.count), now):
                    raise Unfactored("the loss asks the model something else of one row")
            return self._row_of_output(i)

        return answer

    def _row_of_output(self, i: int) -> Any:
        """One row of what a model gave; what has no rows is left out."""
        if isinstance(self.output, Tensor):
            return row(self.output, i, self.count)
        if isinstance(self.output, Mapping):
            fields = cast("Mapping[str, Any]", self.output)
            rows = {k: v[i : i + 1] for k, v in fields.items() if _has_rows(v, self.count)}
            return cast("Any", type(self.output))(**rows)
        if type(self.output) is tuple:
            several = cast("tuple[Any, ...]", self.output)
            return tuple(v[i : i + 1] if _has_rows(v, self.count) else None for v in several)
        raise Unfactored(f"the model gives a {type(self.output).__name__}")


def _has_rows(each: Any, count: int) -> bool:
    return isinstance(each, Tensor) and each.dim() > 0 and len(each) == count


def _same(one: Tensor, other: Any) -> bool:
    """Whether two tensors hold the same, where what is no number is the same as itself."""
    if not isinstance(other, Tensor) or one.shape != other.shape:
        return False
    return bool(((one == other) | (one != one) & (other != other)).all())


@contextmanager
def _answering(model: nn.Module, forward: Callable[..., Any]) -> Generator[None]:
    """A model that answers in another way for a while."""
    held = vars(model)
    own = held.get("forward")
    held["forward"] = forward
    try:
        yield
    finally:
        if own is None:
            del held["forward"]
        else:
            held["forward"] = own
