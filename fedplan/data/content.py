# SPDX-License-Identifier: Apache-2.0
"""Content: what a row holds, as a digest, and the chances that follow from it.

Whatever is chosen about a row follows from its own content and the study's seed, and from nothing
else in the table: so a row that leaves a table, or joins it, changes nothing about the others.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from fedplan.data.tables import names_in, number_text, require_column

if TYPE_CHECKING:
    from datasets import Dataset

_PIECE = 1000
"""Rows that are looked at at a time: so many fit in memory."""


def contents(table: Dataset, columns: Iterable[str] = ()) -> list[bytes]:
    """A digest of what each row holds in some columns, or in all of them.

    A number is its text, and a column without a value is as one that is not there: neither the
    type of a file nor the other rows change what a row holds.
    """
    names = sorted(set(columns) or set(table.column_names))
    found = [hashlib.sha256() for _ in range(len(table))]
    for name in names:
        require_column(table, name)
        for row, plain in enumerate(_plain_column(table, name)):
            if plain is not None:
                found[row].update(json.dumps([name, plain], sort_keys=True).encode())
    return [each.digest() for each in found]


def told_apart(digests: Sequence[bytes]) -> list[bytes]:
    """The digests with equal ones numbered: of k equal rows, one less takes away the last number.

    Equal rows cannot be told apart by what they hold, so it does not matter which has which number.
    """
    seen, found = Counter[bytes](), list[bytes]()
    for digest in digests:
        found.append(hashlib.sha256(digest + seen[digest].to_bytes(8)).digest())
        seen[digest] += 1
    return found


def chances(digests: Iterable[bytes], *words: str | int) -> np.ndarray:
    """A number of [0, 1) for each row, from its digest and the words that name the choice."""
    name = "\x1f".join(f"{type(word).__name__}:{word}" for word in words)
    key = hashlib.sha256(name.encode()).digest()
    drawn = [hashlib.blake2b(digest, key=key, digest_size=8).digest() for digest in digests]
    # Of 64 bits the first 53 are exact as a float, so that no row gets a chance of 1.
    return (np.frombuffer(b"".join(drawn), ">u8") >> np.uint64(11)) * 2.0**-53


def _plain_column(table: Dataset, name: str) -> Iterable[Any]:
    import datasets

    feature = cast("Any", table.features)[name]
    if isinstance(feature, datasets.Image):
        table = table.cast_column(name, datasets.Image(decode=False))
    one, labels = table.select_columns([name]), names_in(table, name)
    arrays = isinstance(feature, datasets.Array2D | datasets.Array3D | datasets.Array4D)
    one = one.with_format("numpy") if arrays else one
    for start in range(0, len(table), _PIECE):
        for value in cast("dict[str, Any]", one[start : start + _PIECE])[name]:
            yield _plain(_named(value, labels))


def _named(value: Any, labels: Sequence[str] | None) -> Any:
    """A label, or the labels of single words, by their names where the column knows them."""
    if labels is None or value is None:
        return value
    if isinstance(value, list):
        return [_named(each, labels) for each in cast("list[Any]", value)]
    return labels[value] if 0 <= value < len(labels) else value


def _plain(value: Any) -> Any:
    """A value as JSON can write it: numbers as texts, bytes and arrays as digests."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int | float):
        return number_text(value)
    if isinstance(value, bytes):
        return {"bytes": hashlib.sha256(value).hexdigest()}
    if isinstance(value, dict):
        return _plain_object(cast("dict[str, Any]", value))
    if isinstance(value, np.ndarray):
        return _array(cast("np.ndarray", value))
    if isinstance(value, list):
        return _plain_list(cast("list[Any]", value))
    return str(value)


def _plain_object(held: dict[str, Any]) -> Any:
    """An object without what is missing in it; a picture is its bytes, whatever its file's name."""
    if held.keys() == {"bytes", "path"}:
        path, inside = held["path"], held["bytes"]
        return _plain(Path(path).read_bytes() if inside is None and path else inside)
    return {name: _plain(each) for name, each in held.items() if each is not None}


def _plain_list(held: list[Any]) -> Any:
    """A list; long ones of numbers, and lists of lists of them, as arrays, which is much faster."""
    first, long = held[0] if held else None, len(held) > 16
    while isinstance(first, list) and first:
        first, long = cast("list[Any]", first)[0], True
    if not long or type(first) not in (int, float):
        return [_plain(each) for each in held]
    try:
        return _array(np.array(held, dtype=np.float64))
    except (TypeError, ValueError):  # of different lengths, or with gaps
        return [_plain(each) for each in held]


def _array(array: np.ndarray) -> Any:
    """An array of numbers by its values, whatever type they are stored in."""
    small = array.size and array.min() >= 0 and array.max() <= 255
    if small and (array.dtype.kind in "bu" or (array == np.floor(array)).all()):
        array = array.astype(np.uint8)
    else:
        array = array.astype(np.float64)
    held = hashlib.sha256(array.tobytes()).hexdigest()
    return {"array": [*array.shape, held]}
