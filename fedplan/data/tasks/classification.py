# SPDX-License-Identifier: Apache-2.0
"""Tasks with a label or number for a text, a pair of texts, a word or an image."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Any, ClassVar, cast, final

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, mse_loss

from fedplan.data.examples import (
    NO_LABEL,
    ImageExamples,
    RaggedArray,
    TokenSequences,
    chunk_slices,
    read_images,
)
from fedplan.data.metrics import AnswerKind, Predictions
from fedplan.data.tables import DataError, column_values, label_values
from fedplan.data.tasks.definition import (
    Task,
    pad_token_id,
    require_tokens,
    split_by_sizes,
)
from fedplan.errors import import_extra
from fedplan.models.folder import image_mean_std, image_tensor

if TYPE_CHECKING:
    from datasets import Dataset


class _TargetTask(Task):
    """A task with one target for each example, by default a class."""

    def _read_targets(self, table: Dataset) -> Tensor:
        """Return the targets of a table's rows; DataError for an unknown label."""
        labels = self._class_indices(label_values(table, self.label))
        return torch.tensor(labels, dtype=torch.long)

    def _made_up_targets(self, draw: np.random.Generator, count: int) -> Tensor:
        return torch.from_numpy(draw.integers(len(self.labels), size=count))


@dataclass(frozen=True)
class _TextTask(_TargetTask):
    """A task with one prediction per text (one input column) or per pair of texts (two columns)."""

    input_columns: ClassVar[tuple[int, int]] = (1, 2)

    def prepare(self, table: Dataset) -> TokenSequences:
        """Return the texts as tokens, cut at `max_length`, with their targets."""
        targets = self._read_targets(table)
        tokenizer, texts = self.tokenizer, [self._text_column(table, c) for c in self.columns]
        limit, ids, segments = self._max_tokens(tokenizer), list[list[int]](), list[list[int]]()
        if len(texts) == 1:
            # Nearly every word has a token or more: to tokenize the rest would only take time.
            first_words = re.compile(rf"(?:\s*\S+){{0,{2 * limit}}}")
            texts = [[match[0] for match in map(first_words.match, texts[0]) if match]]
        for chunk in chunk_slices(len(table)):
            encoded = tokenizer(
                *(column[chunk] for column in texts),
                truncation=True,
                max_length=limit,
                return_attention_mask=False,
                verbose=False,
            )
            ids += encoded["input_ids"]
            segments += encoded.get("token_type_ids", []) if len(texts) == 2 else []
        require_tokens(ids, tokenizer, " ".join(self.columns))
        pairs = RaggedArray.from_lists(segments) if segments else None
        return TokenSequences(RaggedArray.from_lists(ids), pad_token_id(tokenizer), targets, pairs)

    def _made_up(self, draw: np.random.Generator) -> TokenSequences:
        ids = self._made_up_tokens(draw)
        has_segments = len(self.columns) == 2 and "token_type_ids" in (
            self.tokenizer.model_input_names
        )
        pairs = RaggedArray(torch.zeros_like(ids.flat), ids.starts) if has_segments else None
        targets = self._made_up_targets(draw, len(ids.starts) - 1)
        return TokenSequences(ids, pad_token_id(self.tokenizer), targets, pairs)


@final
class TextClassification(_TextTask):
    """One label per text, or per pair of texts."""


