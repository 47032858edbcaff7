# SPDX-License-Identifier: Apache-2.0
"""Partitions: the division of a table among clients, and of a client's rows in two, row by row."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import isfinite
from typing import TYPE_CHECKING, cast

import numpy as np

from fedplan import seeds
from fedplan.data.content import chances, contents
from fedplan.data.tables import (
    DataError,
    label_order,
    label_text,
    labels_of,
    rows,
    values,
)

if TYPE_CHECKING:
    from datasets import Dataset

KINDS = ("iid", "dirichlet", "pathological", "column")
"""The ways to divide a table."""
DRAWS = 100
"""How often a division is drawn anew until each client has the fewest rows that it may have."""


@dataclass(frozen=True)
class Partition:
    """How a table is divided.

    `iid`: at random, in about equal shares. `dirichlet`: each label's rows by shares drawn with
    `alpha`; the smaller, the more skewed. `pathological`: `classes` labels at each client at most.
    `column`: a client for each value of `column`, or for the `clients` most frequent ones; or
    `each` clients for each value, among which its rows are divided as by dirichlet. `least` is the
    fewest rows a client may have; a value of a column with fewer is left out.
    """

    by: str
    clients: int = 0
    column: str = ""
    alpha: float = 0.0
    classes: int = 0
    least: int = 1
    each: int = 1

    def __post_init__(self) -> None:
        if self.by not in KINDS:
            raise DataError(f"there is no partition {self.by!r}; there are {', '.join(KINDS)}")
        self._require(self.clients >= (self.by != "column"), "clients", "1 or more")
        self._require(self.least >= 0, "least", "0 or more")
        self._require(self.each >= 1, "each", "1 or more")
        self._require(self.each == 1 or self.by == "column", "each", "1: only column takes more")
        if self.by == "dirichlet" or self.each > 1:
            self._require(self.alpha > 0 and isfinite(self.alpha), "alpha", "above 0, such as 0.5")
        if self.by == "pathological":
            self._require(self.classes >= 1, "classes", "1 or more")
        if self.by == "column":
            self._require(bool(self.column), "column", "the name of a column")

    def _require(self, holds: bool, name: str, remedy: str) -> None:
        if not holds:
            value = getattr(self, name)
            raise DataError(f"a partition by {self.by} has {name} = {value!r}: it must be {remedy}")


def divide(
    table: Dataset,
    partition: Partition,
    *,
    seed: int,
    label: str = "",
    public: Sequence[str] | None = None,
) -> dict[str, Dataset]:
    """Each client's rows, in the table's order; no row is at two clients. See `division`."""
    held = division(table, partition, seed=seed, label=label, public=public)
    return {name: rows(table, numbers) for name, numbers in held.items()}


def division(
    table: Dataset,
    partition: Partition,
    *,
    seed: int,
    label: str = "",
    public: Sequence[str] | None = None,
) -> dict[str, list[int]]:
    """The numbers of each client's rows.

    Where a row goes follows from what it holds and from the seed, not from the other rows: so equal
    rows are at one client, and neither a row nor a client that is gone moves any other. Clients are
    called client-00 and so on, or by their value of the column, with -0, -1 and so on after it
    if there are several for each. Every row is at some client, except where a partition by column
    leaves values out. `label` names the column that dirichlet and pathological divide by, unless
    the partition names its own `column`.

    `least`, and the most frequent values of a column, depend on how many rows there are. Where that
    may not be told, `public` holds the labels, or the column's values, as they are known
    beforehand: then each of them counts, `least` asks for nothing, and a client may have no rows.
    """
    if partition.by == "column":
        return _by_column(table, partition, seed=seed, label=label, public=public)
    if public is None:
        _require_enough(len(table), partition)
    marks = contents(table)
    texts = _texts(table, _label_column(partition, label)) if partition.by != "iid" else []
    names = list(public) if public is not None else sorted(set(texts), key=label_order)
    kinds = {"iid": _iid, "dirichlet": _dirichlet, "pathological": _pathological}
    place = partial(kinds[partition.by], marks, texts, names, partition)
    places = _drawn(place, seed, partition, sure=public is None)
    width = max(2, len(str(partition.clients - 1)))
    return {f"client-{i:0{width}}": _at(places, i) for i in range(partition.clients)}


def _at(places: np.ndarray, client: int | bool) -> list[int]:
    return np.flatnonzero(places == client).tolist()


def _require_enough(count: int, partition: Partition, of: str = "rows") -> None:
    if partition.clients * partition.least > count:
        raise DataError(
            f"{count} {of} cannot give {partition.clients} clients {partition.least} each: ask for "
            "fewer clients, or for a smaller least"
        )


Draw = tuple[int, int]
"""The seed, and the number of the draw."""


def _drawn(
    place: Callable[[Draw], np.ndarray], seed: int, partition: Partition, *, sure: bool
) -> np.ndarray:
    """The client of each row, in the first draw that gives each as many as it must have."""
    places = place((seed, 0))
    for number in range(1, DRAWS + 1):
        counts = np.bincount(places, minlength=partition.clients)
        if not sure or counts.min() >= partition.least:
            return places
        places = place((seed, number))
    alpha = f" with alpha = {partition.alpha}" if partition.alpha else ""
    raise DataError(
        f"no division of {len(places)} rows by {partition.by}{alpha} gave each of "
        f"{partition.clients} clients {partition.least} rows, in {DRAWS} draws: "
        f"{'raise alpha, or ' if alpha else ''}ask for fewer clients or a smaller least"
    )


def _label_column(partition: Partition, label: str) -> str:
    column = partition.column or label
    if not column:
        raise DataError(f"a partition by {partition.by} needs the column of labels: name it")
    return column


def _texts(table: Dataset, column: str) -> list[str]:
    """Each row's label, to divide by."""
    found = labels_of(table, column)
    if strange := [value for value in found if not isinstance(value, str)]:
        raise DataError(f"values such as {strange[0]!r} are no labels to divide by")
    return cast("list[str]", found)


