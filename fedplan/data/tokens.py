# SPDX-License-Identifier: Apache-2.0
"""Helpers for lists of tokens: blocks, packing, labels of words, and a check for empty texts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from fedplan.data.examples import NO_LABEL
from fedplan.data.tables import DataError

T = TypeVar("T")


def pad_token_id(tokenizer: Any) -> int:
    """Return a tokenizer's padding token; 0 if it has none, since the attention mask hides it."""
    return 0 if tokenizer.pad_token_id is None else int(tokenizer.pad_token_id)


def first_words(text: str, max_words: int) -> str:
    """Return a text cut after `max_words` words, to save the time of tokenizing the rest.

    Nearly every word has one token or more, so twice as many words as tokens are enough.
    """
    match = re.match(rf"(?:\s*\S+){{0,{max_words}}}", text)
    return match[0] if match else text


def require_tokens(ids: Sequence[Sequence[int]], tokenizer: Any, column: str) -> None:
    """Raise DataError if a row of token `ids` is empty or has only special tokens.

    The tokenizer's unknown token does not count as special. `column` is for the message.
    """
    special = set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}
    empty = sum(all(token in special for token in row) for row in ids)
    if empty:
        raise DataError(
            f"column {column!r} has texts without tokens in {empty} of {len(ids)} rows: remove "
            "these rows from the table"
        )


def token_blocks(
    rows: Iterable[Sequence[int]], limit: int, *, one_block_per_row: bool
) -> list[Sequence[int]]:
    """Cut the tokens of each row into blocks of `limit` tokens; no block spans two rows.

    A last block of one token has nothing to predict, and is left out if the row has other blocks.
    With `one_block_per_row`, only the first block of each row is returned.
    """
    blocks = list[Sequence[int]]()
    for row in rows:
        starts = range(0, 1 if one_block_per_row else max(len(row) - 1, 1), limit)
        blocks += [row[start : start + limit] for start in starts]
    return blocks


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


def label_first_tokens(words: Sequence[int | None], classes: Sequence[int]) -> list[int]:
    """Return a label for each token: the class of a word at the word's first token, else NO_LABEL.

    `words` has the index of each token's word, None for special tokens; `classes` is by word.
    """
    previous_words = [None, *words]
    return [
        NO_LABEL if word is None or word == previous else classes[word]
        for word, previous in zip(words, previous_words, strict=False)
    ]


def split_by_sizes(flat: Iterable[T], sizes: Sequence[int]) -> list[list[T]]:
    """Split a flat sequence into consecutive lists of these sizes."""
    items = iter(flat)
    return [[next(items) for _ in range(size)] for size in sizes]
