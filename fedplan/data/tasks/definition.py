# SPDX-License-Identifier: Apache-2.0
"""Task: the base class with examples, loss and metrics of a kind of task."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedplan.data.examples import NO_LABEL, Examples, RaggedArray
from fedplan.data.metrics import METRICS, AnswerKind, Metric, Predictions, compute_metrics
from fedplan.data.tables import DataError, column_values
from fedplan.models.catalog import TASK_CLASSES, load_pretrained
from fedplan.models.dual_encoder import TEMPLATE
from fedplan.tensors.devices import eval_mode, host_copy, model_device, to_device

if TYPE_CHECKING:
    from datasets import Dataset


T = TypeVar("T")


@dataclass(frozen=True)
class LabelledPlaces:
    """The places of a batch that have a label: examples, or tokens of examples.

    `shape` is that of all places, `counts` has the labels of each example, on the CPU, and
    `numbers` the places' numbers in the order of memory, on the model's device.
    """

    shape: torch.Size
    counts: Tensor
    numbers: Tensor

    @classmethod
    def from_mask(cls, mask: Tensor, device: torch.device) -> LabelledPlaces:
        """Return the places where `mask` is true, for tensors on `device`."""
        numbers = to_device({"": mask.flatten().nonzero().flatten()}, device)[""]
        return cls(mask.shape, mask.reshape(len(mask), -1).sum(1).cpu(), numbers)

    def select(self, values: Tensor) -> Tensor:
        """Return the rows of `values` at these places.

        Raises DataError if `values` are not of these places.
        """
        dimensions = len(self.shape)
        if values.shape[:dimensions] != self.shape:
            raise DataError(
                f"the model returned values of shape {tuple(values.shape)} for labels of shape "
                f"{tuple(self.shape)}: the first {dimensions} sizes must be equal"
            )
        rows = values.flatten(0, dimensions - 1)
        return rows if len(self.numbers) == len(rows) else rows[self.numbers]


@dataclass(frozen=True)
class Task(ABC):
    """A task: how rows of a table become examples, and the loss and metrics of a model.

    Made by `make_task`; immutable. `kind` is the task's name. `source` is the folder or Hub id of
    the tokenizer or image processor. `columns` are the input columns, `label` the label column, and
    `labels` the labels in the order of the model's classes. `max_length` is in tokens. `image_size`
    is the side of the model's images in pixels, required for images. `template` makes texts from
    labels, for image-text. With `one_example_per_row`, only the first block of a text is used.
    `packing` joins several conversations in one sequence. `weights` are loss weights by label, 1 by
    default. `extra_metrics` are computed in addition to the task's own.

    Call `prepare` once per table, `loss` per batch in training, `score` to evaluate, or `predict`
    and `measure`, of which it consists. Subclasses set `primary` (the metric to compare models by),
    `answer_kind` and `input_columns`.
    """

    kind: str
    source: str
    columns: tuple[str, ...]
    label: str
    labels: tuple[str, ...]
    max_length: int = 128
    image_size: int = 0
    template: str = TEMPLATE
    one_example_per_row: bool = False
    packing: bool = False
    weights: tuple[tuple[str, float], ...] = ()
    extra_metrics: tuple[Metric, ...] = ()

    input_columns: ClassVar[tuple[int, int]] = (1, 1)
    """The fewest and the most input columns."""
    answer_kind: ClassVar[AnswerKind] = "class"
    """The kind of predictions."""
    generates: ClassVar[bool] = False
    """Whether the task has answers, which metrics of texts compare with generated ones."""
    own_metrics: ClassVar[tuple[str, ...]] = ()
    """Names of the metrics that the task computes; empty: accuracy, f1, and auroc of two labels."""
    primary: ClassVar[str] = "accuracy"
    """The metric by which models are compared."""
    higher_is_better: ClassVar[bool] = True
    """Whether a higher value of the primary metric is better."""

    @property
    def model_class(self) -> str:
        return TASK_CLASSES[self.kind]

    @property
    def settings(self) -> dict[str, Any]:
        names = dict(enumerate(self.labels))
        indices = {name: index for index, name in names.items()}
        return {"id2label": names, "label2id": indices} if names else {}

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the user on how rows are read."""
        return ()

    @abstractmethod
    def prepare(self, table: Dataset) -> Examples:
        """Return the rows of a table as examples; texts are tokenized and images decoded once.

        Raises DataError if the rows do not fit the task.
        """

    def made_up_examples(self, seed: int = 0) -> Examples:
        """Return five random examples of the task's shape, made from its settings alone.

        No tokenizer decides how long random tokens are: three texts are as long as an example can
        be, one has a token less and one has two. A site tries these before it agrees to a study,
        instead of private ones. A task of your own overrides this. Raises DataError if it does not,
        or if the tokenizer does not fit.
        """
        return self._made_up(np.random.default_rng(seed))

    def _made_up(self, draw: np.random.Generator) -> Examples:
        raise DataError(
            f"{self.kind} makes up no examples to try a model on, as example-level privacy needs: "
            "give its class a method made_up_examples, or use client-level privacy"
        )

    def _made_up_tokens(self, draw: np.random.Generator) -> RaggedArray:
        """Return five texts of random tokens, none of them special."""
        tokenizer = self.tokenizer
        special, limit = set(tokenizer.all_special_ids), self._max_tokens(tokenizer)
        plain = [token for token in range(len(tokenizer)) if token not in special]
        lengths = (limit, limit, limit, max(limit - 1, 1), min(limit, 2))
        tokens = [draw.choice(plain or [*special], length).tolist() for length in lengths]
        return RaggedArray.from_lists(tokens)

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Run a model on a batch and return the mean loss over all labels; 0 without labels.

        The batch must contain `labels`; it is copied to the model's device. Keeps the model's mode.
        Raises DataError if the model has another number of classes than the task.
        """
        return self._batch_loss(model, *self._inputs_and_labels(model, batch))

    def score(self, model: nn.Module, rows: Examples, *, batch_size: int) -> dict[str, float]:
        """Evaluate a model on all examples `rows`, in eval mode and without gradients.

        Returns `loss` (mean over labels), the task's metrics, extra metrics and `examples`, the
        number of rows; only `examples` without rows or labels.
        """
        if not len(rows):
            return {"examples": 0.0}
        return self.measure(self.predict(model, rows, batch_size=batch_size))

    def score_clients(
        self, model: nn.Module, tests: Mapping[str, Examples], *, batch_size: int
    ) -> tuple[dict[str, dict[str, float]], dict[str, float]]:
        """Return the metrics of `score` by client, and those on all examples together."""
        predictions = {
            name: self.predict(model, rows, batch_size=batch_size) for name, rows in tests.items()
        }
        together = self.measure(Predictions.join(list(predictions.values())))
        return {name: self.measure(each) for name, each in predictions.items()}, together

    def predict(self, model: nn.Module, rows: Examples, *, batch_size: int) -> Predictions:
        """Return a model's predictions for `rows`, one or more, in eval mode and without gradients.

        Raises DataError if the model has another number of classes than the task.
        """
        parts = list[Predictions]()
        with eval_mode(model), torch.no_grad():
            for indices in cast("tuple[Tensor, ...]", torch.arange(len(rows)).split(batch_size)):
                inputs, labels, places = self._inputs_and_labels(model, rows.batch(indices))
                predicted, probabilities, losses = self._answers(model, inputs, labels, places)
                parts.append(
                    Predictions(
                        labels.cpu().numpy(),
                        predicted.cpu().numpy(),
                        None if probabilities is None else probabilities.cpu().numpy(),
                        losses.double().cpu().numpy(),
                        places.counts.numpy(),
                    )
                )
        return Predictions.join(parts)

    def measure(self, predictions: Predictions) -> dict[str, float]:
        """Return `loss`, the task's and extra metrics, and `examples`; the last alone without
        labels."""
        examples = {"examples": float(len(predictions))}
        if not len(predictions.truth):
            return examples
        # The mean of torch, which sums in another order than numpy.
        loss = torch.from_numpy(predictions.losses).mean().item()
        extra = compute_metrics(self.extra_metrics, predictions)
        return {"loss": loss, **self._task_scores(loss, predictions), **extra, **examples}

    @property
    def directions(self) -> dict[str, bool]:
        """Whether higher is better, of the primary metric and of extra metrics, by name."""
        extra = {metric.name: metric.higher_is_better for metric in self.extra_metrics}
        return {self.primary: self.higher_is_better, **extra}

    def _inputs_and_labels(
        self, model: nn.Module, batch: Mapping[str, Tensor]
    ) -> tuple[Mapping[str, Any], Tensor, LabelledPlaces]:
        """Return the arguments of the model's call, the labels, and the places that have one."""
        inputs = to_device(batch, model_device(model))
        labels = inputs.pop("labels")
        inputs = self._model_inputs(model, inputs, labels)
        # A device would have to finish its work before it could tell how many labels there are.
        mask = self._label_mask(self._targets(host_copy(labels)))
        places = LabelledPlaces.from_mask(mask, labels.device)
        return inputs, places.select(self._targets(labels)), places

    def _batch_loss(
        self, model: nn.Module, inputs: Mapping[str, Any], labels: Tensor, places: LabelledPlaces
    ) -> Tensor:
        """Return the mean loss over the labelled places; 0 without any."""
        logits = places.select(self._logits(model, inputs))
        return self._mean_loss(logits, labels) if len(labels) else logits.sum() * 0.0

    def _answers(
        self, model: nn.Module, inputs: Mapping[str, Any], labels: Tensor, places: LabelledPlaces
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return prediction, probabilities or None, and loss at the labelled places."""
        logits = places.select(self._logits(model, inputs))
        losses = self._loss_per_answer(logits, labels)
        return self._predict(logits), self._probabilities(logits), losses

    def _logits(self, model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
        """Run a model and return its float32 logits."""
        output: Any = model(**inputs)
        logits = cast("Tensor", output if isinstance(output, Tensor) else output.logits).float()
        self._require_output_size(logits)
        return logits

    def _model_inputs(
        self, model: nn.Module, inputs: dict[str, Tensor], labels: Tensor
    ) -> Mapping[str, Any]:
        """Return the keyword arguments of the model's call; a hook, by default `inputs` itself."""
        return inputs

    def _require_output_size(self, logits: Tensor) -> None:
        if self.labels and logits.shape[-1] != len(self.labels):
            raise DataError(
                f"the model has {logits.shape[-1]} classes, but the task has {len(self.labels)} "
                f"labels: build the model with num_labels = {len(self.labels)}"
            )

    def _targets(self, labels: Tensor) -> Tensor:
        """Return the label to predict at each position of the logits."""
        return labels

    def _label_mask(self, labels: Tensor) -> Tensor:
        """Return the mask of positions with a label."""
        return labels != NO_LABEL

    def _mean_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        if self.weights:
            return self._loss_per_answer(logits, labels).mean()
        return cross_entropy(logits, labels)

    def _loss_per_answer(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss at each row of `logits`, times the weight of the label.

        The mean is taken over all labels, not over weights, so that the weight of an example does
        not depend on the others in its batch.
        """
        losses = cross_entropy(logits, labels, reduction="none")
        return losses * self._label_weights(logits)[labels] if self.weights else losses

    def _label_weights(self, logits: Tensor) -> Tensor:
        weights = dict(self.weights)
        return logits.new_tensor([weights.get(label, 1.0) for label in self.labels])

    def _predict(self, logits: Tensor) -> Tensor:
        return logits.argmax(-1)

    def _probabilities(self, logits: Tensor) -> Tensor | None:
        """Return the probability of each class in each row of logits; None if there are none."""
        return logits.double().softmax(-1)

    def _task_scores(self, loss: float, predictions: Predictions) -> dict[str, float]:
        """Return the task's own metrics of predictions by name; `loss` is their mean loss."""
        if self.own_metrics:
            return compute_metrics([METRICS[name] for name in self.own_metrics], predictions)
        names = ("accuracy", "f1_macro", *(("auroc",) if len(self.labels) == 2 else ()))
        values = compute_metrics([METRICS[name] for name in names], predictions)
        return {"f1" if name == "f1_macro" else name: values[name] for name in values}

    @property
    def f1_average(self) -> str:
        """What the task's own `f1` is over: "macro", the mean over labels, or "entities"."""
        return "macro"

    def _class_indices(self, labels: Sequence[str]) -> list[int]:
        indices = {label: index for index, label in enumerate(self.labels)}
        unknown = sorted(set(labels) - indices.keys())
        if unknown:
            raise DataError(
                f"label {unknown[0]!r} in column {self.label!r} is not one of the task's labels: "
                f"{', '.join(self.labels)}"
            )
        return [indices[label] for label in labels]

    def _text_column(self, table: Dataset, column: str) -> list[str]:
        texts = column_values(table, column)
        if not all(isinstance(text, str) for text in texts):
            raise DataError(f"column {column!r} has {type(texts[0]).__name__} cells, not texts")
        return texts

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer of `source`, loaded once; raises DataError if there is none."""
        import transformers

        try:
            options = {"add_prefix_space": True} if self.kind == "token-classification" else {}
            tokenizer = load_pretrained(transformers.AutoTokenizer, self.source, **options)
        except (OSError, ValueError) as error:
            raise DataError(
                f"there is no tokenizer in {self.source!r}: give a folder with a tokenizer, or a "
                "model of the Hub as hub:org/name"
            ) from error
        return self._prepare_tokenizer(tokenizer)

    def _prepare_tokenizer(self, tokenizer: Any) -> Any:
        return tokenizer

    def _max_tokens(self, tokenizer: Any) -> int:
        return min(self.max_length, int(tokenizer.model_max_length))


def pad_token_id(tokenizer: Any) -> int:
    """Return a tokenizer's padding token; 0 if it has none, since the attention mask hides it."""
    return 0 if tokenizer.pad_token_id is None else int(tokenizer.pad_token_id)


def require_tokens(ids: Sequence[Sequence[int]], tokenizer: Any, column: str) -> None:
    """Raise DataError if a row of token `ids` has only special tokens, the unknown one aside."""
    special = set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}
    empty = sum(all(token in special for token in row) for row in ids)
    if empty:
        raise DataError(
            f"column {column!r} has texts without tokens in {empty} of {len(ids)} rows: remove "
            "these rows from the table"
        )


def split_by_sizes(flat: Iterable[T], sizes: Sequence[int]) -> list[list[T]]:
    """Split a flat sequence into consecutive lists of these sizes."""
    items = iter(flat)
    return [[next(items) for _ in range(size)] for size in sizes]
