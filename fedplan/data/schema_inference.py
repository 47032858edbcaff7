# SPDX-License-Identifier: Apache-2.0
"""Infer the schema of a table: kinds of columns, input, label and client columns, and splits."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date
from typing import TYPE_CHECKING, Any, Literal, cast

from fedplan.data.tables import (
    IMAGE_FILE,
    TEST_SPLITS,
    TRAIN_SPLITS,
    DataError,
    class_names,
    label_text,
    load_table,
    missing_cells,
    split_names,
)

if TYPE_CHECKING:
    from datasets import Dataset

ColumnKind = Literal["image", "text", "class", "number", "date", "words", "conversation", "other"]
"""Inferred content of a column; `words` are lists of words."""
SAMPLED_ROWS = 2000
"""Rows that are read to infer the kinds of columns."""
MAX_CLASSES = 200
"""The most distinct values of a column of classes."""
MAX_WHOLE_NUMBERS = 30
"""The most distinct whole numbers of a column of classes; a column with more has numbers."""
INPUT_NAMES = (
    *("text", "sentence", "review", "content", "body", "image", "picture", "img", "pixels", "x"),
)
WORD_NAMES = ("words", "tokens")
LABEL_NAMES = ("label", "labels", "class", "target", "y")
LIKELY_LABEL_NAMES = (
    *("category", "sentiment", "diagnosis", "outcome", "digit", "tags", "findings", "rating"),
    *("stars", "score"),
)
CLIENT_NAMES = (
    *("client", "site", "hospital", "clinic", "institution", "centre", "center", "ward"),
    *("user", "user_id", "author", "speaker", "device", "writer", "company", "school", "source"),
)
GROUP_NAMES = (
    *("patient_id", "patient", "subject_id", "subject", "participant_id", "participant"),
    *("person_id", "person", "case_id", "mrn", "pid"),
)
"""Usual names of columns of inputs, words, labels, clients and groups, the most telling first."""
ID_NAME = re.compile(
    r"(.*[_ .-])?(id|ids|uuid|index|idx|nr|no|number|key|file|path)", re.IGNORECASE
)
"""Names of columns that number or name rows; none is a label."""
DATE_NAME = re.compile(r"(.*[_ .-])?(date|datum|time|timestamp|year|month|day)", re.IGNORECASE)
DATE = re.compile(
    r"\d{4}[-/.]\d{1,2}([-/.]\d{1,2})?([T ]\d{1,2}:\d{2}.*)?|\d{1,2}[-/.]\d{1,2}[-/.]\d{2,4}.*"
)
"""Dates as 2024-05-31, 31.5.2024 or 5/31/24, with a time perhaps."""
SEPARATORS = (";", "|", ",")
"""Texts that may stand between several labels of one cell."""
MAX_LABEL_WORDS = 4
"""The most words of a label among several in one cell."""
CONVERSATION_COLUMNS = (("prompt", "response"), ("instruction", "output"), ("question", "answer"))
"""Names of two columns that form a conversation."""


@dataclass(frozen=True)
class ColumnSchema:
    """Name and inferred kind of a column, and facts about its sampled cells.

    `values` are the distinct values (of lists: items) as texts; empty if a column without lists has
    over MAX_CLASSES. `distinct` counts distinct values, `missing` cells without a value, and
    `length` is the 95th percentile of words per cell; 0 if not measured. `common` is the share of
    the most frequent value of a column of classes. `separator`: text between labels, if cells seem
    to have several; then `values` are the single labels.
    """

    name: str
    kind: ColumnKind
    values: tuple[str, ...] = ()
    missing: int = 0
    length: int = 0
    distinct: int = 0
    lists: bool = False
    separator: str = ""
    common: float = 0.0

    @property
    def summary(self) -> str:
        """The column in words, as "ward (class, 3 values)"."""
        count = len(self.values) if self.kind == "class" else self.distinct
        return f"{self.name} ({self.kind}{f', {count} values' if count else ''})"


@dataclass(frozen=True)
class TableSchema:
    """The inferred schema of the table at `path`; `train` and `test` are names of splits, or ""."""

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
        columns = [column for column in self.columns if not column.separator]
        # Few different texts look like classes.
        named = [each for each in columns if each.kind == "class" and not each.lists]
        name = _first_of_kinds(columns, INPUT_NAMES, kinds) or _find_by_name(named, INPUT_NAMES)
        if not name:
            summaries = ", ".join(column.summary for column in self.columns)
            raise DataError(
                f"{self.path} has no column that looks like texts or images: it has {summaries}; "
                "name the input column with --input"
            )
        return name

    def label_column(self, beside: Sequence[str], *, lists: bool = False) -> str:
        """Return the name of the likely label column, not one of `beside`; "" if there is none.

        A usual name decides; else the only column of classes, or else of numbers. Dates, numbers of
        rows, clients and groups are no labels. `lists`: labels are lists, one for each word. Raises
        DataError with all candidates if there are several.
        """
        others = {*beside, self.client_column(beside), self.group_column(beside)}
        columns = [
            column
            for column in self.columns
            if column.name not in others
            and column.kind in ("class", "number")
            and (column.lists if lists else column.kind == "number" or len(column.values) >= 2)
            and not ID_NAME.fullmatch(column.name)
            and column.name.lower() not in GROUP_NAMES
        ]
        likely = [column for column in columns if column.name.lower() in LIKELY_LABEL_NAMES]
        classes = [column for column in columns if column.kind == "class"]
        if name := _find_by_name(columns, LABEL_NAMES):
            return name
        candidates = likely or classes or columns
        if len(candidates) > 1:
            listed = ", ".join(column.summary for column in candidates)
            lines = "".join(f"\n  --label {shlex.quote(each.name)}" for each in candidates)
            raise DataError(
                f"{self.path} has several columns that may be the label: {listed}; name one of "
                f"them:{lines}"
            )
        return candidates[0].name if candidates else ""

    def group_column(self, beside: Sequence[str]) -> str:
        """Return the name of a column such as patient_id, with equal values in several rows; "" if
        none."""
        rows = min(self.rows, SAMPLED_ROWS)
        repeated = [
            column
            for column in self.columns
            if column.name not in beside and 2 <= column.distinct < rows - column.missing
        ]
        return _find_by_name(repeated, GROUP_NAMES)

    def client_column(self, beside: Sequence[str]) -> str:
        """Return the name of a likely client column, not one of `beside`; "" if there is none."""
        columns = [column for column in self.columns if column.name not in beside]
        most = min(self.rows, SAMPLED_ROWS) // 2
        plausible = [column for column in columns if 2 <= column.distinct <= most]
        return _find_by_name(plausible, CLIENT_NAMES)


def infer_schema(path: str) -> TableSchema:
    """Infer the schema of a table (a path or Hub id for `load_table`) from its first 2000 rows.

    Of a table with splits, only the training split is read; DataError if there is none.
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


