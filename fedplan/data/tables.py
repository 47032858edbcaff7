# SPDX-License-Identifier: Apache-2.0
"""Tables of examples: load them from files, folders or the Hub, filter rows, read labels."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from math import isfinite, isnan
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from fedplan.errors import FedplanError, first_line
from fedplan.models.catalog import is_hub_id, strip_hub_prefix

if TYPE_CHECKING:
    from datasets import Dataset


class DataError(FedplanError):
    """Raised if data cannot be read, partitioned, or used for a task."""

    code = "data"


IMAGE_FILE = re.compile(r".+\.(png|jpe?g|bmp|gif|tiff?|webp)", re.IGNORECASE)
"""Names of image files."""


def open_images(table: Dataset, columns: Iterable[str], path: str, *, private: bool) -> Dataset:
    """Return a table with the contents of files in columns that have the names of image files.

    The files lie in the folder of the table at `path`. Raises DataError if one cannot be read; with
    `private` its cell is missing instead, since the error would tell what a row holds.
    """
    from datasets import Value

    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    for column in columns:
        names = plain_cells(table, column)
        if not any(isinstance(name, str) and IMAGE_FILE.fullmatch(name) for name in names):
            continue
        cells = list[bytes | None]()
        for row, name in enumerate(names, 1):
            try:
                cells.append(None if name is None else (folder / str(name)).read_bytes())
            except OSError as error:
                if not private:
                    raise DataError(
                        f"row {row} names the image {name!r} in column {column!r}, which is no "
                        f"file in {folder.absolute()}: give paths that start there"
                    ) from error
                cells.append(None)
        rest = cast("Any", table.remove_columns(column))
        table = rest.add_column(column, cells, feature=Value("binary"))
    return table


TRAIN_SPLITS, TEST_SPLITS = ("train", "training"), ("test", "validation", "valid", "dev")
"""Usual names of splits."""
ROW = "fedplan.row"
"""Name of the column that `load_table` adds with `numbered`; it is no part of a row's content."""


def load_table(
    path: str, *, split: str = "", allow_empty: bool = False, numbered: bool = False
) -> Dataset:
    """Load a table from a file, a folder, or the Hub as `hub:org/name` (uses the network).

    `path` is a .csv, .json, .jsonl, .parquet or .npz file, or a folder of such files. Files are
    read into memory; a folder saved by `datasets` is mapped from disk. Cells of a .csv file are
    texts, since types guessed from other rows would change a row; empty cells are missing values.
    `split` selects the rows of a file with this value in the column `split`; the arrays of an .npz
    file named as `x_train` for the split `train`; the files of a folder with names that start with
    the split, or else such rows of each file; or the split of this name in a dataset of the Hub or
    saved by `datasets`. `allow_empty` is as in `filter_rows`; with it, cells of a JSON file may
    have any type, each its own, and a folder with JSON files may have no others. `numbered` adds
    the column ROW: the number of each row in the file, the arrays or the split, from 1; a folder of
    files has none. Raises DataError if the table or the split cannot be read.
    """
    place = Path(path)
    is_json = place.suffix in JSON_SUFFIXES

    def number(table: Dataset) -> Dataset:
        rows = list(range(1, len(table) + 1))
        return cast("Any", table).add_column(ROW, rows) if numbered else table

    try:
        if is_hub_id(path) or _is_saved(place):
            return number(_from_datasets(path, split))
        if place.is_dir():
            return _from_folder(place, split, allow_empty)
        if place.is_file() and place.suffix == ".npz":
            return number(_from_arrays(place, split))
        if place.is_file() and place.suffix in _READERS:
            if allow_empty and is_json:
                table = number(_from_json(place, any_types=True))
            else:
                table = number(_READERS[place.suffix](place))
            if split and "split" not in table.column_names:
                if allow_empty and is_json:
                    return select_rows(table, [])
                _raise_missing(f"column 'split' in {path}, to select {split!r}", table.column_names)
            return filter_rows(table, {"split": split}, allow_empty=allow_empty) if split else table
    except DataError:
        raise
    # For a damaged file, the reading libraries raise exceptions of any kind.
    except Exception as error:
        if is_hub_id(path):
            raise _hub_error(path, error) from error
        raise DataError(f"{path!r} cannot be read as a table: {first_line(error)}") from error
    raise DataError(
        f"{path!r} {'is not a table' if place.exists() else 'does not exist'}: give a "
        f"{', '.join(_READERS)} or .npz file, a folder of such files, a folder saved by datasets, "
        "or a dataset of the Hub as hub:org/name"
    )


