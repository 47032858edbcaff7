# SPDX-License-Identifier: Apache-2.0
"""Token classification: one label for each word of a text."""

from __future__ import annotations

import re
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
    """One label per word, at the word's first token; the primary metric is F1.

    F1 is of whole entities if all labels are entity tags like B-LOC, else the mean over labels.
    """

    primary: ClassVar[str] = "f1"

    def prepare(self, table: Dataset) -> TokenSequences:
        """Tokenize the words of a table's rows, cut at `max_length`, with labels at first tokens.

        Raises DataError if a row has another number of labels than of words, or an unknown label.
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
                word_count = len(words[chunk][number])
                if word_count != len(classes):
                    raise DataError(
                        f"row {chunk.start + number} has {word_count} words in column "
                        f"{self.columns[0]!r}, but {len(classes)} labels in column "
                        f"{self.label!r}: every word needs one label"
                    )
                labels.append(label_first_tokens(encoded.word_ids(number), classes))
        require_tokens(ids, tokenizer, self.columns[0])
        return TokenSequences(
            RaggedArray.from_lists(ids), pad_token_id(tokenizer), RaggedArray.from_lists(labels)
        )

    def _task_scores(
        self, loss: float, truth: Tensor, guess: Tensor, sizes: list[int]
    ) -> dict[str, float]:
        """Return `accuracy` (of labels), and `f1` as described at the class."""
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