def _first_present(names: Iterable[str], present: Sequence[str]) -> str:
    return next((name for name in names if name in present), "")


def _find_by_name(columns: Iterable[ColumnSchema], names: Sequence[str]) -> str:
    """Return the column with the first of some lower-case names, ignoring case; "" if none."""
    by_lower_name = {column.name.lower(): column.name for column in columns}
    return next((by_lower_name[name] for name in names if name in by_lower_name), "")


def _first_of_kinds(
    columns: Sequence[ColumnSchema], names: Sequence[str], kinds: Sequence[ColumnKind]
) -> str:
    for kind in kinds:
        of_kind = [column for column in columns if column.kind == kind]
        if of_kind:
            longest = max(of_kind, key=lambda column: column.length)
            return _find_by_name(of_kind, names) or longest.name
    return ""


def _infer_column(table: Dataset, name: str) -> ColumnSchema:
    import datasets

    feature = cast("Any", table.features)[name]
    arrays = datasets.Image | datasets.Array2D | datasets.Array3D
    if isinstance(feature, arrays) or str(getattr(feature, "dtype", "")).endswith("binary"):
        return ColumnSchema(name, "image")
    missing_rows = missing_cells(table, name)
    missing = sum(missing_rows)
    cells = [
        cell
        for cell, is_missing in zip(cast("list[Any]", table[name][:]), missing_rows, strict=True)
        if not is_missing
    ]
    if not cells:
        return ColumnSchema(name, "other", missing=missing)
    if isinstance(cells[0], dict):
        return ColumnSchema(name, "image" if "bytes" in cells[0] else "other", missing=missing)
    if isinstance(cells[0], list):
        items = [item for cell in cells for item in cell]
        if items and isinstance(items[0], dict):
            return ColumnSchema(name, "conversation", missing=missing)
        values = tuple(sorted({str(item) for item in items[: SAMPLED_ROWS * 10]}))
        many = len(values) > MAX_CLASSES // 4 or name.lower() in WORD_NAMES
        words = bool(items) and isinstance(items[0], str) and many
        return ColumnSchema(name, "words" if words else "class", values, missing, lists=True)
    texts, names = [label_text(cell) for cell in cells], class_names(table, name)
    if all(map(IMAGE_FILE.fullmatch, texts)):
        return ColumnSchema(name, "image", missing=missing)
    values = tuple(names or sorted(set(texts)))
    length = sorted(len(text.split()) for text in texts)[int(0.95 * (len(texts) - 1))]
    dated = sum(DATE.fullmatch(text) is not None for text in texts) > 0.9 * len(texts)
    numeric = all(map(_is_number, texts))
    if isinstance(cells[0], date) or dated or (numeric and DATE_NAME.fullmatch(name)):
        return ColumnSchema(name, "date", (), missing, length, len(values))
    if not names and not numeric and (separator := _find_separator(texts)):
        labels = {label.strip() for text in texts for label in text.split(separator)} - {""}
        return ColumnSchema(
            name, "class", tuple(sorted(labels)), missing, length, len(values), separator=separator
        )
    is_class = names or len(values) <= max(2, len(texts) // 2)
    if numeric and not names and len(values) > MAX_WHOLE_NUMBERS:
        is_class = False
    if not is_class or len(values) > MAX_CLASSES:
        kind: ColumnKind = "number" if numeric else "text"
        few_values = values if len(values) <= MAX_CLASSES else ()
        return ColumnSchema(name, kind, few_values, missing, length, len(values))
    fractional = any(_is_number(text) and not text.lstrip("-").isdecimal() for text in texts)
    kind = "number" if fractional else "text" if length > 5 else "class"
    common = Counter(texts).most_common(1)[0][1] / len(texts)
    return ColumnSchema(name, kind, values, missing, length, len(values), common=common)


def _find_separator(texts: Sequence[str]) -> str:
    """Return the text between labels, if cells seem to have several labels each; else "".

    Cells then have few short labels in all, and some cells have one label that others have among
    several.
    """
    for separator in SEPARATORS:
        cells = [[each.strip() for each in text.split(separator)] for text in texts]
        several = [cell for cell in cells if len(cell) > 1]
        labels = {label for cell in cells for label in cell}
        alone = {cell[0] for cell in cells if len(cell) == 1}
        if (
            len(several) > 1
            and len(labels) <= min(MAX_CLASSES // 4, len(texts) // 2)
            and all(label and len(label.split()) <= MAX_LABEL_WORDS for label in labels)
            and any(label in alone for cell in several for label in cell)
        ):
            return separator
    return ""


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