def _hub_error(path: str, error: Exception) -> DataError:
    name = strip_hub_prefix(path)
    return DataError(f"{name!r} cannot be loaded from the Hub: {first_line(error)}")


def _from_datasets(path: str, split: str) -> Dataset:
    """Return a dataset of the Hub, or of a folder saved by `datasets`; its split, if it has any."""
    import datasets

    name, library = strip_hub_prefix(path), cast("Any", datasets)
    if is_hub_id(path):
        loaded = library.load_dataset(name, split=split or None)
    else:
        loaded = library.load_from_disk(path)
    if not isinstance(loaded, dict):
        return loaded
    tables = cast("dict[str, Dataset]", loaded)
    if split not in tables and (split or len(tables) > 1):
        _raise_missing(f"split {split!r} in {name}", tables)
    return tables[split or next(iter(tables))]


def split_names(path: str) -> list[str]:
    """Return the names of a table's splits; of files, only TRAIN_SPLITS and TEST_SPLITS are known.

    Raises DataError if the table or the Hub cannot be read.
    """
    place = Path(path)
    if is_hub_id(path) and not place.exists():
        import datasets

        try:
            return list(map(str, datasets.get_dataset_split_names(strip_hub_prefix(path))))
        except (OSError, ValueError, RuntimeError) as error:
            raise _hub_error(path, error) from error
    if (listing := place / "dataset_dict.json").is_file():
        return [str(name) for name in json.loads(listing.read_text(encoding="utf-8"))["splits"]]
    usual = (*TRAIN_SPLITS, *TEST_SPLITS)
    if place.is_dir():
        stems = [file.stem for file in place.iterdir()]
        return [name for name in usual if any(_names_split(stem, name) for stem in stems)]
    if place.suffix == ".npz" and place.is_file():
        import numpy as np

        with np.load(place, allow_pickle=False) as file:
            suffixes = [name.rpartition("_")[2] for name in file.files]
        return [name for name in usual if name in suffixes]
    table = load_table(path)
    if "split" not in table.column_names:
        return []
    return sorted({str(value) for value in cast("list[Any]", table["split"][:])})


def _names_split(stem: str, split: str) -> bool:
    """Whether the name of a file begins with that of a split."""
    return re.match(rf"{re.escape(split)}(?![a-zA-Z])", stem) is not None


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


def _from_json(path: Path, *, any_types: bool = False) -> Dataset:
    """Read a JSON list of objects, or JSON lines; with `any_types` each cell keeps its own type."""
    from datasets import Dataset, Features, Json

    text = path.read_text(encoding="utf-8")
    if text.lstrip().startswith("["):
        rows = json.loads(text)
    else:
        rows = [json.loads(line) for line in text.splitlines() if line.strip()]
    if not all(isinstance(row, dict) for row in rows):
        raise ValueError("every row must be an object with named values")
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: [row.get(name) for row in rows] for name in names}
    if not any_types:
        return Dataset.from_dict(columns)
    texts = {name: list(map(_json_text, cells)) for name, cells in columns.items()}
    return Dataset.from_dict(texts, features=Features(dict.fromkeys(names, Json())))


def _json_text(cell: Any) -> str | None:
    """Return a cell as JSON; None for a missing value, and for one with NaN or infinity."""
    try:
        return None if cell is None else json.dumps(cell, allow_nan=False)
    except (ValueError, RecursionError):
        return None


JSON_SUFFIXES = (".json", ".jsonl")
"""Files whose columns are those that any row names."""


def has_json_columns(path: str) -> bool:
    """Whether a table is a JSON file or a folder with JSON files, whose rows name the columns."""
    place = Path(path)
    if place.is_dir():
        return not _is_saved(place) and any(p.suffix in JSON_SUFFIXES for p in place.iterdir())
    return place.suffix in JSON_SUFFIXES


_READERS: dict[str, Callable[[Path], Dataset]] = {
    ".parquet": _from_parquet,
    ".csv": _from_csv,
    ".json": _from_json,
    ".jsonl": _from_json,
}


