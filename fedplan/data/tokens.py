# SPDX-License-Identifier: Apache-2.0
"""Tokens: texts as rows of numbers, how long ones are cut, and the refusal of empty ones."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from fedplan.data.examples import NO_LABEL
from fedplan.data.tables import DataError

Each = TypeVar("Each")


def pad_of(tokenizer: Any) -> int:
    """What a tokenizer fills up with; under the attention mask any number will do."""
    return 0 if tokenizer.pad_token_id is None else int(tokenizer.pad_token_id)


def opening(text: str, words: int) -> str:
    """The first words of a text: to tokenise what will be cut off takes most of the time.

    Nearly every word is a token or more, so twice as many words as tokens are asked for lose none.
    """
    found = re.match(rf"(?:\s*\S+){{0,{words}}}", text)
    return found[0] if found else text


def require_tokens(ids: Sequence[Sequence[int]], tokenizer: Any, column: str) -> None:
    """Refuse rows without a token of their own: a model would learn from nothing."""
    frame = set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}
    empty = sum(all(token in frame for token in row) for row in ids)
    if empty:
        raise DataError(
            f"column {column!r} has a text without a token in {empty} of {len(ids)} rows: take "
            "these rows out of the table"
        )


def blocks(rows: Iterable[Sequence[int]], limit: int, *, single: bool) -> list[Sequence[int]]:
    """Each row's tokens in blocks of its own, so that no row moves what another one says.

    A last block of one token has nothing to predict, so it is left out unless it is all that there
    is. With `single`, a row is its first block.
    """
    found = list[Sequence[int]]()
    for row in rows:
        starts = range(0, 1 if single else max(len(row) - 1, 1), limit)
        found += [row[start : start + limit] for start in starts]
    return found


def packs(sizes: Sequence[int], limit: int) -> list[list[int]]:
    """Which rows stand together in one of at most `limit` tokens, in the table's order.

    >>> packs([3, 4, 2, 9], 8)
    [[0, 1], [2], [3]]
    """
    found, room = list[list[int]](), 0
    for row, size in enumerate(sizes):
        if size > room:
            found.append([])
            room = limit
        found[-1].append(row)
        room -= size
    return found


def at_first_tokens(words: Sequence[int | None], classes: Sequence[int]) -> list[int]:
    """A word's class at its first token, and none at the others."""
    before = [None, *words]
    return [
        NO_LABEL if word is None or word == last else classes[word]
        for word, last in zip(words, before, strict=False)
    ]


def cut(flat: Iterable[Each], sizes: Sequence[int]) -> list[list[Each]]:
    """A list in pieces of these sizes."""
    rest = iter(flat)
    return [[next(rest) for _ in range(size)] for size in sizes]
