# SPDX-License-Identifier: Apache-2.0
"""Chats: conversations as tokens, by a tokenizer's chat template, and which of them are answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

from fedplan.data.examples import NO_LABEL, pieces
from fedplan.data.tables import DataError, rows, values

if TYPE_CHECKING:
    from datasets import Dataset

Chat = Sequence[dict[str, Any]]
"""Messages, each with a role and a content."""

PLAIN = (
    "{% for message in messages %}"
    "{{ '### ' + message['role'] + ':\n' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token or sep_token }}{% endif %}"
    "{{ '\n\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '### assistant:\n' }}{% endif %}"
)
"""The template of a tokenizer that has none: a heading for each role, an end after each answer."""
NO_TEMPLATE = (
    "The tokenizer of {} has no chat template, so conversations are written plainly, as "
    "'### user:' and '### assistant:'."
)
_DAY = "26 Jul 2024"
"""What templates that write down today's date are told: rows must not change overnight."""


def templated(tokenizer: Any) -> Any:
    """The tokenizer, with the plain template if it has none of its own."""
    if not tokenizer.is_fast:
        raise DataError(
            f"{type(tokenizer).__name__} does not say where its tokens stand in a text, so answers "
            "cannot be told from questions: take a tokenizer with a tokenizer.json"
        )
    if not tokenizer.chat_template:
        if not (tokenizer.eos_token or tokenizer.sep_token):
            raise DataError(
                "the tokenizer has no chat template and no end token, so that no answer would "
                "end: give it one of them"
            )
        tokenizer.chat_template = PLAIN
    return tokenizer


def conversations(table: Dataset, columns: Sequence[str]) -> Iterator[Chat]:
    """The conversation of each row, of one column of messages or of a prompt and a response."""
    for piece in pieces(len(table)):
        part = rows(table, range(*piece.indices(len(table))))
        held = [values(part, column) for column in columns]
        for number, row in enumerate(zip(*held, strict=True), piece.start):
            yield _pair(row, columns, number) if len(row) == 2 else _messages(row[0], columns[0])


def _pair(row: tuple[Any, ...], columns: Sequence[str], number: int) -> Chat:
    for column, text in zip(columns, row, strict=True):
        if not isinstance(text, str) or not text.strip():
            raise DataError(f"row {number} of column {column!r} holds {text!r}, and no text")
    roles = zip(("user", "assistant"), row, strict=True)
    return [{"role": role, "content": text} for role, text in roles]


def _messages(said: Any, column: str) -> Chat:
    found = cast("list[Any]", said) if isinstance(said, list) else []
    for message in found or [said]:
        words = cast("dict[str, Any]", message) if isinstance(message, dict) else {}
        if not all(isinstance(words.get(word), str) for word in ("role", "content")):
            raise DataError(
                f"column {column!r} holds {str(message)[:80]!r}: a conversation is a list of "
                "messages, each with a role and a content; or name two columns, a prompt's and a "
                "response's"
            )
    # What one row has beside that, a table says of all, as missing.
    return [{word: each for word, each in m.items() if each is not None} for m in found]


def read(tokenizer: Any, chat: Chat, *, row: int) -> tuple[list[int], list[int]]:
    """A conversation's tokens, and the same where an answer stands; its end is part of an answer.

    The first token follows from nothing, and is no answer.
    """
    text, spans = _answers(tokenizer, chat, row)
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids = cast("list[int]", found["input_ids"])
    places = cast("list[tuple[int, int]]", found["offset_mapping"])
    inside = [any(first < end and last > start for start, end in spans) for first, last in places]
    labels = [token if yes else NO_LABEL for token, yes in zip(ids, inside, strict=True)]
    return ids, [NO_LABEL, *labels[1:]] if labels else labels


def _answers(tokenizer: Any, chat: Chat, row: int) -> tuple[str, list[tuple[int, int]]]:
    """A conversation as the template writes it, and from where to where each answer stands."""
    whole, spans = _written(tokenizer, chat, row), list[tuple[int, int]]()
    for number, message in enumerate(chat):
        if message["role"] != "assistant":
            continue
        asked = _written(tokenizer, chat[:number], row, answer=True)
        until = _written(tokenizer, chat[: number + 1], row)
        if not (whole.startswith(until) and until.startswith(asked)):
            raise DataError(
                f"row {row}: the chat template writes an earlier message in another way when a "
                "later one follows, so that it cannot be told which tokens are answers: keep one "
                "answer in each row, or give the tokenizer another template"
            )
        spans.append((len(asked), len(asked) + len(_ended(tokenizer, until[len(asked) :]))))
    return whole, spans


def _ended(tokenizer: Any, answer: str) -> str:
    """An answer up to its end token: the white space that a template has after it is none."""
    found = answer.rstrip()
    return found if found.endswith(tuple(tokenizer.all_special_tokens)) else answer


def _written(tokenizer: Any, chat: Chat, row: int, *, answer: bool = False) -> str:
    from jinja2 import TemplateError

    try:
        return tokenizer.apply_chat_template(
            list(chat), tokenize=False, add_generation_prompt=answer, date_string=_DAY
        )
    except (TemplateError, KeyError, IndexError, TypeError) as error:
        raise DataError(f"row {row}: the chat template refuses it: {error}") from error
