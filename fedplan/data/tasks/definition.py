# SPDX-License-Identifier: Apache-2.0
"""Tasks: what a model is asked to do, from rows of a table to batches, a loss and a score."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedplan.data.examples import NO_LABEL, Examples
from fedplan.data.metrics import METRICS, Answers, Metric, measured
from fedplan.data.tables import DataError, values
from fedplan.models.catalog import TASKS
from fedplan.models.dual import TEMPLATE
from fedplan.models.hub import fetched
from fedplan.tensors.devices import at_rest, brought, device_of

if TYPE_CHECKING:
    from datasets import Dataset


@dataclass(frozen=True)
class Task(ABC):
    """What a model is asked to do with the rows of a table: build one with `task`.

    `labels` are the answers in the order of the model's classes. `source` is the folder or hub id
    of the tokenizer, or of the image processor. `template` makes texts of labels, for image-text.
    `max_length` is in tokens. `image_size` is the side of the pictures that the model takes: of
    pictures it must be said. With `single` each row is one example: of a language model, the first
    block of its text. `packing` puts several conversations into one row of tokens. `weights` are
    what the loss of an answer is multiplied by; a label without one has 1. `extra` are metrics
    beside those that the task has by itself.
    """

    kind: str
    source: str
    columns: tuple[str, ...]
    label: str
    labels: tuple[str, ...]
    max_length: int = 128
    image_size: int = 0
    template: str = TEMPLATE
    single: bool = False
    packing: bool = False
    weights: tuple[tuple[str, float], ...] = ()
    extra: tuple[Metric, ...] = ()

    takes: ClassVar[tuple[int, int]] = (1, 1)
    """The fewest columns that a row's input may stand in, and the most."""
    answers: ClassVar[Answers] = "class"
    primary: ClassVar[str] = "accuracy"
    """The one score that the task is known by, and whether a higher one is better."""
    higher: ClassVar[bool] = True

    @property
    def model_class(self) -> str:
        """The class of transformers that loads a model for this task."""
        return TASKS[self.kind]

    @property
    def settings(self) -> dict[str, Any]:
        """What the task asks of a model's configuration: the names of the classes."""
        names = dict(enumerate(self.labels))
        places = {name: number for number, name in names.items()}
        return {"id2label": names, "label2id": places} if names else {}

    @property
    def notes(self) -> tuple[str, ...]:
        """What a person should know of how rows are read."""
        return ()

    @abstractmethod
    def prepare(self, table: Dataset) -> Examples:
        """The rows as tensors, tokenised or decoded once."""

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """The mean loss of a batch's answers."""
        logits, labels, _ = self._answers(model, batch)
        return self._mean_loss(logits, labels) if len(labels) else logits.sum() * 0.0

    def score(self, model: nn.Module, rows: Examples, *, batch_size: int) -> dict[str, float]:
        """Loss and what else the task measures; of no rows only that they are none."""
        if not len(rows):
            return {"examples": 0.0}
        parts: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        with at_rest(model), torch.no_grad():
            for indices in cast("tuple[Tensor, ...]", torch.arange(len(rows)).split(batch_size)):
                logits, labels, sizes = self._answers(model, rows.batch(indices))
                losses = self._losses(logits, labels).cpu().double()
                parts.append((losses, labels.cpu(), self._guess(logits).cpu(), sizes.cpu()))
        losses, truth, guess, sizes = (torch.cat(p) for p in zip(*parts, strict=True))
        if not len(truth):
            return {"examples": float(len(rows))}
        loss = losses.mean().item()
        own = self._measures(loss, truth, guess, sizes.tolist())
        asked = measured(self.extra, truth.numpy(), guess.numpy()) if self.extra else {}
        return {"loss": loss, **own, **asked, "examples": float(len(rows))}

    def _answers(
        self, model: nn.Module, batch: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Logits and labels wherever there is a label, and how many each row has."""
        inputs = brought(batch, device_of(model))
        labels = inputs.pop("labels")
        output: Any = model(**self._inputs(model, inputs, labels))
        logits = cast("Tensor", output if isinstance(output, Tensor) else output.logits).float()
        self._require_outputs(logits)
        labels = self._targets(labels)
        asked = self._asked(labels)
        return logits[asked], labels[asked], asked.reshape(len(asked), -1).sum(1)

    def _inputs(
        self, model: nn.Module, inputs: dict[str, Tensor], labels: Tensor
    ) -> Mapping[str, Any]:
        """What the model is called with."""
        return inputs

    def _require_outputs(self, logits: Tensor) -> None:
        if self.labels and logits.shape[-1] != len(self.labels):
            raise DataError(
                f"the model knows {logits.shape[-1]} classes and the task {len(self.labels)} "
                f"labels: build the model with num_labels = {len(self.labels)}"
            )

    def _targets(self, labels: Tensor) -> Tensor:
        return labels

    def _asked(self, labels: Tensor) -> Tensor:
        """Where there is something to answer."""
        return labels != NO_LABEL

    def _mean_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        if self.weights:
            return self._losses(logits, labels).mean()
        return cross_entropy(logits, labels)

    def _losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The loss of each answer.

        A weight multiplies the loss of its answers, and the mean is over all: so what a row weighs
        does not depend on which others are in its batch, and one alone has its weight too.
        """
        losses = cross_entropy(logits, labels, reduction="none")
        return losses * self._factors(logits)[labels] if self.weights else losses

    def _factors(self, logits: Tensor) -> Tensor:
        said = dict(self.weights)
        return logits.new_tensor([said.get(label, 1.0) for label in self.labels])

    def _guess(self, logits: Tensor) -> Tensor:
        return logits.argmax(-1)

    def _measures(
        self, loss: float, truth: Tensor, guess: Tensor, sizes: list[int]
    ) -> dict[str, float]:
        f1 = METRICS["f1_macro"].measure(truth.numpy(), guess.numpy())
        return {"accuracy": share_right(truth, guess), "f1": f1}

    def _numbers(self, words: Sequence[str]) -> list[int]:
        """The class of each label."""
        places = {label: place for place, label in enumerate(self.labels)}
        unknown = sorted(set(words) - places.keys())
        if unknown:
            raise DataError(
                f"label {unknown[0]!r} in column {self.label!r} is none of the task's labels: "
                f"{', '.join(self.labels)}"
            )
        return [places[word] for word in words]

    def _texts(self, table: Dataset, column: str) -> list[str]:
        found = values(table, column)
        if not all(isinstance(text, str) for text in found):
            raise DataError(f"column {column!r} holds {type(found[0]).__name__}, and not texts")
        return found

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer that texts are read with."""
        import transformers

        try:
            said = {"add_prefix_space": True} if self.kind == "token-classification" else {}
            found = fetched(transformers.AutoTokenizer, self.source, **said)
        except (OSError, ValueError) as error:
            raise DataError(
                f"there is no tokenizer in {self.source!r}: give a folder that holds one, or a "
                "name of the hub as hub:org/name"
            ) from error
        return self._fitted(found)

    def _fitted(self, tokenizer: Any) -> Any:
        """The tokenizer with what the task needs beside it."""
        return tokenizer

    def _limit(self, tokenizer: Any) -> int:
        return min(self.max_length, int(tokenizer.model_max_length))


def share_right(truth: Tensor, guess: Tensor) -> float:
    """How many of some answers are right, as a share of all."""
    return (truth == guess).double().mean().item()
