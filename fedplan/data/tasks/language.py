# SPDX-License-Identifier: Apache-2.0
"""Language model tasks: next token, masked tokens, target texts, and answers in chats."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp
from typing import TYPE_CHECKING, Any, ClassVar, cast, final

import numpy as np
import torch
from torch import Tensor, nn

from fedplan.data.examples import (
    NO_LABEL,
    Examples,
    MaskedTokens,
    PackedSequences,
    RaggedArray,
    TokenSequences,
    block_seeds,
    chunk_slices,
)
from fedplan.data.metrics import METRICS, AnswerKind, Predictions, compute_metrics
from fedplan.data.tables import DataError, column_values, select_rows
from fedplan.data.tasks.chunked_loss import (
    chunk_rows,
    chunked_cross_entropy,
    find_head,
    head_inputs,
)
from fedplan.data.tasks.definition import LabelledPlaces, Task, pad_token_id, require_tokens
from fedplan.data.tasks.generation import generate_answer
from fedplan.tensors.devices import eval_mode, model_device

if TYPE_CHECKING:
    from datasets import Dataset


Chat = Sequence[dict[str, Any]]
"""Messages, each with a role and a content."""

PLAIN_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '### ' + message['role'] + ':\n' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token or sep_token }}{% endif %}"
    "{{ '\n\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '### assistant:\n' }}{% endif %}"
)
"""Chat template for tokenizers without one: a heading for each role, an end token per answer."""
NO_TEMPLATE_NOTE = (
    "The tokenizer of {} has no chat template, so conversations are written with the headings "
    "'### user:' and '### assistant:'."
)
_FIXED_DATE = "26 Jul 2024"
"""Date for templates that write today's date: examples must not change overnight."""


def ensure_chat_template(tokenizer: Any) -> Any:
    """Set PLAIN_TEMPLATE on a tokenizer that has no chat template; return the same tokenizer.

    Raises DataError if the tokenizer is slow, or has neither a template nor an end token.
    """
    if not tokenizer.is_fast:
        raise DataError(
            f"{type(tokenizer).__name__} does not give the positions of its tokens in a text, so "
            "the tokens of answers are not known: use a tokenizer with a tokenizer.json"
        )
    if not tokenizer.chat_template:
        if not (tokenizer.eos_token or tokenizer.sep_token):
            raise DataError(
                "the tokenizer has no chat template and no end token, so answers would have no "
                "end: give the tokenizer one of them"
            )
        tokenizer.chat_template = PLAIN_TEMPLATE
    return tokenizer


def read_conversations(table: Dataset, columns: Sequence[str]) -> Iterator[Chat]:
    """Yield the conversation of each row: a cell of messages, or two of prompt and response."""
    for chunk in chunk_slices(len(table)):
        rows = select_rows(table, range(*chunk.indices(len(table))))
        cells = [column_values(rows, column) for column in columns]
        for number, row in enumerate(zip(*cells, strict=True), chunk.start):
            if len(row) != 2:
                yield _parse_messages(row[0], columns[0])
                continue
            for column, text in zip(columns, row, strict=True):
                if not isinstance(text, str) or not text.strip():
                    raise DataError(f"row {number} of column {column!r} is {text!r}, not a text")
            roles = zip(("user", "assistant"), row, strict=True)
            yield [{"role": role, "content": text} for role, text in roles]


def _parse_messages(cell: Any, column: str) -> Chat:
    """Return the messages in a table's cell, without fields that are None."""
    messages = cast("list[Any]", cell) if isinstance(cell, list) else []
    for message in messages or [cell]:
        fields = cast("dict[str, Any]", message) if isinstance(message, dict) else {}
        if not all(isinstance(fields.get(name), str) for name in ("role", "content")):
            raise DataError(
                f"column {column!r} has {str(message)[:80]!r}: a conversation is a list of "
                "messages, each with a role and a content; or name two columns, for prompts and "
                "responses"
            )
    # A field that one row has is None in all other rows of the table.
    return [{name: value for name, value in m.items() if value is not None} for m in messages]