class _LabelSets(_TargetTask):
    """Any number of labels per example; the primary metric is micro F1."""

    answer_kind: ClassVar[AnswerKind] = "labels"
    primary: ClassVar[str] = "f1_micro"
    own_metrics: ClassVar[tuple[str, ...]] = ("accuracy", "f1_micro", "f1_macro", "auroc")

    @property
    def settings(self) -> dict[str, Any]:
        return {**super().settings, "problem_type": "multi_label_classification"}

    def _read_targets(self, table: Dataset) -> Tensor:
        """Return a row of 0 and 1 for each row of a table, in the order of the labels."""
        values = label_values(table, self.label)
        if scalars := [value for value in values if not isinstance(value, list)]:
            raise DataError(
                f"column {self.label!r} has {scalars[0]!r}, but {self.kind} needs a list of labels "
                "in each row: set task.label_separator if a cell has several labels, or use a "
                "task of one label"
            )
        lists = cast("list[list[str]]", values)
        flat = self._class_indices([label for row in lists for label in row])
        targets = torch.zeros(len(lists), len(self.labels))
        for row, indices in enumerate(split_by_sizes(flat, list(map(len, lists)))):
            targets[row, indices] = 1.0
        return targets

    def _made_up_targets(self, draw: np.random.Generator, count: int) -> Tensor:
        return torch.from_numpy(draw.integers(2, size=(count, len(self.labels)))).float()

    def _label_mask(self, labels: Tensor) -> Tensor:
        return torch.ones(len(labels), dtype=torch.bool, device=labels.device)

    def _mean_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return self._loss_per_answer(logits, labels).mean()

    def _loss_per_answer(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of each example: the mean over labels of the weighted loss."""
        losses = binary_cross_entropy_with_logits(logits, labels, reduction="none")
        return (losses * self._label_weights(logits) if self.weights else losses).mean(-1)

    def _predict(self, logits: Tensor) -> Tensor:
        return (logits > 0).long()

    def _probabilities(self, logits: Tensor) -> Tensor | None:
        return logits.double().sigmoid()


@final
class MultiLabel(_LabelSets, _TextTask):
    """Any number of labels per text, or per pair of texts."""


@final
class Regression(_TextTask):
    """A number per text, or per pair of texts; the primary metric is RMSE, and lower is better."""

    answer_kind: ClassVar[AnswerKind] = "number"
    primary: ClassVar[str] = "rmse"
    own_metrics: ClassVar[tuple[str, ...]] = ("mae", "rmse", "r2", "pearson")
    higher_is_better: ClassVar[bool] = False

    @property
    def settings(self) -> dict[str, Any]:
        return {"num_labels": 1, "problem_type": "regression"}

    def _read_targets(self, table: Dataset) -> Tensor:
        numbers = list[float]()
        for value in column_values(table, self.label):
            try:
                number = float(value)
            except (TypeError, ValueError):
                number = float("nan")
            if not isfinite(number):
                raise DataError(
                    f"column {self.label!r} has {value!r}, but regression needs numbers: remove "
                    "these rows, or use the task text-classification"
                )
            numbers.append(number)
        return torch.tensor(numbers)

    def _made_up_targets(self, draw: np.random.Generator, count: int) -> Tensor:
        return torch.from_numpy(draw.random(count)).float()

    def _require_output_size(self, logits: Tensor) -> None:
        if logits.shape[-1] != 1:
            raise DataError(
                f"the model has {logits.shape[-1]} outputs, but regression needs one number: "
                "build the model with num_labels = 1"
            )

    def _label_mask(self, labels: Tensor) -> Tensor:
        return torch.ones_like(labels, dtype=torch.bool)

    def _mean_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return mse_loss(logits.squeeze(-1), labels)

    def _loss_per_answer(self, logits: Tensor, labels: Tensor) -> Tensor:
        return mse_loss(logits.squeeze(-1), labels, reduction="none")

    def _predict(self, logits: Tensor) -> Tensor:
        return logits.squeeze(-1)

    def _probabilities(self, logits: Tensor) -> Tensor | None:
        return None


_ENTITY_TAG = re.compile(r"O|[BIESLU]-.+")


@final
class TokenClassification(Task):
    """One label per word, at the word's first token; the primary metric is F1.

    F1 is of whole entities if all labels are entity tags like B-LOC, else the mean over labels.
    """

    primary: ClassVar[str] = "f1"

    def prepare(self, table: Dataset) -> TokenSequences:
        """Tokenize the words of a table's rows, with labels at the first token of each."""
        tokenizer = self.tokenizer
        words, tags = column_values(table, self.columns[0]), label_values(table, self.label)
        ids, labels = list[list[int]](), list[list[int]]()
        for chunk in chunk_slices(len(table)):
            encoded = tokenizer(
                words[chunk],
                is_split_into_words=True,
                truncation=True,
                max_length=self._max_tokens(tokenizer),
                verbose=False,
            )
            ids += encoded["input_ids"]
            flat = self._class_indices([tag for row in tags[chunk] for tag in row])
            for number, classes in enumerate(
                split_by_sizes(flat, [len(row) for row in tags[chunk]])
            ):
                word_count = len(words[chunk][number])
                if word_count != len(classes):
                    raise DataError(
                        f"row {chunk.start + number} has {word_count} words in column "
                        f"{self.columns[0]!r}, but {len(classes)} labels in column "
                        f"{self.label!r}: every word needs one label"
                    )
                token_words: list[int | None] = encoded.word_ids(number)
                labels.append(
                    [
                        NO_LABEL if word is None or word == previous else classes[word]
                        for word, previous in zip(token_words, [None, *token_words], strict=False)
                    ]
                )
        require_tokens(ids, tokenizer, self.columns[0])
        return TokenSequences(
            RaggedArray.from_lists(ids), pad_token_id(tokenizer), RaggedArray.from_lists(labels)
        )

    def _made_up(self, draw: np.random.Generator) -> TokenSequences:
        ids = self._made_up_tokens(draw)
        labels = torch.from_numpy(draw.integers(len(self.labels), size=len(ids.flat)))
        tags = RaggedArray(labels.to(ids.flat.dtype), ids.starts)
        return TokenSequences(ids, pad_token_id(self.tokenizer), tags)

    @property
    def f1_average(self) -> str:
        return "entities" if all(map(_ENTITY_TAG.fullmatch, self.labels)) else "macro"

    def _task_scores(self, loss: float, predictions: Predictions) -> dict[str, float]:
        scores = super()._task_scores(loss, predictions)
        if self.f1_average == "macro":
            return scores
        f1_score = import_extra("seqeval.metrics", f"the f1 of {self.kind}").f1_score
        sides: list[list[list[str]]] = [
            split_by_sizes([self.labels[index] for index in side], predictions.sizes.tolist())
            for side in (predictions.truth, predictions.predicted)
        ]
        # Without entities, predicting none is right.
        return {**scores, "f1": float(f1_score(*sides, zero_division=1))}


@dataclass(frozen=True)
class _ImageTask(_TargetTask):
    """A task on images; `cubic` selects bicubic resizing."""

    cubic: ClassVar[bool] = False

    def prepare(self, table: Dataset) -> ImageExamples:
        targets = self._read_targets(table)
        size = self.image_size
        pixels = torch.empty((len(table), 3, size, size), dtype=torch.uint8)
        for row, value in enumerate(read_images(table, self.columns[0])):
            try:
                pixels[row] = image_tensor(value, size, cubic=self.cubic)
            except (OSError, ValueError, TypeError) as error:
                place = f"row {row} of column {self.columns[0]!r}"
                raise DataError(f"{place} is not an image: {error}") from error
        mean, std = image_mean_std(self.source)
        return ImageExamples(pixels, targets, mean, std)

    def _made_up(self, draw: np.random.Generator) -> ImageExamples:
        size = self.image_size
        pixels = torch.from_numpy(draw.integers(256, size=(5, 3, size, size), dtype=np.uint8))
        labels = self._made_up_targets(draw, 5)
        return ImageExamples(pixels, labels, *image_mean_std(self.source))


@final
class ImageClassification(_ImageTask):
    """One label per image, by a classification head."""


@final
class ImageMultiLabel(_LabelSets, _ImageTask):
    """Any number of labels per image."""


@final
class ImageText(_ImageTask):
    """One label per image, by the similarity to a text made from each label."""

    cubic = True
