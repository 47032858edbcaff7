# SPDX-License-Identifier: Apache-2.0
"""Words: one label for each word of a text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, cast, final

from torch import Tensor

from fedplan.data.examples import Ragged, Sequences, pieces
from fedplan.data.tables import DataError, labels_of, values
from fedplan.data.tasks.definition import Task, share_right
from fedplan.data.tokens import at_first_tokens, cut, pad_of, require_tokens

if TYPE_CHECKING:
    from datasets import Dataset

_ENTITY_TAG = re.compile(r"O|[BIESLU]-.+")


@final
class TokenClassification(Task):
    """One label for each word; it stands at the word's first token."""

    primary: ClassVar[str] = "f1"

    def prepare(self, table: Dataset) -> Sequences:
        """The words as tokens, cut at the longest length."""
        tokenizer = self.tokenizer
        words, tags = values(table, self.columns[0]), labels_of(table, self.label)
        ids, labels = list[list[int]](), list[list[int]]()
        for piece in pieces(len(table)):
            found = tokenizer(
                words[piece],
                is_split_into_words=True,
                truncation=True,
                max_length=self._limit(tokenizer),
                verbose=False,
            )
            ids += found["input_ids"]
            flat = self._numbers([tag for row in tags[piece] for tag in row])
            for number, classes in enumerate(cut(flat, [len(row) for row in tags[piece]])):
                self._require_pairs(words[piece][number], classes, piece.start + number)
                labels.append(at_first_tokens(found.word_ids(number), classes))
        require_tokens(ids, tokenizer, self.columns[0])
        return Sequences(Ragged.of(ids), pad_of(tokenizer), Ragged.of(labels))

    def _require_pairs(self, words: Sequence[Any], classes: Sequence[int], row: int) -> None:
        if len(words) != len(classes):
            raise DataError(
                f"row {row} has {len(words)} in column {self.columns[0]!r} and {len(classes)} in "
                f"column {self.label!r}: every word needs one label"
            )

    def _measures(
        self, loss: float, truth: Tensor, guess: Tensor, sizes: list[int]
    ) -> dict[str, float]:
        """F1 of whole entities, where the labels are entity tags."""
        if not all(_ENTITY_TAG.fullmatch(label) for label in self.labels):
            return super()._measures(loss, truth, guess, sizes)
        from seqeval.metrics import f1_score

        numbers = cast("list[list[int]]", [truth.tolist(), guess.tolist()])
        sides = [cut([self.labels[number] for number in side], sizes) for side in numbers]
        # Where there is no entity, to find none is right.
        f1 = float(cast("Any", f1_score)(*sides, zero_division=1))
        return {"accuracy": share_right(truth, guess), "f1": f1}