def _from_arrays(path: Path, split: str) -> Dataset:
    import datasets
    import numpy as np

    # np.load does not close a damaged file that it has opened itself
    with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
        arrays: dict[str, Any] = {name: file[name] for name in file.files}
    if split:
        suffix = f"_{split}"
        selected = {n.removesuffix(suffix): a for n, a in arrays.items() if n.endswith(suffix)}
        arrays = selected or _raise_missing(f"array of {path} that ends with {suffix!r}", arrays)
    lengths = {name: array.shape[0] if array.ndim else 0 for name, array in arrays.items()}
    if len(set(lengths.values())) != 1:
        raise DataError(
            f"the arrays of {path} have different lengths, {lengths}: name a split, such as "
            "'train' for x_train and y_train"
        )
    array_types = {2: datasets.Array2D, 3: datasets.Array3D, 4: datasets.Array4D}
    features = dict[str, Any]()
    for name, array in arrays.items():
        dtype, inner_shape = str(array.dtype), array.shape[1:]
        if len(inner_shape) in array_types:
            features[name] = array_types[len(inner_shape)](inner_shape, dtype)
        else:
            value = datasets.Value("string" if array.dtype.kind == "U" else dtype)
            features[name] = datasets.List(value) if inner_shape else value
    return datasets.Dataset.from_dict(arrays, features=datasets.Features(features))


def _from_folder(folder: Path, split: str, allow_empty: bool) -> Dataset:
    import datasets

    files = sorted(p for p in folder.iterdir() if p.suffix in (*_READERS, ".npz"))
    if not files:
        raise DataError(f"the folder {folder} has no {', '.join(_READERS)} or .npz file")
    if allow_empty and len({p.suffix in JSON_SUFFIXES for p in files}) > 1:
        raise DataError(
            f"the folder {folder} has JSON files and others, whose columns have types: with "
            "[privacy], convert the files to one format"
        )
    named = [p for p in files if split and _names_split(p.stem, split)]
    inner_split = "" if named else split
    tables = [
        load_table(str(file), split=inner_split, allow_empty=allow_empty) for file in named or files
    ]
    return datasets.concatenate_datasets(tables)


def _is_saved(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("dataset_info.json", "dataset_dict.json"))


def _raise_missing(wanted: str, present: Iterable[object]) -> Any:
    """Raise DataError: there is no `wanted`; there are ... (the first 20 of `present`)."""
    names = [str(name) for name in present if name != ROW]
    more = f" and {len(names) - 20} more" if len(names) > 20 else ""
    raise DataError(f"there is no {wanted}; there are {', '.join(names[:20])}{more}")


def add_empty_columns(table: Dataset, columns: Iterable[str]) -> Dataset:
    """Return a table with a column without values for each of `columns` that it lacks."""
    for column in sorted({*columns} - {"", *table.column_names}):
        table = cast("Any", table).add_column(column, [None] * len(table))
    return table


def require_column(table: Dataset, column: str) -> None:
    """Raise DataError if a table has no column of this name."""
    if column not in table.column_names:
        _raise_missing(f"column {column!r}", table.column_names)


def column_values(table: Dataset, column: str) -> list[Any]:
    """Return a column as a list; DataError if it is unknown, or has missing values or NaN."""
    require_column(table, column)
    values = cast("list[Any]", table[column][:])
    missing = sum(value is None or (type(value) is float and isnan(value)) for value in values)
    if missing:
        raise DataError(
            f"column {column!r} has no value in {missing} of {len(values)} rows: remove these rows "
            "first"
        )
    return values


def filter_rows(
    table: Dataset, conditions: Mapping[str, str | int], *, allow_empty: bool = False
) -> Dataset:
    """Return the rows of a table that meet all `conditions` (column to value), in order.

    Raises DataError for a value that no row of a table has, likely a typing error, but not with
    `allow_empty`: under privacy, the error would reveal that a row is missing.
    """
    kept = range(len(table))
    for column, wanted in conditions.items():
        values = plain_cells(table, column)
        matches = [matches_any(value, (wanted,)) for value in values]
        if not any(matches) and values and not allow_empty:
            _raise_missing(f"row with {column} = {wanted!r}", sorted(set(map(repr, values))))
        kept = [row for row in kept if matches[row]]
    return select_rows(table, kept)


def plain_cells(table: Dataset, column: str) -> list[Any]:
    """Return the cells of a column of texts, numbers or JSON; None for each cell of another column.

    Images, lists and arrays are not decoded, which could fail. Raises DataError for an unknown
    column.
    """
    is_plain = _has_plain_cells(table, column)
    return cast("list[Any]", table[column][:]) if is_plain else [None] * len(table)


def _has_plain_cells(table: Dataset, column: str) -> bool:
    from datasets import ClassLabel, Json, Value

    require_column(table, column)
    return isinstance(cast("Any", table.features)[column], Value | ClassLabel | Json)


def matches_any(value: Any, values: Iterable[Any]) -> bool:
    """Whether a value equals one of `values`; a text (cell of a .csv) also equals its number."""
    if isinstance(value, str):
        return any(value == each or value == label_text(each) for each in values)
    return value in values


