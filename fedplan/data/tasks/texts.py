# SPDX-License-Identifier: Apache-2.0
"""Texts: one class, any of several labels, or a number for a text or a pair of texts."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Any, ClassVar, cast, final

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, mse_loss

from fedplan.data.examples import Ragged, Sequences, pieces
from fedplan.data.metrics import METRICS, Answers, measured
from fedplan.data.tables import DataError, labels_of, values
from fedplan.data.tasks.definition import Task, share_right
from fedplan.data.tokens import cut, opening, pad_of, require_tokens

if TYPE_CHECKING:
    from datasets import Dataset


@dataclass(frozen=True)
class _Texts(Task):
    """Texts, or pairs of them, with an answer for each."""

    takes: ClassVar[tuple[int, int]] = (1, 2)

    def _rows(self, table: Dataset, answers: Tensor) -> Sequences:
        """The texts as tokens, cut at the longest length."""
        tokenizer, texts = self.tokenizer, [self._texts(table, c) for c in self.columns]
        limit, ids, segments = self._limit(tokenizer), list[list[int]](), list[list[int]]()
        if len(texts) == 1:
            texts = [[opening(text, 2 * limit) for text in texts[0]]]
        for piece in pieces(len(table)):
            found = tokenizer(
                *(column[piece] for column in texts),
                truncation=True,
                max_length=limit,
                return_attention_mask=False,
                verbose=False,
            )
            ids += found["input_ids"]
            segments += found.get("token_type_ids", []) if len(texts) == 2 else []
        require_tokens(ids, tokenizer, " ".join(self.columns))
        pairs = Ragged.of(segments) if segments else None
        return Sequences(Ragged.of(ids), pad_of(tokenizer), answers, pairs)


@final
class TextClassification(_Texts):
    """One label for a text, or for a pair of texts."""

    def prepare(self, table: Dataset) -> Sequences:
        """The texts as tokens, each with its class."""
        labels = self._numbers(labels_of(table, self.label))
        return self._rows(table, torch.tensor(labels, dtype=torch.long))


@final
class MultiLabel(_Texts):
    """Any of several labels for a text, or for a pair of texts; or none of them."""

    answers: ClassVar[Answers] = "labels"
    primary: ClassVar[str] = "f1_micro"

    @property
    def settings(self) -> dict[str, Any]:
        """The names of the labels, and that several may be right."""
        return {**super().settings, "problem_type": "multi_label_classification"}

    def prepare(self, table: Dataset) -> Sequences:
        """The texts as tokens, each with a 1 for each of its labels."""
        said = labels_of(table, self.label)
        if strange := [each for each in said if not isinstance(each, list)]:
            raise DataError(
                f"column {self.label!r} holds {strange[0]!r}, and multi-label takes a list of "
                "labels in each row: take text-classification, or a table that has lists"
            )
        lists = cast("list[list[str]]", said)
        flat = self._numbers([word for row in lists for word in row])
        found = torch.zeros(len(lists), len(self.labels))
        for row, places in enumerate(cut(flat, list(map(len, lists)))):
            found[row, places] = 1.0
        return self._rows(table, found)

    def _asked(self, labels: Tensor) -> Tensor:
        return torch.ones(len(labels), dtype=torch.bool, device=labels.device)

    def _mean_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return self._losses(logits, labels).mean()

    def _losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The mean over the labels of each one's loss, which has the label's weight."""
        losses = binary_cross_entropy_with_logits(logits, labels, reduction="none")
        return (losses * self._factors(logits) if self.weights else losses).mean(-1)

    def _guess(self, logits: Tensor) -> Tensor:
        return (logits > 0).long()

    def _measures(
        self, loss: float, truth: Tensor, guess: Tensor, sizes: list[int]
    ) -> dict[str, float]:
        asked = [METRICS[name] for name in ("f1_micro", "f1_macro")]
        found = measured(asked, truth.numpy(), guess.numpy())
        whole = share_right((truth == guess).all(-1), torch.tensor(True))
        return {"accuracy": whole, **found}


@final
class Regression(_Texts):
    """A number for a text, or for a pair of texts."""

    answers: ClassVar[Answers] = "number"
    primary: ClassVar[str] = "rmse"
    higher: ClassVar[bool] = False

    @property
    def settings(self) -> dict[str, Any]:
        """One output, which is a number."""
        return {"num_labels": 1, "problem_type": "regression"}

    def prepare(self, table: Dataset) -> Sequences:
        """The texts as tokens, each with its number."""
        found = [self._number(value) for value in values(table, self.label)]
        return self._rows(table, torch.tensor(found))

    def _number(self, value: Any) -> float:
        """A number, or what a cell of a .csv says of one."""
        try:
            found = float(value)
        except (TypeError, ValueError):
            found = float("nan")
        if not isfinite(found):
            raise DataError(
                f"column {self.label!r} holds {value!r}, and regression takes numbers: take these "
                "rows out, or the task text-classification"
            )
        return found

    def _require_outputs(self, logits: Tensor) -> None:
        if logits.shape[-1] != 1:
            raise DataError(
                f"the model has {logits.shape[-1]} outputs and regression asks for one number: "
                "build the model with num_labels = 1"
            )

    def _asked(self, labels: Tensor) -> Tensor:
        return torch.ones_like(labels, dtype=torch.bool)

    def _mean_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return mse_loss(logits.squeeze(-1), labels)

    def _losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        return mse_loss(logits.squeeze(-1), labels, reduction="none")

    def _guess(self, logits: Tensor) -> Tensor:
        return logits.squeeze(-1)

    def _measures(
        self, loss: float, truth: Tensor, guess: Tensor, sizes: list[int]
    ) -> dict[str, float]:
        asked = [METRICS[name] for name in ("mae", "rmse", "r2", "pearson")]
        return measured(asked, truth.numpy(), guess.numpy())