def tokenize_chat(tokenizer: Any, chat: Chat, *, row: int) -> tuple[list[int], list[int]]:
    """Tokenize a conversation; return (token ids, labels) of equal length.

    A label is the token id within the assistant's messages, including their end tokens, and
    NO_LABEL elsewhere, and at the first token. Raises DataError, with the number `row`, if the chat
    template fails, or renders a message differently when another one follows.
    """
    text, spans = _apply_template(tokenizer, chat, row), list[tuple[int, int]]()
    for number, message in enumerate(chat):
        if message["role"] != "assistant":
            continue
        before = _apply_template(tokenizer, chat[:number], row, start_answer=True)
        until = _apply_template(tokenizer, chat[: number + 1], row)
        if not (text.startswith(until) and until.startswith(before)):
            raise DataError(
                f"row {row}: the chat template writes earlier messages differently when a later "
                "one follows, so the tokens of the answers are not known: keep one answer in each "
                "row, or give the tokenizer another template"
            )
        answer = until[len(before) :]
        # White space after an end token is not part of an answer.
        if answer.rstrip().endswith(tuple(tokenizer.all_special_tokens)):
            answer = answer.rstrip()
        spans.append((len(before), len(before) + len(answer)))
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids = cast("list[int]", encoded["input_ids"])
    offsets = cast("list[tuple[int, int]]", encoded["offset_mapping"])
    in_answer = [
        any(first < end and last > start for start, end in spans) for first, last in offsets
    ]
    labels = [token if yes else NO_LABEL for token, yes in zip(ids, in_answer, strict=True)]
    return ids, [NO_LABEL, *labels[1:]] if labels else labels


def _apply_template(tokenizer: Any, chat: Chat, row: int, *, start_answer: bool = False) -> str:
    from jinja2 import TemplateError

    try:
        return tokenizer.apply_chat_template(
            list(chat), tokenize=False, add_generation_prompt=start_answer, date_string=_FIXED_DATE
        )
    except (TemplateError, KeyError, IndexError, TypeError) as error:
        raise DataError(f"row {row}: the chat template rejects it: {error}") from error