def select_rows(table: Dataset, indices: Iterable[int]) -> Dataset:
    """Return the rows of these indices; the selection is kept in memory, not written to disk."""
    return table.select(list(indices), keep_in_memory=True)


def label_names(tables: Iterable[Dataset], column: str) -> list[str]:
    """Return all labels in a column of some tables, sorted; labels in lists count one by one.

    Raises DataError for labels that do not look like classes: fractional numbers, or over 20
    different labels, more than half of all.
    """
    names, count = set[str](), 0
    for table in tables:
        for labels in row_labels(table, column):
            names |= set(labels)
            count += len(labels)
    remedy = "name another label column; or, if they are classes, list them in task.labels"
    if fractional := sorted(label for label in names if _is_fractional(label)):
        raise DataError(
            f"column {column!r} has the value {fractional[0]}, which looks like a measurement and "
            f"not like a class: {remedy}"
        )
    if len(names) > 20 and 2 * len(names) > count:
        raise DataError(
            f"column {column!r} has {len(names)} different values in {count}, which do not look "
            f"like classes: {remedy}"
        )
    return sorted(names, key=label_sort_key)


def label_values(table: Dataset, column: str) -> list[Any]:
    """Return the label of each row as text or list of texts: the class name, if the column has
    names.

    Raises DataError for an unknown column or missing values.
    """
    names = class_names(table, column)

    def text(value: Any) -> Any:
        if isinstance(value, list):
            return [text(each) for each in cast("list[Any]", value)]
        return str(names[value]) if names else label_text(value)

    return [text(value) for value in column_values(table, column)]


def row_labels(table: Dataset, column: str) -> list[list[str]]:
    """Return the labels of each row as `label_values` has them, a single one in a list too."""
    return [each if isinstance(each, list) else [each] for each in label_values(table, column)]


def split_labels(table: Dataset, column: str, separator: str) -> Dataset:
    """Return a table with lists of labels in a column of texts such as "red; blue".

    An empty cell has no label. Raises DataError for a column that is unknown, or of images or
    lists.
    """
    from datasets import List, Value

    if not _has_plain_cells(table, column):
        raise DataError(f"label_separator is for a column of texts, and {column!r} has none")
    lists = list[list[str]]()
    for cell in plain_cells(table, column):
        parts = label_text(cell).split(separator) if cell is not None else []
        lists.append(list(dict.fromkeys(part.strip() for part in parts if part.strip())))
    rest = table.remove_columns(column)
    return cast("Any", rest).add_column(column, lists, feature=List(Value("string")))


def missing_cells(table: Dataset, column: str) -> list[bool]:
    """Return for each row whether its cell is null, NaN, blank text or the class -1.

    `datasets` writes -1 for a row without a class. Raises DataError for an unknown column.
    """
    import pyarrow
    from datasets import ClassLabel
    from pyarrow import compute

    require_column(table, column)
    library, types = cast("Any", compute), cast("Any", pyarrow).types
    cells = cast("Any", table.select_columns([column]).with_format("arrow"))[:][column]
    missing = library.is_null(cells, nan_is_null=True)
    if types.is_string(cells.type) or types.is_large_string(cells.type):
        empty = library.equal(library.utf8_trim_whitespace(cells), "")
        missing = library.or_(missing, library.fill_null(empty, False))
    if isinstance(cast("Any", table.features)[column], ClassLabel):
        missing = library.or_(missing, library.fill_null(library.less(cells, 0), False))
    return missing.to_pylist()


def label_text(value: Any) -> str:
    """Return a label as text; numbers are written alike for every type."""
    return number_text(value) if type(value) in (int, float) else str(value)


def number_text(value: float) -> str:
    """Return a number as text, the same for 1 and 1.0: one row may make a column fractional."""
    whole = isinstance(value, float) and value.is_integer()
    return str(int(value)) if whole else str(value)


def _is_fractional(label: str) -> bool:
    """Whether a label is a number, but not a whole one; infinity and NaN count too."""
    try:
        return not float(label).is_integer() or not isfinite(float(label))
    except ValueError:
        return False


def label_sort_key(label: str) -> tuple[bool, int, str]:
    """Return a sort key of a label: whole numbers first, by size, then texts."""
    number = label.isdecimal()
    return (not number, int(label) if number else 0, label)


def class_names(table: Dataset, column: str) -> list[str] | None:
    """Return the names of a column's class numbers, if its feature has them; else None."""
    feature = cast("Any", table.features).get(column)
    return getattr(getattr(feature, "feature", feature), "names", None)
