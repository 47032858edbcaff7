# SPDX-License-Identifier: Apache-2.0
"""Conversations: read them from tables, and tokenize them with labels on the answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

from fedplan.data.examples import NO_LABEL, chunk_slices
from fedplan.data.tables import DataError, column_values, select_rows

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
    """Yield the conversation of each row of a table, in order; reads 1000 rows at a time.

    `columns` is one column with lists of messages, or two columns, prompt and response. Raises
    DataError if a cell is empty or not of this form.
    """
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
    """Return the messages in a table's cell, without fields that are None.

    Raises DataError, naming the `column`, if the cell is no list of messages with role and content.
    """
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
    NO_LABEL elsewhere. The first token has no label, since nothing precedes it. The tokenizer must
    be fast and have a chat template (`ensure_chat_template`). Raises DataError, with the number
    `row`, if the chat template fails, or renders a message differently when another one follows.
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
    """Render a conversation with the tokenizer's chat template, and return the text.

    With `start_answer` the text ends with the opening of an assistant's message. Raises DataError,
    with the number `row`, if the template fails.
    """
    from jinja2 import TemplateError

    try:
        return tokenizer.apply_chat_template(
            list(chat), tokenize=False, add_generation_prompt=start_answer, date_string=_FIXED_DATE
        )
    except (TemplateError, KeyError, IndexError, TypeError) as error:
        raise DataError(f"row {row}: the chat template rejects it: {error}") from error