def _iid(
    marks: list[bytes], texts: list[str], names: list[str], partition: Partition, draw: Draw
) -> np.ndarray:
    return (chances(marks, "iid", *draw) * partition.clients).astype(int)


def _dirichlet(
    marks: list[bytes], texts: list[str], names: list[str], partition: Partition, draw: Draw
) -> np.ndarray:
    """Shares of each label by its name, and each row by its chance into one of them."""
    found = chances(marks, "dirichlet", *draw)
    kinds = np.array(texts, dtype=object)
    places = np.zeros(len(marks), dtype=int)
    for text in set(texts):
        numbers = np.random.default_rng(seeds.seed("dirichlet", *draw, text))
        ends = numbers.dirichlet([partition.alpha] * partition.clients).cumsum()
        own = kinds == text
        places[own] = ends.searchsorted(found[own], side="right").clip(max=partition.clients - 1)
    return places


def _pathological(
    marks: list[bytes], texts: list[str], names: list[str], partition: Partition, draw: Draw
) -> np.ndarray:
    """Deal the labels out, and each row by its chance to one of those who hold its label."""
    if strange := set(texts) - set(names):
        raise DataError(f"label {min(strange)!r} is none of the known ones: {', '.join(names)}")
    holders = _deal(names, partition, draw)
    found = chances(marks, "pathological", *draw)
    return np.array(
        [
            holders[text][int(at * len(holders[text]))]
            for text, at in zip(texts, found, strict=True)
        ],
        dtype=int,
    )


def _deal(names: Sequence[str], partition: Partition, draw: Draw) -> dict[str, list[int]]:
    """Who holds each label: every client as many, and each label as many holders as another.

    Each label goes to the clients with the most room, which always comes out even.
    """
    count, shards = len(names), partition.clients * partition.classes
    if partition.classes > count or shards < count:
        raise DataError(
            f"{partition.clients} clients with {partition.classes} labels each cannot hold "
            f"{count} labels: classes must be at most {count}, and clients times classes at least"
        )
    numbers = np.random.default_rng(seeds.seed("deal", *draw))
    held, found = [0] * partition.clients, dict[str, list[int]]()
    for place in cast("list[int]", numbers.permutation(count).tolist()):
        order = cast("list[int]", numbers.permutation(partition.clients).tolist())
        emptiest = sorted(order, key=lambda client: held[client])
        found[names[place]] = emptiest[: len(range(place, shards, count))]
        for client in found[names[place]]:
            held[client] += 1
    return found