@dataclass(frozen=True)
class _Language(Task):
    """A task that predicts tokens; the primary metric is perplexity, and lower is better."""

    answer_kind: ClassVar[AnswerKind] = "tokens"
    primary: ClassVar[str] = "perplexity"
    higher_is_better: ClassVar[bool] = False

    def _probabilities(self, logits: Tensor) -> Tensor | None:
        # They would need the size of the vocabulary for each token.
        return None

    def _batch_loss(
        self, model: nn.Module, inputs: Mapping[str, Any], labels: Tensor, places: LabelledPlaces
    ) -> Tensor:
        if (head := find_head(model, inputs, places.shape)) is None:
            return super()._batch_loss(model, inputs, labels, places)
        hidden = places.select(head_inputs(model, inputs, head))
        return chunked_cross_entropy(head, hidden, labels) if len(labels) else hidden.sum() * 0.0

    def _answers(
        self, model: nn.Module, inputs: Mapping[str, Any], labels: Tensor, places: LabelledPlaces
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        if (head := find_head(model, inputs, places.shape)) is None:
            return super()._answers(model, inputs, labels, places)
        hidden = places.select(head_inputs(model, inputs, head))
        predicted, losses = torch.empty_like(labels), hidden.new_empty(len(labels)).float()
        for rows in chunk_rows(head, len(labels)):
            logits = head.forward(hidden[rows]).float()
            predicted[rows] = self._predict(logits)
            losses[rows] = self._loss_per_answer(logits, labels[rows])
        return predicted, None, losses

    def predict(self, model: nn.Module, rows: Examples, *, batch_size: int) -> Predictions:
        """Return predicted tokens; also answers in `texts`, if an extra metric takes these.

        An answer is generated greedily, up to `max_length` tokens with its prompt, and ends with
        the tokenizer's end token. Raises DataError without `generate`, or if conversations are
        packed.
        """
        predictions = super().predict(model, rows, batch_size=batch_size)
        if not any(metric.takes == "texts" for metric in self.extra_metrics):
            return predictions
        if self.packing or getattr(model, "generate", None) is None:
            reason = "packed" if self.packing else f"of a {type(model).__name__} without generate"
            raise DataError(f"a metric of texts cannot be used, since examples are {reason}")
        with eval_mode(model), torch.no_grad():
            tokenizer, limit = self.tokenizer, self._max_tokens(self.tokenizer)
            batches = (rows.batch(torch.tensor([i])) for i in range(len(rows)))
            texts = [generate_answer(model, tokenizer, batch, limit) for batch in batches]
        return replace(predictions, texts=np.array(texts, dtype=object))

    def _task_scores(self, loss: float, predictions: Predictions) -> dict[str, float]:
        scores = compute_metrics([METRICS["accuracy"]], predictions)
        return {**scores, "perplexity": exp(min(loss, 700.0))}


@dataclass(frozen=True)
class _BlockTask(_Language):
    """A language task on texts that are cut into blocks of at most `max_length` tokens."""

    def _blocks(
        self, table: Dataset, tokenizer: Any, *, special_tokens: bool, end: int | None
    ) -> RaggedArray:
        texts, rows = self._text_column(table, self.columns[0]), list[list[int]]()
        for chunk in chunk_slices(len(table)):
            rows += tokenizer(texts[chunk], add_special_tokens=special_tokens, verbose=False)[
                "input_ids"
            ]
        require_tokens(rows, tokenizer, self.columns[0])
        blocks, limit = list[list[int]](), self._max_tokens(tokenizer)
        for row in rows if end is None else [[*row, end] for row in rows]:
            # A last block of one token has nothing to predict.
            stop = 1 if self.one_example_per_row else max(len(row) - 1, 1)
            blocks += [row[start : start + limit] for start in range(0, stop, limit)]
        return RaggedArray.from_lists(blocks)


@final
class CausalLanguage(_BlockTask):
    """Prediction of the next token."""

    def prepare(self, table: Dataset) -> TokenSequences:
        tokenizer = self.tokenizer
        end = tokenizer.eos_token_id
        end = tokenizer.sep_token_id if end is None else end
        blocks = self._blocks(table, tokenizer, special_tokens=False, end=end)
        return TokenSequences(blocks, pad_token_id(tokenizer), _next_token_labels(blocks))

    def _made_up(self, draw: np.random.Generator) -> TokenSequences:
        ids = self._made_up_tokens(draw)
        return TokenSequences(ids, pad_token_id(self.tokenizer), _next_token_labels(ids))

    def _targets(self, labels: Tensor) -> Tensor:
        return _shift_left(labels)


@final
class MaskedLanguage(_BlockTask):
    """Prediction of masked tokens."""

    def prepare(self, table: Dataset) -> MaskedTokens:
        return self._masked(self._blocks(table, self.tokenizer, special_tokens=True, end=None))

    def _made_up(self, draw: np.random.Generator) -> MaskedTokens:
        return self._masked(self._made_up_tokens(draw))

    def _masked(self, blocks: RaggedArray) -> MaskedTokens:
        tokenizer = self.tokenizer
        if tokenizer.mask_token_id is None:
            raise DataError(f"the tokenizer of {self.source!r} has no mask token: use causal-lm")
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
    generates: ClassVar[bool] = True

    def prepare(self, table: Dataset) -> TokenSequences:
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

    def _made_up(self, draw: np.random.Generator) -> TokenSequences:
        ids = self._made_up_tokens(draw)
        return TokenSequences(ids, pad_token_id(self.tokenizer), ids, seq2seq=True)

    def _model_inputs(
        self, model: nn.Module, inputs: dict[str, Tensor], labels: Tensor
    ) -> Mapping[str, Any]:
        decoder_ids = cast("Any", model).prepare_decoder_input_ids_from_labels(labels)
        return {**inputs, "decoder_input_ids": decoder_ids}


@final
class Instruction(_Language):
    """A task that predicts the assistant's messages in conversations; prompts have no loss.

    The input is one column of messages, or two columns, prompt and response.
    """

    input_columns: ClassVar[tuple[int, int]] = (1, 2)
    generates: ClassVar[bool] = True

    @property
    def notes(self) -> tuple[str, ...]:
        """A note if the tokenizer has no chat template of its own."""
        plain = self.tokenizer.chat_template == PLAIN_TEMPLATE
        return (NO_TEMPLATE_NOTE.format(self.source),) if plain else ()

    def _prepare_tokenizer(self, tokenizer: Any) -> Any:
        return ensure_chat_template(tokenizer)

    def prepare(self, table: Dataset) -> TokenSequences | PackedSequences:
        """Return the conversations as tokens, with labels in the assistant's messages.

        Raises DataError if a conversation has no token of an answer within `max_length`.
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

    def _made_up(self, draw: np.random.Generator) -> TokenSequences:
        ids = self._made_up_tokens(draw)
        return TokenSequences(ids, pad_token_id(self.tokenizer), _next_token_labels(ids))

    def _model_inputs(
        self, model: nn.Module, inputs: dict[str, Tensor], labels: Tensor
    ) -> Mapping[str, Any]:
        """Turn off the cache for packed conversations: with it, transformers would mix them."""
        return {**inputs, "use_cache": False} if self.packing else inputs

    def _targets(self, labels: Tensor) -> Tensor:
        return _shift_left(labels)


def _next_token_labels(ids: RaggedArray) -> RaggedArray:
    """Return the tokens as labels, but for the first of each row, which nothing predicts."""
    labels = ids.flat.clone()
    labels[ids.starts[:-1]] = NO_LABEL
    return RaggedArray(labels, ids.starts)


def _shift_left(labels: Tensor) -> Tensor:
    """Return the label of the next token at each token; NO_LABEL at the last."""
    last = torch.full_like(labels[:, :1], NO_LABEL)
    return torch.cat([labels[:, 1:], last], 1)


_HALF = 4
"""Tokens in each half of a test sequence."""
_TOLERANCE = 1e-5
"""Largest change of logits by rounding, relative to the largest logit."""
_CAUSAL_TASKS = ("causal-lm", "instruction")
"""Tasks that predict the next token."""


def require_attention_mask(model: nn.Module, kind: str) -> None:
    """Raise DataError if a model's attention does not fit the `kind` of a language task.

    Runs the model on sequences with the same first half and different second halves. A model for a
    causal task must give the same logits for the first half, a model for masked-lm different ones,
    unless its logits do not depend on the input.
    """
    if kind not in (*_CAUSAL_TASKS, "masked-lm"):
        return
    first, second, third = _test_halves(model)
    sequences = [first + second, third + second, first + third]
    logits = _logits(model, {"input_ids": sequences, "attention_mask": [[1] * 2 * _HALF] * 3})
    base, other_start, other_end = logits[:, :_HALF]
    scale = max(float(base.abs().max()), 1e-30)
    if float((base - other_start).abs().max()) <= _TOLERANCE * scale:
        return
    change = float((base - other_end).abs().max()) / scale
    if kind in _CAUSAL_TASKS and change > _TOLERANCE:
        raise DataError(
            f"{type(model).__name__} sees the tokens that {kind} asks it to predict: use a "
            "decoder, model.config with is_decoder = true, or the task masked-lm"
        )
    if kind == "masked-lm" and change < _TOLERANCE / 10:
        raise DataError(
            f"{type(model).__name__} does not see the tokens after a masked token: use an encoder, "
            "or the task causal-lm"
        )


def require_packing_support(model: nn.Module) -> None:
    """Raise DataError if a model's attention mixes several texts packed in one sequence.

    The logits of the second of two packed texts must equal those of this text alone.
    """
    first, second, third = _test_halves(model)
    positions = [*range(_HALF)]
    packed = {"input_ids": [first + second, third + second], "position_ids": [positions * 2] * 2}
    single = {"input_ids": [second], "position_ids": [positions]}
    try:
        (after_first, after_third), alone = (
            _logits(model, inputs, cache=False)[:, -_HALF:] for inputs in (packed, single)
        )
        scale = float(alone.abs().max().clamp(min=1e-30))
        change = float((after_first - after_third).abs().max()) / scale
        difference = float((after_first - alone).abs().max()) / scale
    except TypeError:  # the model has no argument position_ids
        change, difference = 1.0, 1.0
    # A text alone is summed in another order than in a longer sequence; half precision shows it.
    precision = torch.finfo(cast("Any", model).get_input_embeddings().weight.dtype).eps
    if change > _TOLERANCE or difference > max(_TOLERANCE, 4 * precision):
        raise DataError(
            f"{type(model).__name__} mixes packed conversations: set packing = false, or use a "
            "model whose attention follows position_ids, such as llama or gpt2"
        )


def _logits(model: nn.Module, inputs: dict[str, list[list[int]]], *, cache: bool = True) -> Tensor:
    device = model_device(model)
    tensors = {name: torch.tensor(values, device=device) for name, values in inputs.items()}
    with eval_mode(model), torch.no_grad():
        output: Any = model(**tensors) if cache else model(**tensors, use_cache=False)
    return cast("Tensor", output if isinstance(output, Tensor) else output.logits).float()


def _test_halves(model: nn.Module) -> list[list[int]]:
    """Return three lists of _HALF token ids, none the padding id, with no id in common."""
    hf_model, halves = cast("Any", model), list[list[int]]()
    pad, size = hf_model.config.pad_token_id, len(hf_model.get_input_embeddings().weight)
    tokens = [token for token in range(size) if token != pad][-3 * _HALF :]
    for start in range(3):
        chosen = tokens[start::3] or tokens[:1]
        halves.append([chosen[index % len(chosen)] for index in range(_HALF)])
    return halves


def pack_sequences(sizes: Sequence[int], limit: int) -> list[list[int]]:
    """Group consecutive sequences, given by their `sizes` in tokens, into packs of indices.

    A pack has at most `limit` tokens, or is a single longer sequence.

    >>> pack_sequences([3, 4, 2, 9], 8)
    [[0, 1], [2], [3]]
    """
    packs, room = list[list[int]](), 0
    for index, size in enumerate(sizes):
        if size > room:
            packs.append([])
            room = limit
        packs[-1].append(index)
        room -= size
    return packs
