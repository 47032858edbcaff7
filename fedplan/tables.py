# SPDX-License-Identifier: Apache-2.0
"""Tables: rows of examples by file, folder or hub id, and the labels in them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from fedplan.errors import FedplanError

if TYPE_CHECKING:
    from datasets import Dataset

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


class DataError(FedplanError):
    """Data that cannot be read, divided or used as asked."""

    code = "data"


def is_hub_id(name: str) -> bool:
    """Whether a name can only mean something on the hub: it looks like org/name and is no path."""
    path = Path(name)
    return bool(_HUB_ID.fullmatch(name)) and not path.exists() and path.suffix not in _READERS


def load(path: str, *, split: str = "") -> Dataset:
    """A table by file, folder or hub id; only a hub id may reach the network.

    Files are read into memory; a folder that `datasets` saved is mapped from disk. `split` picks
    the rows whose column `split` says so, the arrays of an .npz whose names end in it, the files
    of a folder whose names start with it, or the split of that name.
    """
    place = Path(path)
    if is_hub_id(path):
        return _from_hub(path, split)
    try:
        if place.is_dir():
            return _from_folder(place, split)
        if place.is_file() and place.suffix == ".npz":
            return _from_arrays(place, split)
        if place.is_file() and place.suffix in _READERS:
            return _split_by_column(_READERS[place.suffix](place), split, path)
    except (OSError, ValueError) as error:
        raise DataError(f"{path!r} cannot be read as a table: {error}") from error
    raise DataError(
        f"{path!r} is not a table: give a {', '.join(_READERS)} or .npz file, a folder of such "
        "files, a folder saved by datasets, or a hub id such as org/name"
    )


def _from_parquet(path: Path) -> Dataset:
    from datasets import Dataset
    from pyarrow import parquet

    return Dataset(cast("Any", parquet).read_table(path))


def _from_csv(path: Path) -> Dataset:
    from datasets import Dataset
    from pyarrow import csv

    library = cast("Any", csv)
    options = library.ParseOptions(newlines_in_values=True)
    return Dataset(library.read_csv(path, parse_options=options))


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

    with np.load(path, allow_pickle=False) as file:
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


def _from_folder(folder: Path, split: str) -> Dataset:
    import datasets

    if any((folder / name).is_file() for name in ("dataset_info.json", "dataset_dict.json")):
        return _pick(cast("Any", datasets).load_from_disk(str(folder)), split, str(folder))
    files = sorted(p for p in folder.iterdir() if p.suffix in (*_READERS, ".npz"))
    if not files:
        raise DataError(f"the folder {folder} holds no {', '.join(_READERS)} or .npz file")
    named = [p for p in files if split and re.match(rf"{re.escape(split)}(?![a-zA-Z])", p.stem)]
    inner = "" if named else split
    return datasets.concatenate_datasets([load(str(file), split=inner) for file in named or files])


def _from_hub(name: str, split: str) -> Dataset:
    """A table of the hub. Loading runs no code of the repository: datasets 4 has no such way."""
    import datasets

    try:
        return _pick(datasets.load_dataset(name, split=split or None), split, name)
    except (OSError, ValueError, RuntimeError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DataError(f"{name!r} is no file, and not to be had from the hub: {reason}") from error


def _pick(found: Any, split: str, path: str) -> Dataset:
    """One table, of whatever datasets has loaded."""
    if not isinstance(found, dict):
        return cast("Dataset", found)
    tables = cast("dict[str, Dataset]", found)
    if split not in tables and (split or len(tables) > 1):
        _missing(f"split {split!r} in {path}", tables)
    return tables[split or next(iter(tables))]


def _split_by_column(table: Dataset, split: str, path: str) -> Dataset:
    if split and "split" not in table.column_names:
        _missing(f"column 'split' in {path} to find {split!r} by", table.column_names)
    return where(table, {"split": split}) if split else table


def _missing(thing: str, there: Iterable[object]) -> Any:
    names = [str(name) for name in there]
    more = f" and {len(names) - 20} more" if len(names) > 20 else ""
    raise DataError(f"there is no {thing}; there are {', '.join(names[:20])}{more}")


def values(table: Dataset, column: str) -> list[Any]:
    """A column as a list without gaps."""
    if column not in table.column_names:
        _missing(f"column {column!r}", table.column_names)
    found = cast("list[Any]", table[column][:])
    empty = sum(value is None for value in found)
    if empty:
        raise DataError(
            f"column {column!r} has no value in {empty} of {len(found)} rows: drop them first"
        )
    return found


def where(table: Dataset, conditions: Mapping[str, str | int]) -> Dataset:
    """The rows whose columns equal these values, in the table's order."""
    kept = range(len(table))
    for column, wanted in conditions.items():
        if column not in table.column_names:
            _missing(f"column {column!r}", table.column_names)
        found = cast("list[Any]", table[column][:])
        if wanted not in found and len(found):
            _missing(f"row with {column} = {wanted!r}", sorted(set(map(repr, found))))
        kept = [row for row in kept if found[row] == wanted]
    return rows(table, kept)


def rows(table: Dataset, numbers: Iterable[int]) -> Dataset:
    """The rows of these numbers; nothing is written to disk."""
    return table.select(list(numbers), keep_in_memory=True)


def labels_in(tables: Iterable[Dataset], column: str) -> list[str]:
    """All labels in a column of some tables, those of single words included, in order."""
    found = set[str]()
    for table in tables:
        names = names_in(table, column)
        for value in values(table, column):
            each = cast("list[Any]", value) if isinstance(value, list) else [value]
            found |= {str(names[word]) if names else str(word) for word in each}
    return sorted(found, key=label_order)


def label_order(label: str) -> tuple[bool, int, str]:
    """Numbers first, by size."""
    number = label.isdecimal()
    return (not number, int(label) if number else 0, label)


def names_in(table: Dataset, column: str) -> list[str] | None:
    """The names of a column's numbers, where it knows them."""
    feature = cast("Any", table.features).get(column)
    return getattr(getattr(feature, "feature", feature), "names", None)
