# SPDX-License-Identifier: Apache-2.0
"""Digests of a table's rows, and the random numbers that these determine.

Every random choice about a row depends on the row's content and the seed only, so that a row that
is added or removed does not change the choices for other rows.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from fedplan.data.tables import (
    ROW,
    class_names,
    number_text,
    require_column,
)

if TYPE_CHECKING:
    from datasets import Dataset


_CHUNK_ROWS = 1000
"""Rows that are in memory at a time."""


def example_digests(table: Dataset, columns: Iterable[str] = ()) -> list[bytes]:
    """Return a SHA-256 digest of each row of a table, over some columns (default: all).

    Numbers are hashed as text and missing values are skipped, so that neither a file's types nor
    other rows change a row's digest. Raises DataError for an unknown column.
    """
    import datasets

    arrays = datasets.Array2D | datasets.Array3D | datasets.Array4D
    hashers = [hashlib.sha256() for _ in range(len(table))]
    for name in sorted(set(columns) or {*table.column_names} - {ROW}):
        require_column(table, name)
        feature, labels = cast("Any", table.features)[name], class_names(table, name)
        column = table.select_columns([name])
        if isinstance(feature, datasets.Image):
            column = column.cast_column(name, datasets.Image(decode=False))
        elif isinstance(feature, arrays):
            column = column.with_format("numpy")
        for start in range(0, len(table), _CHUNK_ROWS):
            values = cast("dict[str, Any]", column[start : start + _CHUNK_ROWS])[name]
            for row, cell in enumerate(values, start):
                value = _json_value(_label_name(cell, labels))
                if value is not None:
                    hashers[row].update(json.dumps([name, value], sort_keys=True).encode())
    return [hasher.digest() for hasher in hashers]


def group_digests(table: Dataset, group: str, alone: Sequence[bytes]) -> list[bytes]:
    """Return a digest of each row's value in the column `group`; equal for rows of one group.

    A row without a value has its digest in `alone`. Raises DataError for an unknown column.
    """
    digests = example_digests(table, [group])
    cells = cast("list[Any]", table[group][:])
    rows = zip(cells, digests, alone, strict=True)
    return [digest if cell is not None else own for cell, digest, own in rows]


def make_unique(digests: Sequence[bytes]) -> list[bytes]:
    """Return a different digest for each digest: its hash with the number of equal ones before.

    If one of k equal digests is removed, only the last of the k new digests disappears.
    """
    counts, unique = Counter[bytes](), list[bytes]()
    for digest in digests:
        unique.append(hashlib.sha256(digest + counts[digest].to_bytes(8)).digest())
        counts[digest] += 1
    return unique


def uniform_numbers(digests: Iterable[bytes], *words: str | int) -> np.ndarray:
    """Return a float64 in [0, 1) for each digest, determined by the digest and `words`.

    `words` name the random choice and its seed; other words give independent numbers.
    """
    name = "\x1f".join(f"{type(word).__name__}:{word}" for word in words)
    key = hashlib.sha256(name.encode()).digest()
    hashes = [hashlib.blake2b(digest, key=key, digest_size=8).digest() for digest in digests]
    # The first 53 of 64 bits are exact as a float, so that no number is 1.
    return (np.frombuffer(b"".join(hashes), ">u8") >> np.uint64(11)) * 2.0**-53


def _label_name(value: Any, labels: Sequence[str] | None) -> Any:
    if labels is None or value is None:
        return value
    if isinstance(value, list):
        return [_label_name(each, labels) for each in cast("list[Any]", value)]
    return labels[value] if 0 <= value < len(labels) else value


def _json_value(value: Any) -> Any:
    """Convert a cell to JSON values: numbers as text, bytes, images and arrays as digests.

    A list of over 16 numbers, or a nested list of numbers, is treated as an array. An image file
    that is given by its path is read.
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int | float):
        return number_text(value)
    if isinstance(value, bytes):
        return {"bytes": hashlib.sha256(value).hexdigest()}
    if isinstance(value, dict):
        fields = cast("dict[str, Any]", value)
        if fields.keys() == {"bytes", "path"}:  # an image, or its file
            path, content = fields["path"], fields["bytes"]
            return _json_value(Path(path).read_bytes() if content is None and path else content)
        return {name: _json_value(each) for name, each in fields.items() if each is not None}
    if isinstance(value, np.ndarray):
        return _array_digest(cast("np.ndarray", value))
    if not isinstance(value, list):
        return str(value)
    items = cast("list[Any]", value)
    first, as_array = items[0] if items else None, len(items) > 16
    while isinstance(first, list) and first:
        first, as_array = cast("list[Any]", first)[0], True
    if as_array and type(first) in (int, float):
        with suppress(TypeError, ValueError):  # different lengths, or missing values
            return _array_digest(np.array(items, dtype=np.float64))
    return [_json_value(item) for item in items]


def _array_digest(array: np.ndarray) -> Any:
    """Return {"array": [*shape, SHA-256]} of an array of numbers, the same for every dtype."""
    small = array.size and array.min() >= 0 and array.max() <= 255
    if small and (array.dtype.kind in "bu" or (array == np.floor(array)).all()):
        array = array.astype(np.uint8)
    else:
        array = array.astype(np.float64)
    digest = hashlib.sha256(array.tobytes()).hexdigest()
    return {"array": [*array.shape, digest]}
