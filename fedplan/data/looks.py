# SPDX-License-Identifier: Apache-2.0
"""Looks: what a table seems to hold: its input, its label, its clients and its splits."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from fedplan.data.tables import DataError, label_text, load, names_in
from fedplan.models.hub import bare, is_hub_id

if TYPE_CHECKING:
    from datasets import Dataset

Held = Literal["picture", "text", "class", "number", "words", "talk", "other"]
"""What the cells of a column seem to be."""
LOOKED = 2000
"""Rows that are looked at."""
FEW = 200
"""Values of a column, at most, that can be classes."""
INPUTS = ("text", "sentence", "review", "content", "body", "image", "picture", "img", "pixels", "x")
LABELS = (
    *("label", "labels", "class", "target", "category", "sentiment", "diagnosis", "digit", "tags"),
    *("rating", "stars", "score", "y"),
)
CLIENTS = (
    *("client", "site", "hospital", "clinic", "institution", "centre", "center", "ward"),
    *("user", "user_id", "author", "speaker", "device", "writer", "company", "school", "source"),
)
PAIRS = (("prompt", "response"), ("instruction", "output"), ("question", "answer"))
"""Two columns that make a conversation."""
TRAIN, TEST = ("train", "training"), ("test", "validation", "valid", "dev")


@dataclass(frozen=True)
class Column:
    """One column: what it seems to hold, its values if they are few, and how many are missing.

    `different` counts its values, and `length` is of how many words most of its cells are.
    """

    name: str
    held: Held
    values: tuple[str, ...] = ()
    missing: int = 0
    length: int = 0
    different: int = 0

    @property
    def few(self) -> bool:
        """Whether its values may be classes."""
        return 2 <= len(self.values) <= FEW


@dataclass(frozen=True)
class TableLook:
    """A table as it seems to be."""

    path: str
    rows: int
    columns: tuple[Column, ...]
    train: str = ""
    test: str = ""

    def column(self, name: str) -> Column:
        """A column by its name."""
        found = [each for each in self.columns if each.name == name]
        if not found:
            there = ", ".join(each.name for each in self.columns)
            raise DataError(f"{self.path} has no column {name!r}: it has {there}")
        return found[0]

    def input(self) -> str:
        """The column of texts or pictures, or the two that make a conversation; none is refused."""
        there = {each.name for each in self.columns}
        for pair in PAIRS:
            if there >= {*pair}:
                return " ".join(pair)
        kinds = ("talk", "words", "picture", "text")
        found = _first(self.columns, INPUTS, kinds)
        if not found:
            seen = ", ".join(f"{each.name} ({each.held})" for each in self.columns)
            raise DataError(
                f"{self.path} has no column that looks like texts or pictures: it has {seen}; name "
                "the one that is meant by --input"
            )
        return found

    def label(self, beside: Sequence[str]) -> str:
        """The column of labels, if there is one."""
        left = [each for each in self.columns if each.name not in beside]
        named = _named(left, LABELS)
        return named or _first([each for each in left if each.few], (), ("class",))

    def client(self, beside: Sequence[str]) -> str:
        """The column that names clients, if there is one that is called so."""
        left = [each for each in self.columns if each.name not in beside]
        most = min(self.rows, LOOKED) // 2
        return _named([each for each in left if 2 <= each.different <= most], CLIENTS)


def look_at(path: str) -> TableLook:
    """A table as it seems to be, from its first rows; of several splits, the one to train on."""
    there = splits_in(path)
    train, test = _among(TRAIN, there), _among(TEST, there)
    if there and not train:
        raise DataError(
            f"{path} has splits {', '.join(there)}, and none to train on: call one of them train"
        )
    table = load(path, split=train)
    some = table.select(range(min(LOOKED, len(table))))
    names = [name for name in table.column_names if name != "split"]
    return TableLook(path, len(table), tuple(_column(some, name) for name in names), train, test)


def splits_in(path: str) -> list[str]:
    """The splits that a table has, by the ways that `load` knows them; none if it is one."""
    place = Path(path)
    if is_hub_id(path) and not place.exists():
        return _hub_splits(bare(path))
    if (said := place / "dataset_dict.json").is_file():
        return [str(each) for each in json.loads(said.read_text(encoding="utf-8"))["splits"]]
    if place.is_dir():
        stems = [file.stem for file in sorted(place.iterdir())]
        begins = {word: re.compile(rf"{word}(?![a-zA-Z])") for word in (*TRAIN, *TEST)}
        return [word for word, begun in begins.items() if any(map(begun.match, stems))]
    if place.suffix == ".npz" and place.is_file():
        import numpy as np

        with np.load(place, allow_pickle=False) as file:
            ends = [name.rpartition("_")[2] for name in file.files]
        return [word for word in (*TRAIN, *TEST) if word in ends]
    table = load(path)
    if "split" not in table.column_names:
        return []
    return sorted({str(value) for value in cast("list[Any]", table["split"][:])})


def _hub_splits(name: str) -> list[str]:
    import datasets

    try:
        return [str(each) for each in datasets.get_dataset_split_names(name)]
    except (OSError, ValueError, RuntimeError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DataError(f"{name!r} is not to be had from the hub: {reason}") from error


def _among(words: Iterable[str], there: Sequence[str]) -> str:
    return next((word for word in words if word in there), "")


def _named(columns: Iterable[Column], words: Sequence[str]) -> str:
    """The column that is called by the first of some words."""
    called = {each.name.lower(): each.name for each in columns}
    return next((called[word] for word in words if word in called), "")


def _first(columns: Sequence[Column], words: Sequence[str], kinds: Sequence[Held]) -> str:
    """A column of the first kind that there is; of several, the one that is called so."""
    for kind in kinds:
        found = [each for each in columns if each.held == kind]
        if found:
            return _named(found, words) or max(found, key=lambda each: each.length).name
    return ""


def _column(table: Dataset, name: str) -> Column:
    import datasets

    feature = cast("Any", table.features)[name]
    arrays = datasets.Image | datasets.Array2D | datasets.Array3D
    if isinstance(feature, arrays) or str(getattr(feature, "dtype", "")).endswith("binary"):
        return Column(name, "picture")
    cells = [each for each in cast("list[Any]", table[name][:]) if each is not None]
    missing = len(table) - len(cells)
    if not cells:
        return Column(name, "other", missing=missing)
    if isinstance(cells[0], dict):
        return Column(name, "picture" if "bytes" in cells[0] else "other", missing=missing)
    if isinstance(cells[0], list):
        return _of_lists(name, cells, missing)
    return _of_cells(name, cells, missing, names_in(table, name))


def _of_lists(name: str, cells: list[Any], missing: int) -> Column:
    inner = [each for cell in cells for each in cell]
    if inner and isinstance(inner[0], dict):
        return Column(name, "talk", missing=missing)
    values = tuple(sorted({str(each) for each in inner[: LOOKED * 10]}))
    words = bool(inner) and isinstance(inner[0], str) and len(values) > FEW // 4
    return Column(name, "words" if words else "class", values, missing)


def _of_cells(name: str, cells: list[Any], missing: int, names: list[str] | None) -> Column:
    texts = [label_text(each) for each in cells]
    values = tuple(names or sorted(set(texts)))
    length = sorted(len(text.split()) for text in texts)[int(0.95 * (len(texts) - 1))]
    if (not names and len(values) > max(2, len(texts) // 2)) or len(values) > FEW:
        held: Held = "number" if all(map(_is_number, texts)) else "text"
        kept = values if len(values) <= FEW else ()
        return Column(name, held, kept, missing, length, len(values))
    measured = any(_is_number(text) and not text.lstrip("-").isdecimal() for text in texts)
    held = "number" if measured else "text" if length > 5 else "class"
    return Column(name, held, values, missing, length, len(values))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
