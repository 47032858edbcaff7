# SPDX-License-Identifier: Apache-2.0
"""Infer the schema of a table: kinds of columns, input, label and client columns, and splits."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from fedplan.data.tables import DataError, class_names, label_text, load_table
from fedplan.models.catalog import is_hub_id, strip_hub_prefix

if TYPE_CHECKING:
    from datasets import Dataset

ColumnKind = Literal["image", "text", "class", "number", "words", "conversation", "other"]
"""Inferred content of a column; `words` are lists of words."""
SAMPLED_ROWS = 2000
"""Rows that are read to infer the kinds of columns."""
MAX_CLASSES = 200
"""The most distinct values of a column of classes."""
INPUT_NAMES = (
    *("text", "sentence", "review", "content", "body", "image", "picture", "img", "pixels", "x"),
)
LABEL_NAMES = (
    *("label", "labels", "class", "target", "category", "sentiment", "diagnosis", "digit", "tags"),
    *("rating", "stars", "score", "y"),
)
CLIENT_NAMES = (
    *("client", "site", "hospital", "clinic", "institution", "centre", "center", "ward"),
    *("user", "user_id", "author", "speaker", "device", "writer", "company", "school", "source"),
)
"""Usual names of input, label and client columns, the most telling first."""
CONVERSATION_COLUMNS = (("prompt", "response"), ("instruction", "output"), ("question", "answer"))
"""Names of two columns that form a conversation."""
TRAIN_SPLITS, TEST_SPLITS = ("train", "training"), ("test", "validation", "valid", "dev")


@dataclass(frozen=True)
class ColumnSchema:
    """Name and inferred kind of a column, and facts about its sampled cells.

    `values` are the distinct values (of lists: items) as texts; empty if a column without lists has
    over MAX_CLASSES. `distinct` is the number of distinct values, `missing` the number of cells
    without a value, and `length` the 95th percentile of words per cell; 0 if not measured.
    """

    name: str
    kind: ColumnKind
    values: tuple[str, ...] = ()
    missing: int = 0
    length: int = 0
    distinct: int = 0


@dataclass(frozen=True)
class TableSchema:
    """The inferred schema of the table at `path`: number of rows, columns, and splits.

    `train` and `test` are names of splits, or "". The methods choose columns for a study.
    """

    path: str
    rows: int
    columns: tuple[ColumnSchema, ...]
    train: str = ""
    test: str = ""

    def column(self, name: str) -> ColumnSchema:
        """Return a column by its name; raise DataError if there is none."""
        for column in self.columns:
            if column.name == name:
                return column
        names = ", ".join(column.name for column in self.columns)
        raise DataError(f"{self.path} has no column {name!r}: it has {names}")

    def input_columns(self) -> str:
        """Return the name of the likely input column, or two names as "prompt response".

        Raises DataError if no column looks like an input.
        """
        names = {column.name for column in self.columns}
        for pair in CONVERSATION_COLUMNS:
            if names >= {*pair}:
                return " ".join(pair)
        kinds = ("conversation", "words", "image", "text")
        name = _first_of_kinds(self.columns, INPUT_NAMES, kinds)
        if not name:
            columns = ", ".join(f"{column.name} ({column.kind})" for column in self.columns)
            raise DataError(
                f"{self.path} has no column that looks like texts or images: it has {columns}; "
                "name the input column with --input"
            )
        return name

    def label_column(self, beside: Sequence[str]) -> str:
        """Return the name of the likely label column, not one of `beside`; "" if there is none."""
        columns = [column for column in self.columns if column.name not in beside]
        by_name = _find_by_name(columns, LABEL_NAMES)
        classes = [column for column in columns if 2 <= len(column.values) <= MAX_CLASSES]
        return by_name or _first_of_kinds(classes, (), ("class",))

    def client_column(self, beside: Sequence[str]) -> str:
        """Return the name of a likely client column, not one of `beside`; "" if there is none."""
        columns = [column for column in self.columns if column.name not in beside]
        most = min(self.rows, SAMPLED_ROWS) // 2
        plausible = [column for column in columns if 2 <= column.distinct <= most]
        return _find_by_name(plausible, CLIENT_NAMES)


def infer_schema(path: str) -> TableSchema:
    """Infer the schema of a table (a path or Hub id for `load_table`) from its first 2000 rows.

    Of a table with splits, only the training split is read. Raises DataError if the table cannot be
    read, or has splits but none for training.
    """
    splits = split_names(path)
    train, test = _first_present(TRAIN_SPLITS, splits), _first_present(TEST_SPLITS, splits)
    if splits and not train:
        raise DataError(
            f"{path} has the splits {', '.join(splits)}, but none for training: name one train"
        )
    table = load_table(path, split=train)
    sample = table.select(range(min(SAMPLED_ROWS, len(table))))
    names = [name for name in table.column_names if name != "split"]
    columns = tuple(_infer_column(sample, name) for name in names)
    return TableSchema(path, len(table), columns, train, test)


def split_names(path: str) -> list[str]:
    """Return the names of a table's splits; empty without splits. `path` is as in `load_table`.

    Of files, only TRAIN_SPLITS and TEST_SPLITS are recognized. Raises DataError if the table or the
    Hub cannot be read.
    """
    place = Path(path)
    if is_hub_id(path) and not place.exists():
        import datasets

        name = strip_hub_prefix(path)
        try:
            return [str(split) for split in datasets.get_dataset_split_names(name)]
        except (OSError, ValueError, RuntimeError) as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise DataError(f"{name!r} cannot be loaded from the Hub: {reason}") from error
    if (listing := place / "dataset_dict.json").is_file():
        return [str(name) for name in json.loads(listing.read_text(encoding="utf-8"))["splits"]]
    usual = (*TRAIN_SPLITS, *TEST_SPLITS)
    if place.is_dir():
        stems = [file.stem for file in sorted(place.iterdir())]
        patterns = {name: re.compile(rf"{name}(?![a-zA-Z])") for name in usual}
        return [name for name, pattern in patterns.items() if any(map(pattern.match, stems))]
    if place.suffix == ".npz" and place.is_file():
        import numpy as np

        with np.load(place, allow_pickle=False) as file:
            suffixes = [name.rpartition("_")[2] for name in file.files]
        return [name for name in usual if name in suffixes]
    table = load_table(path)
    if "split" not in table.column_names:
        return []
    return sorted({str(value) for value in cast("list[Any]", table["split"][:])})


def _first_present(names: Iterable[str], present: Sequence[str]) -> str:
    return next((name for name in names if name in present), "")


def _find_by_name(columns: Iterable[ColumnSchema], names: Sequence[str]) -> str:
    """Return the column with the first of some lower-case names, ignoring case; "" if none."""
    by_lower_name = {column.name.lower(): column.name for column in columns}
    return next((by_lower_name[name] for name in names if name in by_lower_name), "")


def _first_of_kinds(
    columns: Sequence[ColumnSchema], names: Sequence[str], kinds: Sequence[ColumnKind]
) -> str:
    """Return the name of a column of the first kind that is present; "" if none is."""
    for kind in kinds:
        of_kind = [column for column in columns if column.kind == kind]
        if of_kind:
            longest = max(of_kind, key=lambda column: column.length)
            return _find_by_name(of_kind, names) or longest.name
    return ""


def _infer_column(table: Dataset, name: str) -> ColumnSchema:
    """Infer the schema of the column `name` from its type and all cells of a table."""
    import datasets

    feature = cast("Any", table.features)[name]
    arrays = datasets.Image | datasets.Array2D | datasets.Array3D
    if isinstance(feature, arrays) or str(getattr(feature, "dtype", "")).endswith("binary"):
        return ColumnSchema(name, "image")
    cells = [cell for cell in cast("list[Any]", table[name][:]) if cell is not None]
    missing = len(table) - len(cells)
    if not cells:
        return ColumnSchema(name, "other", missing=missing)
    if isinstance(cells[0], dict):
        return ColumnSchema(name, "image" if "bytes" in cells[0] else "other", missing=missing)
    if isinstance(cells[0], list):
        items = [item for cell in cells for item in cell]
        if items and isinstance(items[0], dict):
            return ColumnSchema(name, "conversation", missing=missing)
        values = tuple(sorted({str(item) for item in items[: SAMPLED_ROWS * 10]}))
        words = bool(items) and isinstance(items[0], str) and len(values) > MAX_CLASSES // 4
        return ColumnSchema(name, "words" if words else "class", values, missing)
    texts, names = [label_text(cell) for cell in cells], class_names(table, name)
    values = tuple(names or sorted(set(texts)))
    length = sorted(len(text.split()) for text in texts)[int(0.95 * (len(texts) - 1))]
    if (not names and len(values) > max(2, len(texts) // 2)) or len(values) > MAX_CLASSES:
        kind: ColumnKind = "number" if all(map(_is_number, texts)) else "text"
        few_values = values if len(values) <= MAX_CLASSES else ()
        return ColumnSchema(name, kind, few_values, missing, length, len(values))
    fractional = any(_is_number(text) and not text.lstrip("-").isdecimal() for text in texts)
    kind = "number" if fractional else "text" if length > 5 else "class"
    return ColumnSchema(name, kind, values, missing, length, len(values))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
