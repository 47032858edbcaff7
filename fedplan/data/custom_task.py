# SPDX-License-Identifier: Apache-2.0
"""Custom tasks: examples, loss and metrics given as Python objects."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast, final

import torch
from torch import Tensor, nn

from fedplan.data.examples import Examples, Loss
from fedplan.data.metrics import Predictions, metric_direction
from fedplan.data.tables import DataError
from fedplan.data.tasks.definition import Task
from fedplan.language.canonical import canonical_text
from fedplan.tensors.devices import eval_mode, model_device, to_device
from fedplan.tensors.named import Batch

CUSTOM_KIND = "own"
"""The `kind` of a CustomTask."""

Collate = Callable[[list[Any]], Mapping[str, Tensor]]
"""Makes a batch of named tensors from a list of examples."""

BatchMetrics = Callable[[nn.Module, Batch], Mapping[str, float | Tensor]]
"""Returns metrics of a model on a batch by name, each a mean over the batch."""


@final
@dataclass(frozen=True)
class CollatedExamples:
    """A dataset `raw_rows` with a length and integer indices, as Examples."""

    raw_rows: Any
    collate: Collate

    def __len__(self) -> int:
        return len(self.raw_rows)

    def batch(self, indices: Tensor) -> dict[str, Tensor]:
        """Return the batch of the examples at these indices."""
        return dict(self.collate([self.raw_rows[i] for i in cast("list[int]", indices.tolist())]))


def batch_columns(examples: list[Any]) -> Mapping[str, Tensor]:
    """Collate examples with torch's default collator; return tensors by name.

    Examples that are dicts keep their names; pairs become `inputs` and `labels`. Raises DataError
    for other results.
    """
    batch: Any = cast("Any", torch.utils.data).default_collate(examples)
    if isinstance(batch, list | tuple) and len(cast("list[Tensor]", batch)) == 2:
        batch = dict(zip(("inputs", "labels"), cast("list[Tensor]", batch), strict=True))
    if not isinstance(batch, Mapping) or not all(
        isinstance(value, Tensor) for value in cast("Mapping[str, object]", batch).values()
    ):
        raise DataError(
            f"examples of type {type(examples[0]).__name__} make no batch of named tensors: give "
            "`collate`, a function from a list of examples to a dict of tensors"
        )
    return cast("Mapping[str, Tensor]", batch)


def model_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return a transformers model's own loss on a labelled batch; DataError if it has none."""
    loss: Any = getattr(model(**batch), "loss", None)
    if loss is None:
        raise DataError(
            "the model's output has no loss: give `loss`, a function of a model and a batch"
        )
    return cast("Tensor", loss)


@final
@dataclass(frozen=True)
class CustomTask(Task):
    """A task defined by functions: the loss `function`, `collate` (batches) and `metrics`.

    `primary` is the metric by which models are compared, and `higher_is_better` its direction; None
    is that of fedplan's metric of this name. Raises DataError for a primary metric of your own
    without a direction. `kind`, `source`, `columns`, `label` and `labels` have no meaning here.
    `prepare` takes a Dataset of torch or `datasets`.
    """

    kind: str = CUSTOM_KIND
    source: str = ""
    columns: tuple[str, ...] = ()
    label: str = ""
    labels: tuple[str, ...] = ()
    function: Loss = model_loss
    collate: Collate = batch_columns
    metrics: BatchMetrics | None = None

    primary: str = "loss"  # pyright: ignore[reportIncompatibleVariableOverride]
    higher_is_better: bool = cast("bool", None)  # pyright: ignore[reportIncompatibleVariableOverride]

    def __post_init__(self) -> None:
        if cast("bool | None", self.higher_is_better) is None:
            direction = metric_direction(self.primary)
            if direction is None:
                raise DataError(
                    f"primary is {self.primary!r}, and its direction is not known: give "
                    "higher_is_better, True or False"
                )
            object.__setattr__(self, "higher_is_better", direction)

    @property
    def text(self) -> str:
        """Canonical text of loss and collator; a resumed run must have the same."""
        return canonical_text((self.function, self.collate))

    def prepare(self, table: Any) -> Examples:
        """Return a client's examples: an object with a length and a method `batch` as it is.

        A dataset with a length and integer indices, such as a table of `datasets`, becomes
        CollatedExamples. Raises DataError for an IterableDataset.
        """
        if isinstance(table, torch.utils.data.IterableDataset):
            raise DataError("an IterableDataset has no length: give a Dataset")
        # A table of `datasets` has a method `batch` with another meaning.
        if not type(table).__module__.startswith("datasets.") and callable(
            getattr(table, "batch", None)
        ):
            return cast("Examples", table)
        return CollatedExamples(table, self.collate)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return self.function(model, batch)

    def predict(self, model: nn.Module, rows: Examples, *, batch_size: int) -> Predictions:
        raise DataError("a CustomTask has no predictions: use a task of fedplan, or `score`")

    def score(self, model: nn.Module, rows: Examples, *, batch_size: int) -> dict[str, float]:
        """Return the means of loss and metrics over all examples, and `examples`, their number.

        Raises DataError if `primary` is not among the metrics.
        """
        if not len(rows):
            return {"examples": 0.0}
        sums = dict[str, float]()
        with eval_mode(model), torch.no_grad():
            for indices in cast("tuple[Tensor, ...]", torch.arange(len(rows)).split(batch_size)):
                batch = to_device(rows.batch(indices), model_device(model))
                values: dict[str, float | Tensor] = {"loss": self.function(model, batch)}
                values |= dict(self.metrics(model, batch)) if self.metrics else {}
                for name, value in values.items():
                    sums[name] = sums.get(name, 0.0) + float(value) * len(indices)
        means = {name: value / len(rows) for name, value in sums.items()}
        if self.primary not in means:
            raise DataError(f"primary is {self.primary!r}, but the metrics are {', '.join(means)}")
        return {**means, "examples": float(len(rows))}

    def score_clients(
        self, model: nn.Module, tests: Mapping[str, Examples], *, batch_size: int
    ) -> tuple[dict[str, dict[str, float]], dict[str, float]]:
        """Return the metrics by client, and their means, weighted by the clients' examples."""
        scores = {n: self.score(model, rows, batch_size=batch_size) for n, rows in tests.items()}
        every, total = list(scores.values()), sum(each["examples"] for each in scores.values())
        together = {
            name: sum(each[name] * each["examples"] for each in every) / total for name in every[0]
        }
        return scores, {**together, "examples": total}