def _by_column(
    table: Dataset, partition: Partition, *, seed: int, label: str, public: Sequence[str] | None
) -> dict[str, list[int]]:
    """The rows of each value of the column, or of each of its clients."""
    found = dict[str, list[int]]()
    for row, value in enumerate(values(table, partition.column)):
        if not isinstance(value, Hashable):
            raise DataError(f"column {partition.column!r} holds {value!r}, which is no client")
        found.setdefault(label_text(value), []).append(row)
    clients = _most_frequent(found, partition) if public is None else _known(public, partition)
    held = {name: found.get(name, []) for name in clients}
    if partition.each == 1:
        return held
    return _each_divided(table, held, partition, seed=seed, label=label, sure=public is None)


def _most_frequent(found: Mapping[str, list[int]], partition: Partition) -> list[str]:
    enough = [name for name, held in found.items() if len(held) >= partition.least]
    if not enough or len(enough) < partition.clients:
        raise DataError(
            f"column {partition.column!r} has {len(enough)} values with {partition.least} rows or "
            f"more, and {partition.clients} clients are asked for: ask for fewer, or lower least"
        )
    largest = sorted(enough, key=lambda name: (-len(found[name]), label_order(name)))
    return sorted(largest[: partition.clients or None], key=label_order)


def _known(public: Sequence[str], partition: Partition) -> list[str]:
    if partition.clients not in (0, len(public)):
        raise DataError(
            f"column {partition.column!r} has {len(public)} known values, and {partition.clients} "
            f"clients are asked for: which of them have most rows may not be told, so say "
            f"clients = {len(public)}"
        )
    return sorted(public, key=label_order)


def _each_divided(
    table: Dataset,
    held: Mapping[str, list[int]],
    partition: Partition,
    *,
    seed: int,
    label: str,
    sure: bool,
) -> dict[str, list[int]]:
    """The rows of each value among its clients, by a draw that no other value changes."""
    if not label:
        raise DataError(f"each = {partition.each} divides by labels: name their column")
    marks, texts = contents(table), _texts(table, label)
    inner = replace(partition, by="dirichlet", clients=partition.each, each=1)
    shares = dict[str, list[int]]()
    for value, own in held.items():
        if sure:
            _require_enough(len(own), inner, f"rows with {partition.column} = {value}")
        parts = [marks[row] for row in own], [texts[row] for row in own]
        place = partial(_dirichlet, *parts, [], inner)
        places = _drawn(place, seeds.seed("each", seed, value), inner, sure=sure)
        for number in range(partition.each):
            shares[f"{value}-{number}"] = [own[i] for i in _at(places, number)]
    return shares


def to_train(contents: Sequence[bytes], *, share: float, seed: int) -> np.ndarray:
    """Whether each row is to be trained on, as about this share of them are.

    It follows from the row's content and the seed: so equal rows are on one side, at whichever
    client they are.
    """
    if not 0 < share <= 1:
        raise DataError(f"share = {share} of the rows to train on: it must be above 0, at most 1")
    return chances(contents, "own test", seed) < share


def halve(
    table: Dataset, *, share: float, seed: int, columns: Iterable[str] = ()
) -> tuple[Dataset, Dataset]:
    """Rows to train on, about this share of them, and the others to test on.

    On which side a row is follows from what it holds in `columns`, or in all of them, and from the
    seed. A side may have no rows.
    """
    first = to_train(contents(table, columns), share=share, seed=seed)
    return rows(table, _at(first, True)), rows(table, _at(first, False))


def some(table: Dataset, most: int, *, seed: int) -> Dataset:
    """So many rows of a table at most, drawn by what they hold, in the table's order."""
    if len(table) <= most:
        return table
    order = chances(contents(table), "limit", seed).argsort(kind="stable")
    return rows(table, sorted(order[:most].tolist()))
