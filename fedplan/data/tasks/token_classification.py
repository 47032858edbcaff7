# SPDX-License-Identifier: Apache-2.0
"""Token classification: one label for each word of a text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, cast, final

from torch import Tensor

from fedplan.data.examples import RaggedArray, TokenSequences, chunk_slices
from fedplan.data.tables import DataError, column_values, label_values
from fedplan.data.tasks.definition import Task, accuracy
from fedplan.data.tokens import label_first_tokens, pad_token_id, require_tokens, split_by_sizes

if TYPE_CHECKING:
    from datasets import Dataset

_ENTITY_TAG = re.compile(r"O|[BIESLU]-.+")


@final
class TokenClassification(Task):
    """One label per word, at the word's first token."""

    primary: ClassVar[str] = "f1"

    def prepare(self, table: Dataset) -> TokenSequences:
        """Return the words as tokens, cut at `max_length`, with labels at first tokens.

        Raises DataError if a row has another number of labels than of words.
        """
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
                self._require_label_per_word(words[chunk][number], classes, chunk.start + number)
                labels.append(label_first_tokens(encoded.word_ids(number), classes))
        require_tokens(ids, tokenizer, self.columns[0])
        return TokenSequences(
            RaggedArray.from_lists(ids), pad_token_id(tokenizer), RaggedArray.from_lists(labels)
        )

    def _require_label_per_word(
        self, words: Sequence[Any], classes: Sequence[int], row: int
    ) -> None:
        if len(words) != len(classes):
            raise DataError(
                f"row {row} has {len(words)} words in column {self.columns[0]!r}, but "
                f"{len(classes)} labels in column {self.label!r}: every word needs one label"
            )

    def _task_scores(
        self, loss: float, truth: Tensor, guess: Tensor, sizes: list[int]
    ) -> dict[str, float]:
        """Return accuracy and F1; for entity tags, the F1 of whole entities."""
        if not all(_ENTITY_TAG.fullmatch(label) for label in self.labels):
            return super()._task_scores(loss, truth, guess, sizes)
        from seqeval.metrics import f1_score

        numbers = cast("list[list[int]]", [truth.tolist(), guess.tolist()])
        sides = [
            split_by_sizes([self.labels[number] for number in side], sizes) for side in numbers
        ]
        # Without entities, predicting none is right.
        f1 = float(cast("Any", f1_score)(*sides, zero_division=1))
        return {"accuracy": accuracy(truth, guess), "f1": f1}
