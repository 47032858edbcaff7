# SPDX-License-Identifier: Apache-2.0
"""Language model tasks: next token, masked tokens, target texts, and answers in chats."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import exp
from typing import TYPE_CHECKING, Any, ClassVar, cast, final

import torch
from torch import Tensor, nn

from fedplan.data.chats import (
    NO_TEMPLATE_NOTE,
    PLAIN_TEMPLATE,
    ensure_chat_template,
    read_conversations,
    tokenize_chat,
)
from fedplan.data.examples import (
    NO_LABEL,
    MaskedTokens,
    PackedSequences,
    RaggedArray,
    TokenSequences,
    block_seeds,
    chunk_slices,
)
from fedplan.data.metrics import AnswerKind
from fedplan.data.tables import DataError
from fedplan.data.tasks.definition import Task, accuracy
from fedplan.data.tokens import pack_sequences, pad_token_id, require_tokens, token_blocks

if TYPE_CHECKING:
    from datasets import Dataset


@dataclass(frozen=True)
class _Language(Task):
    """A task that predicts tokens; the primary metric is perplexity, and lower is better."""

    answer_kind: ClassVar[AnswerKind] = "tokens"
    primary: ClassVar[str] = "perplexity"
    higher_is_better: ClassVar[bool] = False

    def _task_scores(
        self, loss: float, truth: Tensor, guess: Tensor, sizes: list[int]
    ) -> dict[str, float]:
        return {"accuracy": accuracy(truth, guess), "perplexity": exp(min(loss, 700.0))}


@dataclass(frozen=True)
class _BlockTask(_Language):
    """A language task on texts that are cut into blocks of at most `max_length` tokens."""

    def _blocks(
        self, table: Dataset, tokenizer: Any, *, special_tokens: bool, end: int | None
    ) -> RaggedArray:
        """Tokenize the texts of a table and cut each into blocks of at most `max_length` tokens.

        `special_tokens` adds the tokenizer's own; `end` is a token id to append to each text, or
        None. Raises DataError if a text has no tokens.
        """
        texts, rows = self._text_column(table, self.columns[0]), list[list[int]]()
        for chunk in chunk_slices(len(table)):
            rows += tokenizer(texts[chunk], add_special_tokens=special_tokens, verbose=False)[
                "input_ids"
            ]
        require_tokens(rows, tokenizer, self.columns[0])
        closed = rows if end is None else [[*row, end] for row in rows]
        return RaggedArray.from_lists(
            token_blocks(
                closed, self._max_tokens(tokenizer), one_block_per_row=self.one_example_per_row
            )
        )


@final
class CausalLanguage(_BlockTask):
    """Prediction of the next token."""

    def prepare(self, table: Dataset) -> TokenSequences:
        """Return the texts of a table in blocks of tokens, each text with an end token."""
        tokenizer = self.tokenizer
        end = tokenizer.eos_token_id
        end = tokenizer.sep_token_id if end is None else end
        blocks = self._blocks(table, tokenizer, special_tokens=False, end=end)
        return TokenSequences(blocks, pad_token_id(tokenizer), blocks)

    def _targets(self, labels: Tensor) -> Tensor:
        return _shift_left(labels)


@final
class MaskedLanguage(_BlockTask):
    """Prediction of masked tokens."""

    def prepare(self, table: Dataset) -> MaskedTokens:
        """Return the texts of a table in blocks for masking; DataError without a mask token."""
        tokenizer = self.tokenizer
        if tokenizer.mask_token_id is None:
            raise DataError(f"the tokenizer of {self.source!r} has no mask token: use causal-lm")
        blocks = self._blocks(table, tokenizer, special_tokens=True, end=None)
        return MaskedTokens(
            TokenSequences(blocks, pad_token_id(tokenizer), blocks),
            block_seeds(blocks),
            tokenizer.mask_token_id,
            torch.tensor(tokenizer.all_special_ids),
            len(tokenizer),
        )


@final
class SequenceToSequence(_Language):
    """Generation of a target text (second column) from an input text (first column)."""

    input_columns: ClassVar[tuple[int, int]] = (2, 2)

    def prepare(self, table: Dataset) -> TokenSequences:
        """Return input and target tokens, cut at `max_length`; DataError for an empty text."""
        tokenizer, sides = self.tokenizer, list[list[list[int]]]()
        for column, argument in zip(self.columns, ("text", "text_target"), strict=True):
            texts, rows = self._text_column(table, column), list[list[int]]()
            for chunk in chunk_slices(len(table)):
                options = {argument: texts[chunk], "truncation": True}
                rows += tokenizer(**options, max_length=self._max_tokens(tokenizer))["input_ids"]
            require_tokens(rows, tokenizer, column)
            sides.append(rows)
        texts, targets = map(RaggedArray.from_lists, sides)
        return TokenSequences(texts, pad_token_id(tokenizer), targets, seq2seq=True)

    def _model_inputs(
        self, model: nn.Module, inputs: dict[str, Tensor], labels: Tensor
    ) -> Mapping[str, Any]:
        """Add the decoder's inputs: the labels shifted right, as for the model's own loss."""
        decoder_ids = cast("Any", model).prepare_decoder_input_ids_from_labels(labels)
        return {**inputs, "decoder_input_ids": decoder_ids}


@final
class Instruction(_Language):
    """A task that predicts the assistant's messages in conversations; prompts have no loss.

    The input is one column of messages, or two columns, prompt and response.
    """

    input_columns: ClassVar[tuple[int, int]] = (1, 2)

    @property
    def notes(self) -> tuple[str, ...]:
        """A note if the tokenizer has no chat template of its own."""
        plain = self.tokenizer.chat_template == PLAIN_TEMPLATE
        return (NO_TEMPLATE_NOTE.format(self.source),) if plain else ()

    def _prepare_tokenizer(self, tokenizer: Any) -> Any:
        """Set the plain chat template if the tokenizer has none."""
        return ensure_chat_template(tokenizer)

    def prepare(self, table: Dataset) -> TokenSequences | PackedSequences:
        """Return the conversations of a table as tokens, with labels in the assistant's messages.

        With `packing`, returns PackedSequences. Raises DataError if a conversation has no token of
        an assistant's message within `max_length`.
        """
        tokenizer, limit = self.tokenizer, self._max_tokens(self.tokenizer)
        ids, labels = list[list[int]](), list[list[int]]()
        for chat in read_conversations(table, self.columns):
            chat_ids, chat_labels = tokenize_chat(tokenizer, chat, row=len(ids))
            ids.append(chat_ids[:limit])
            labels.append(chat_labels[:limit])
        empty = sum(all(label == NO_LABEL for label in row) for row in labels)
        if empty:
            raise DataError(
                f"{empty} of {len(labels)} rows of column {' '.join(self.columns)!r} have no token "
                f"of an answer within max_length = {self.max_length}: raise max_length, or remove "
                "these rows from the table"
            )
        if not self.packing:
            return TokenSequences(
                RaggedArray.from_lists(ids), pad_token_id(tokenizer), RaggedArray.from_lists(labels)
            )
        packs = pack_sequences(list(map(len, ids)), limit)
        positions = [list(range(len(row))) for row in ids]
        packed_ids, packed_labels, packed_positions = (
            RaggedArray.from_lists([[n for i in pack for n in rows[i]] for pack in packs])
            for rows in (ids, labels, positions)
        )
        return PackedSequences(packed_ids, packed_labels, packed_positions, pad_token_id(tokenizer))

    def _model_inputs(
        self, model: nn.Module, inputs: dict[str, Tensor], labels: Tensor
    ) -> Mapping[str, Any]:
        """Turn off the cache for packed conversations: with it, transformers would mix them."""
        return {**inputs, "use_cache": False} if self.packing else inputs

    def _targets(self, labels: Tensor) -> Tensor:
        return _shift_left(labels)


def _shift_left(labels: Tensor) -> Tensor:
    """Return the label of the next token at each token; NO_LABEL at the last."""
    last = torch.full_like(labels[:, :1], NO_LABEL)
    return torch.cat([labels[:, 1:], last], 1)
