# SPDX-License-Identifier: Apache-2.0
"""Content digests of examples, and uniform numbers derived from them.

Every random choice about a row depends on the row's content and the seed only, so that a row that
is added or removed does not change the choices for other rows.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from fedplan.data.tables import class_names, number_text, require_column

if TYPE_CHECKING:
    from datasets import Dataset

_CHUNK_ROWS = 1000
"""Rows that are in memory at a time."""


def example_digests(table: Dataset, columns: Iterable[str] = ()) -> list[bytes]:
    """Return a SHA-256 of each row's content in some columns, by default in all.

    Numbers are hashed as text and missing values are skipped, so that neither a file's types nor
    other rows change a row's digest. Raises DataError for an unknown column.
    """
    names = sorted(set(columns) or set(table.column_names))
    hashers = [hashlib.sha256() for _ in range(len(table))]
    for name in names:
        require_column(table, name)
        for row, value in enumerate(_json_column(table, name)):
            if value is not None:
                hashers[row].update(json.dumps([name, value], sort_keys=True).encode())
    return [hasher.digest() for hasher in hashers]


def make_unique(digests: Sequence[bytes]) -> list[bytes]:
    """Return new digests that differ also for equal ones, by their count so far.

    If one of k equal digests is removed, the last of the k new ones disappears.
    """
    counts, unique = Counter[bytes](), list[bytes]()
    for digest in digests:
        unique.append(hashlib.sha256(digest + counts[digest].to_bytes(8)).digest())
        counts[digest] += 1
    return unique


def uniform_numbers(digests: Iterable[bytes], *words: str | int) -> np.ndarray:
    """Return a number in [0, 1) for each digest, determined by it and by the words of a choice."""
    name = "\x1f".join(f"{type(word).__name__}:{word}" for word in words)
    key = hashlib.sha256(name.encode()).digest()
    hashes = [hashlib.blake2b(digest, key=key, digest_size=8).digest() for digest in digests]
    # The first 53 of 64 bits are exact as a float, so that no number is 1.
    return (np.frombuffer(b"".join(hashes), ">u8") >> np.uint64(11)) * 2.0**-53


def _json_column(table: Dataset, name: str) -> Iterable[Any]:
    """Yield the values of a column as `_json_value`, images as bytes and labels by name."""
    import datasets

    feature = cast("Any", table.features)[name]
    if isinstance(feature, datasets.Image):
        table = table.cast_column(name, datasets.Image(decode=False))
    column, labels = table.select_columns([name]), class_names(table, name)
    arrays = isinstance(feature, datasets.Array2D | datasets.Array3D | datasets.Array4D)
    column = column.with_format("numpy") if arrays else column
    for start in range(0, len(table), _CHUNK_ROWS):
        for value in cast("dict[str, Any]", column[start : start + _CHUNK_ROWS])[name]:
            yield _json_value(_label_name(value, labels))


def _label_name(value: Any, labels: Sequence[str] | None) -> Any:
    """Return a label, or a list of labels, by name, if the column has names for its numbers."""
    if labels is None or value is None:
        return value
    if isinstance(value, list):
        return [_label_name(each, labels) for each in cast("list[Any]", value)]
    return labels[value] if 0 <= value < len(labels) else value


def _json_value(value: Any) -> Any:
    """Return a value for JSON: numbers as text, bytes and arrays as digests."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int | float):
        return number_text(value)
    if isinstance(value, bytes):
        return {"bytes": hashlib.sha256(value).hexdigest()}
    if isinstance(value, dict):
        return _json_object(cast("dict[str, Any]", value))
    if isinstance(value, np.ndarray):
        return _array_digest(cast("np.ndarray", value))
    if isinstance(value, list):
        return _json_list(cast("list[Any]", value))
    return str(value)


def _json_object(fields: dict[str, Any]) -> Any:
    """Return a dictionary for JSON without missing fields; an image file becomes its bytes."""
    if fields.keys() == {"bytes", "path"}:
        path, content = fields["path"], fields["bytes"]
        return _json_value(Path(path).read_bytes() if content is None and path else content)
    return {name: _json_value(value) for name, value in fields.items() if value is not None}


def _json_list(items: list[Any]) -> Any:
    """Return a list for JSON; a long or nested list of numbers becomes an array's digest."""
    first, as_array = items[0] if items else None, len(items) > 16
    while isinstance(first, list) and first:
        first, as_array = cast("list[Any]", first)[0], True
    if not as_array or type(first) not in (int, float):
        return [_json_value(item) for item in items]
    try:
        return _array_digest(np.array(items, dtype=np.float64))
    except (TypeError, ValueError):  # different lengths, or missing values
        return [_json_value(item) for item in items]


def _array_digest(array: np.ndarray) -> Any:
    """Return shape and SHA-256 of an array of numbers, the same for every dtype."""
    small = array.size and array.min() >= 0 and array.max() <= 255
    if small and (array.dtype.kind in "bu" or (array == np.floor(array)).all()):
        array = array.astype(np.uint8)
    else:
        array = array.astype(np.float64)
    digest = hashlib.sha256(array.tobytes()).hexdigest()
    return {"array": [*array.shape, digest]}
