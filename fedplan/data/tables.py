# SPDX-License-Identifier: Apache-2.0
"""Tables: rows of examples by file, folder or hub id, their values, and the labels in them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from math import isfinite, isnan
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from fedplan.errors import FedplanError
from fedplan.models.hub import bare, is_hub_id

if TYPE_CHECKING:
    from datasets import Dataset


class DataError(FedplanError):
    """Data that cannot be read, divided or used as asked."""

    code = "data"


def load(path: str, *, split: str = "", empty: bool = False) -> Dataset:
    """A table by file, folder or hub id; only a hub id, as in hub:org/name, may reach the network.

    Files are read into memory; a folder that `datasets` saved is mapped from disk. The cells of a
    .csv are texts, because it says no types, and one row must not change what others hold. A cell
    without a sign in it is a value that is missing. `split` picks
    the rows whose column `split` says so, the arrays of an .npz whose names end in it, the files
    of a folder whose names start with it, or the split of that name. `empty` is as in `where`.
    """
    place = Path(path)
    if is_hub_id(path):
        return _from_hub(bare(path), split)
    try:
        if place.is_dir():
            return _from_folder(place, split, empty)
        if place.is_file() and place.suffix == ".npz":
            return _from_arrays(place, split)
        if place.is_file() and place.suffix in _READERS:
            return _split_by_column(_READERS[place.suffix](place), split, path, empty)
    except DataError:
        raise
    # In a damaged file each of the libraries that read them raises what it happens to meet.
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DataError(f"{path!r} cannot be read as a table: {reason[:300]}") from error
    raise DataError(
        f"{path!r} {'is not a table' if place.exists() else 'is not there'}: give a "
        f"{', '.join(_READERS)} or .npz file, a folder of such files, a folder saved by datasets, "
        "or a name of the hub as hub:org/name"
    )


def _from_parquet(path: Path) -> Dataset:
    from datasets import Dataset
    from pyarrow import parquet

    return Dataset(cast("Any", parquet).read_table(path))


def _from_csv(path: Path) -> Dataset:
    import pyarrow
    from datasets import Dataset
    from pyarrow import csv

    library = cast("Any", csv)
    parse = library.ParseOptions(newlines_in_values=True)
    with library.open_csv(path, parse_options=parse) as opened:
        texts = dict.fromkeys(opened.schema.names, cast("Any", pyarrow).string())
    convert = library.ConvertOptions(column_types=texts, null_values=[""], strings_can_be_null=True)
    return Dataset(library.read_csv(path, parse_options=parse, convert_options=convert))


def _from_json(path: Path) -> Dataset:
    from datasets import Dataset

    text = path.read_text(encoding="utf-8")
    if text.lstrip().startswith("["):
        rows = json.loads(text)
    else:
        rows = [json.loads(line) for line in text.splitlines() if line.strip()]
    if not all(isinstance(row, dict) for row in rows):
        raise ValueError("every row must be an object with named values")
    names = dict.fromkeys(name for row in rows for name in row)
    return Dataset.from_dict({name: [row.get(name) for row in rows] for name in names})


_READERS: dict[str, Callable[[Path], Dataset]] = {
    ".parquet": _from_parquet,
    ".csv": _from_csv,
    ".json": _from_json,
    ".jsonl": _from_json,
}


def _from_arrays(path: Path, split: str) -> Dataset:
    """A column per array; with a split, `x_train` is the column `x` of the split `train`."""
    import numpy as np
    from datasets import Dataset, Features

    # of a damaged file numpy leaves open what it has opened
    with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
        arrays: dict[str, Any] = {name: file[name] for name in file.files}
    if split:
        end = f"_{split}"
        found = {n.removesuffix(end): a for n, a in arrays.items() if n.endswith(end)}
        arrays = found or _missing(f"arrays of {path} that end in {end!r}", arrays)
    lengths = {name: array.shape[0] if array.ndim else 0 for name, array in arrays.items()}
    if len(set(lengths.values())) != 1:
        raise DataError(
            f"the arrays of {path} differ in length, {lengths}: name a split to take those that "
            "end in it, such as 'train' for x_train and y_train"
        )
    features = Features({name: _feature(array) for name, array in arrays.items()})
    return Dataset.from_dict(arrays, features=features)


def _feature(array: Any) -> Any:
    import datasets

    name, inner = str(array.dtype), array.shape[1:]
    shaped = {2: datasets.Array2D, 3: datasets.Array3D, 4: datasets.Array4D}
    if len(inner) in shaped:
        return shaped[len(inner)](inner, name)
    value = datasets.Value("string" if array.dtype.kind == "U" else name)
    return datasets.List(value) if inner else value


def _from_folder(folder: Path, split: str, empty: bool) -> Dataset:
    import datasets

    if any((folder / name).is_file() for name in ("dataset_info.json", "dataset_dict.json")):
        return _pick(cast("Any", datasets).load_from_disk(str(folder)), split, str(folder))
    files = sorted(p for p in folder.iterdir() if p.suffix in (*_READERS, ".npz"))
    if not files:
        raise DataError(f"the folder {folder} holds no {', '.join(_READERS)} or .npz file")
    named = [p for p in files if split and re.match(rf"{re.escape(split)}(?![a-zA-Z])", p.stem)]
    inner = "" if named else split
    tables = [load(str(file), split=inner, empty=empty) for file in named or files]
    return datasets.concatenate_datasets(tables)


def _from_hub(name: str, split: str) -> Dataset:
    """A table of the hub. Loading runs no code of the repository: datasets 4 has no such way."""
    import datasets

    try:
        return _pick(datasets.load_dataset(name, split=split or None), split, name)
    except (OSError, ValueError, RuntimeError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DataError(f"{name!r} is not to be had from the hub: {reason}") from error


def _pick(found: Any, split: str, path: str) -> Dataset:
    """One table, of whatever datasets has loaded."""
    if not isinstance(found, dict):
        return cast("Dataset", found)
    tables = cast("dict[str, Dataset]", found)
    if split not in tables and (split or len(tables) > 1):
        _missing(f"split {split!r} in {path}", tables)
    return tables[split or next(iter(tables))]


def _split_by_column(table: Dataset, split: str, path: str, empty: bool) -> Dataset:
    if split and "split" not in table.column_names:
        _missing(f"column 'split' in {path} to find {split!r} by", table.column_names)
    return where(table, {"split": split}, empty=empty) if split else table


def _missing(thing: str, there: Iterable[object]) -> Any:
    names = [str(name) for name in there]
    more = f" and {len(names) - 20} more" if len(names) > 20 else ""
    raise DataError(f"there is no {thing}; there are {', '.join(names[:20])}{more}")


def require_column(table: Dataset, column: str) -> None:
    """Refuse a name that is none of a table's columns."""
    if column not in table.column_names:
        _missing(f"column {column!r}", table.column_names)


