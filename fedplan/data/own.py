# SPDX-License-Identifier: Apache-2.0
"""Own tasks: rows, a loss and metrics that a caller brings from Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast, final

import torch
from torch import Tensor, nn

from fedplan.data.examples import Examples, Loss
from fedplan.data.tables import DataError
from fedplan.data.tasks import Task
from fedplan.language.wording import text_of
from fedplan.tensors.devices import at_rest, brought, device_of
from fedplan.tensors.named import Batch

OWN = "own"
"""The kind of a task that a caller brings."""

Collate = Callable[[list[Any]], Mapping[str, Tensor]]
"""Makes a batch of some rows."""

Measure = Callable[[nn.Module, Batch], Mapping[str, float | Tensor]]
"""What is measured on a batch, by name: each a mean over its rows."""


@final
@dataclass(frozen=True)
class Collated:
    """Rows that are taken by their number, and put together by a collator."""

    rows: Any
    collate: Collate

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, indices: Tensor) -> dict[str, Tensor]:
        """Some rows."""
        return dict(self.collate([self.rows[i] for i in cast("list[int]", indices.tolist())]))


def named_columns(rows: list[Any]) -> Mapping[str, Tensor]:
    """Rows by torch's own collator: dicts keep their names, pairs are `inputs` and `labels`."""
    made: Any = cast("Any", torch.utils.data).default_collate(rows)
    if isinstance(made, list | tuple) and len(cast("list[Tensor]", made)) == 2:
        made = dict(zip(("inputs", "labels"), cast("list[Tensor]", made), strict=True))
    if not isinstance(made, Mapping) or not all(
        isinstance(each, Tensor) for each in cast("Mapping[str, object]", made).values()
    ):
        raise DataError(
            f"rows of {type(rows[0]).__name__} make no batch of named tensors: give `collate`, a "
            "function from a list of rows to a dict of tensors"
        )
    return cast("Mapping[str, Tensor]", made)


def model_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The loss that a model of transformers works out itself, where the batch has labels."""
    found: Any = getattr(model(**batch), "loss", None)
    if found is None:
        raise DataError("the model gives no loss of its own: give `loss`, of a model and a batch")
    return cast("Tensor", found)


@final
@dataclass(frozen=True)
class Own(Task):
    """What a model is asked to do by functions of the caller's own.

    `primary` is the score that clients are compared by.
    """

    kind: str = OWN
    source: str = ""
    columns: tuple[str, ...] = ()
    label: str = ""
    labels: tuple[str, ...] = ()
    function: Loss = model_loss
    collate: Collate = named_columns
    metrics: Measure | None = None

    primary: str = "loss"  # pyright: ignore[reportIncompatibleVariableOverride]
    higher: bool = False  # pyright: ignore[reportIncompatibleVariableOverride]

    @property
    def text(self) -> str:
        """The functions as one line: what a run that goes on must have again."""
        return text_of((self.function, self.collate))

    def prepare(self, table: Any) -> Examples:
        """A client's rows: what has a length and rows by number, or makes batches itself."""
        if isinstance(table, torch.utils.data.IterableDataset):
            raise DataError("rows are an IterableDataset, which has no length: give a Dataset")
        # A table of `datasets` has a `batch` too, and means something else by it.
        if not type(table).__module__.startswith("datasets.") and callable(
            getattr(table, "batch", None)
        ):
            return cast("Examples", table)
        return Collated(table, self.collate)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The caller's loss."""
        return self.function(model, batch)

    def score(self, model: nn.Module, rows: Examples, *, batch_size: int) -> dict[str, float]:
        """The mean over the rows of the loss, and of each metric."""
        if not len(rows):
            return {"examples": 0.0}
        sums = dict[str, float]()
        with at_rest(model), torch.no_grad():
            for indices in cast("tuple[Tensor, ...]", torch.arange(len(rows)).split(batch_size)):
                batch = brought(rows.batch(indices), device_of(model))
                found: dict[str, float | Tensor] = {"loss": self.function(model, batch)}
                found |= dict(self.metrics(model, batch)) if self.metrics else {}
                for name, value in found.items():
                    sums[name] = sums.get(name, 0.0) + float(value) * len(indices)
        means = {name: value / len(rows) for name, value in sums.items()}
        if self.primary not in means:
            there = ", ".join(means)
            raise DataError(f"primary is {self.primary!r}, and metrics gives {there}")
        return {**means, "examples": float(len(rows))}
