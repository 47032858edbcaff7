# SPDX-License-Identifier: Apache-2.0
"""Language: the next token, the hidden ones, the text that follows from another, the answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import exp
from typing import TYPE_CHECKING, Any, ClassVar, cast, final

import torch
from torch import Tensor, nn

from fedplan.data.chats import NO_TEMPLATE, PLAIN, conversations, read, templated
from fedplan.data.examples import NO_LABEL, Masked, Packed, Ragged, Sequences, keys_of, pieces
from fedplan.data.metrics import Answers
from fedplan.data.tables import DataError
from fedplan.data.tasks.definition import Task, share_right
from fedplan.data.tokens import blocks, packs, pad_of, require_tokens

if TYPE_CHECKING:
    from datasets import Dataset


@dataclass(frozen=True)
class _Language(Task):
    """Tokens, each of which is an answer."""

    answers: ClassVar[Answers] = "tokens"
    primary: ClassVar[str] = "perplexity"
    higher: ClassVar[bool] = False

    def _measures(
        self, loss: float, truth: Tensor, guess: Tensor, sizes: list[int]
    ) -> dict[str, float]:
        return {"accuracy": share_right(truth, guess), "perplexity": exp(min(loss, 700.0))}


@dataclass(frozen=True)
class _Blocks(_Language):
    """Texts as tokens, each cut into blocks of its own."""

    def _blocks(self, table: Dataset, tokenizer: Any, *, framed: bool, end: int | None) -> Ragged:
        texts, rows = self._texts(table, self.columns[0]), list[list[int]]()
        for piece in pieces(len(table)):
            rows += tokenizer(texts[piece], add_special_tokens=framed, verbose=False)["input_ids"]
        require_tokens(rows, tokenizer, self.columns[0])
        closed = rows if end is None else [[*row, end] for row in rows]
        return Ragged.of(blocks(closed, self._limit(tokenizer), single=self.single))


@final
class CausalLanguage(_Blocks):
    """The next token, at each token."""

    def prepare(self, table: Dataset) -> Sequences:
        """The texts in blocks, each text closed by the end token."""
        tokenizer = self.tokenizer
        end = tokenizer.eos_token_id
        end = tokenizer.sep_token_id if end is None else end
        found = self._blocks(table, tokenizer, framed=False, end=end)
        return Sequences(found, pad_of(tokenizer), found)

    def _targets(self, labels: Tensor) -> Tensor:
        return _next(labels)


@final
class MaskedLanguage(_Blocks):
    """The hidden tokens of a text."""

    def prepare(self, table: Dataset) -> Masked:
        """The texts in blocks, of which each batch hides some tokens."""
        tokenizer = self.tokenizer
        if tokenizer.mask_token_id is None:
            raise DataError(f"the tokenizer of {self.source!r} has no mask token: take causal-lm")
        found = self._blocks(table, tokenizer, framed=True, end=None)
        special = torch.tensor(tokenizer.all_special_ids)
        rows = Sequences(found, pad_of(tokenizer), found)
        return Masked(rows, keys_of(found), tokenizer.mask_token_id, special, len(tokenizer))


@final
class SequenceToSequence(_Language):
    """A text that follows from another: its input stands in the first column, it in the second."""

    takes: ClassVar[tuple[int, int]] = (2, 2)

    def prepare(self, table: Dataset) -> Sequences:
        """Both texts as tokens, each cut at the longest length."""
        tokenizer, sides = self.tokenizer, list[list[list[int]]]()
        for column, word in zip(self.columns, ("text", "text_target"), strict=True):
            texts, rows = self._texts(table, column), list[list[int]]()
            for piece in pieces(len(table)):
                asked = {word: texts[piece], "truncation": True}
                rows += tokenizer(**asked, max_length=self._limit(tokenizer))["input_ids"]
            require_tokens(rows, tokenizer, column)
            sides.append(rows)
        texts, targets = map(Ragged.of, sides)
        return Sequences(texts, pad_of(tokenizer), targets, follows=True)

    def _inputs(
        self, model: nn.Module, inputs: dict[str, Tensor], labels: Tensor
    ) -> Mapping[str, Any]:
        """With the text to be said so far, as the model's own loss has it."""
        begun = cast("Any", model).prepare_decoder_input_ids_from_labels(labels)
        return {**inputs, "decoder_input_ids": begun}


@final
class Instruction(_Language):
    """The answers of a conversation: nothing is learnt of what is asked.

    A conversation stands in one column of messages, or in two, as a prompt and its response.
    """

    takes: ClassVar[tuple[int, int]] = (1, 2)

    @property
    def notes(self) -> tuple[str, ...]:
        """That the tokenizer has no chat template, if it has none."""
        plain = self.tokenizer.chat_template == PLAIN
        return (NO_TEMPLATE.format(self.source),) if plain else ()

    def _fitted(self, tokenizer: Any) -> Any:
        """The tokenizer, with the plain template if it has none of its own."""
        return templated(tokenizer)

    def prepare(self, table: Dataset) -> Sequences | Packed:
        """The conversations as tokens, those of the answers as labels too."""
        tokenizer, limit = self.tokenizer, self._limit(self.tokenizer)
        ids, labels = list[list[int]](), list[list[int]]()
        for said in conversations(table, self.columns):
            tokens, wanted = read(tokenizer, said, row=len(ids))
            ids.append(tokens[:limit])
            labels.append(wanted[:limit])
        self._require_answers(labels)
        if not self.packing:
            return Sequences(Ragged.of(ids), pad_of(tokenizer), Ragged.of(labels))
        rows = packs(list(map(len, ids)), limit)
        places = [list(range(len(row))) for row in ids]
        words, answers, begun = (_together(side, rows) for side in (ids, labels, places))
        return Packed(words, answers, begun, pad_of(tokenizer))

    def _require_answers(self, labels: list[list[int]]) -> None:
        empty = sum(all(each == NO_LABEL for each in row) for row in labels)
        if empty:
            raise DataError(
                f"{empty} of {len(labels)} rows of column {' '.join(self.columns)!r} have no token "
                f"of an answer within max_length = {self.max_length}: raise it, or take these rows "
                "out of the table"
            )

    def _inputs(
        self, model: nn.Module, inputs: dict[str, Tensor], labels: Tensor
    ) -> Mapping[str, Any]:
        """Packed conversations without a cache: with one, transformers does not tell them apart."""
        return {**inputs, "use_cache": False} if self.packing else inputs

    def _targets(self, labels: Tensor) -> Tensor:
        return _next(labels)


def _together(side: list[list[int]], rows: list[list[int]]) -> Ragged:
    """Some lists as longer ones, each of several."""
    return Ragged.of([[each for number in row for each in side[number]] for row in rows])


def _next(labels: Tensor) -> Tensor:
    """At each token the label of the next one; at the last, none."""
    last = torch.full_like(labels[:, :1], NO_LABEL)
    return torch.cat([labels[:, 1:], last], 1)