def values(table: Dataset, column: str) -> list[Any]:
    """A column as a list without gaps."""
    require_column(table, column)
    found = cast("list[Any]", table[column][:])
    empty = sum(value is None or (type(value) is float and isnan(value)) for value in found)
    if empty:
        raise DataError(
            f"column {column!r} has no value in {empty} of {len(found)} rows: drop them first"
        )
    return found


def where(table: Dataset, conditions: Mapping[str, str | int], *, empty: bool = False) -> Dataset:
    """The rows whose columns equal these values, in the table's order.

    That there is none is most likely a slip of the pen, and an error. Where rows are hidden it may
    be `empty`: an error would tell of the one row that it lacks.
    """
    kept = range(len(table))
    for column, wanted in conditions.items():
        require_column(table, column)
        found = cast("list[Any]", table[column][:])
        equal = [is_among(value, (wanted,)) for value in found]
        if not any(equal) and found and not empty:
            _missing(f"row with {column} = {wanted!r}", sorted(set(map(repr, found))))
        kept = [row for row in kept if equal[row]]
    return rows(table, kept)


def is_among(value: Any, wanted: Iterable[Any]) -> bool:
    """Whether a value is one of some; a text, such as a cell of a .csv, equals a number it says."""
    if isinstance(value, str):
        return any(value == each or value == label_text(each) for each in wanted)
    return value in wanted


def rows(table: Dataset, numbers: Iterable[int]) -> Dataset:
    """The rows of these numbers; nothing is written to disk."""
    return table.select(list(numbers), keep_in_memory=True)


def labels_in(tables: Iterable[Dataset], column: str) -> list[str]:
    """All labels in a column of some tables, those of single words included, in order.

    Numbers that measure something are refused: as classes they would mean nothing.
    """
    found, count = set[str](), 0
    for table in tables:
        for value in labels_of(table, column):
            each = cast("list[str]", value) if isinstance(value, list) else [value]
            found |= set(each)
            count += len(each)
    _require_classes(found, count, column)
    return sorted(found, key=label_order)


def labels_of(table: Dataset, column: str) -> list[Any]:
    """Each row's label as a text, or the list of those of its words.

    A column that knows names for its numbers goes by these.
    """
    names = names_in(table, column)

    def text(value: Any) -> Any:
        if isinstance(value, list):
            return [text(each) for each in cast("list[Any]", value)]
        return str(names[value]) if names else label_text(value)

    return [text(value) for value in values(table, column)]


def label_text(value: Any) -> str:
    """A label as a text: one type of number is as good as another."""
    return number_text(value) if type(value) in (int, float) else str(value)


def number_text(value: float) -> str:
    """A number as a text, the same for 1 and 1.0: one row may turn a column into fractions."""
    whole = isinstance(value, float) and value.is_integer()
    return str(int(value)) if whole else str(value)


def _require_classes(labels: set[str], count: int, column: str) -> None:
    """Refuse labels that are measurements, or hardly ever the same."""
    remedy = "say those that there are in task.labels, if they are classes all the same"
    if measured := sorted(label for label in labels if _is_measured(label)):
        raise DataError(
            f"column {column!r} holds {measured[0]}, which measures something and names no class, "
            f"and fedplan learns classes: {remedy}"
        )
    if len(labels) > 20 and 2 * len(labels) > count:
        raise DataError(
            f"column {column!r} has {len(labels)} different labels in {count}: these are no "
            f"classes; {remedy}"
        )


def _is_measured(label: str) -> bool:
    """Whether a label is no whole number, but a number; or one that is not even that."""
    try:
        return not float(label).is_integer() or not isfinite(float(label))
    except ValueError:
        return False


def label_order(label: str) -> tuple[bool, int, str]:
    """Numbers first, by size."""
    number = label.isdecimal()
    return (not number, int(label) if number else 0, label)


def names_in(table: Dataset, column: str) -> list[str] | None:
    """The names of a column's numbers, where it knows them."""
    feature = cast("Any", table.features).get(column)
    return getattr(getattr(feature, "feature", feature), "names", None)
