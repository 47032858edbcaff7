# SPDX-License-Identifier: Apache-2.0
"""Data: the division of a table among clients, and of a client's rows in two."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import TYPE_CHECKING, Any

from fedplan import streams
from fedplan.tables import DataError as DataError
from fedplan.tables import load as load
from fedplan.tables import rows, values
from fedplan.tables import where as where

if TYPE_CHECKING:
    from datasets import Dataset

KINDS = ("iid", "dirichlet", "pathological", "column")
"""The ways to divide a table."""


@dataclass(frozen=True)
class Partition:
    """How a table is divided.

    `iid`: at random, in equal shares. `dirichlet`: each label's rows by shares drawn with `alpha`;
    the smaller, the more skewed. `pathological`: `classes` labels at each client. `column`: a
    client for each value of `column`, or for the `clients` most frequent ones; or `each` clients
    for each value, among which its rows are divided as by dirichlet. `least` is the fewest rows a
    client may have; a value of a column with fewer is left out.
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
    table: Dataset, partition: Partition, *, seed: int, label: str = ""
) -> dict[str, Dataset]:
    """Each client's rows, in the table's order; no row is at two clients.

    Clients are called client-00 and so on, or by their value of the column, with -0, -1 and so on
    after it if there are several for each. Every row is at some client, except where a partition
    by column leaves values out. `label` names the column that dirichlet and pathological divide
    by, unless the partition names its own `column`.
    """
    if partition.by == "column":
        held = _by_column(table, partition)
        if partition.each > 1:
            held = _each_divided(table, held, partition, seed=seed, label=label)
        return {name: rows(table, share) for name, share in held.items()}
    if partition.clients * max(partition.least, 1) > len(table):
        raise DataError(
            f"{len(table)} rows cannot give {partition.clients} clients {max(partition.least, 1)} "
            "each: ask for fewer clients, or for a smaller least"
        )
    if partition.by == "iid":
        shares = _iid(len(table), partition, seed)
    else:
        codes = _codes(values(table, _label_column(partition, label)))
        draw = _dirichlet if partition.by == "dirichlet" else _pathological
        shares = draw(codes, partition, seed)
    width = max(2, len(str(len(shares) - 1)))
    return {f"client-{i:0{width}}": rows(table, sorted(s)) for i, s in enumerate(shares)}


def _label_column(partition: Partition, label: str) -> str:
    column = partition.column or label
    if not column:
        raise DataError(f"a partition by {partition.by} needs the column of labels: name it")
    return column


def _codes(found: list[Any]) -> list[int]:
    """Each value's place among the sorted values."""
    try:
        places = {value: place for place, value in enumerate(sorted(set(found)))}
    except TypeError as error:
        raise DataError(f"values such as {found[0]!r} are no labels to divide by") from error
    return [places[value] for value in found]


def _numbered(codes: Sequence[int]) -> Dataset:
    """A table of labels and row numbers: all that a partitioner needs to see."""
    from datasets import Dataset

    return Dataset.from_dict({"label": list(codes), "row": list(range(len(codes)))})


def _taken(partitioner: Any, table: Dataset, count: int) -> list[list[int]]:
    partitioner.dataset = table
    with warnings.catch_warnings():  # it warns at each draw it repeats; we report the last
        warnings.simplefilter("ignore")
        return [list(partitioner.load_partition(number)["row"]) for number in range(count)]


def _iid(rows: int, partition: Partition, seed: int) -> list[list[int]]:
    from flwr_datasets.partitioner import IidPartitioner

    # It cuts the table as it stands, so the table is shuffled first.
    table = _numbered([0] * rows).shuffle(seed=seed, keep_in_memory=True)
    return _taken(IidPartitioner(partition.clients), table, partition.clients)


def _dirichlet(codes: list[int], partition: Partition, seed: int) -> list[list[int]]:
    from flwr_datasets.partitioner import DirichletPartitioner

    partitioner = DirichletPartitioner(
        num_partitions=partition.clients,
        partition_by="label",
        alpha=float(partition.alpha),
        min_partition_size=partition.least,
        seed=seed,
    )
    try:
        return _taken(partitioner, _numbered(codes), partition.clients)
    except ValueError as error:
        raise DataError(
            f"no division of {len(codes)} rows by dirichlet with alpha = {partition.alpha} gave "
            f"each of {partition.clients} clients {partition.least} rows, in eleven draws: raise "
            "alpha, or ask for fewer clients or a smaller least"
        ) from error


def _pathological(codes: list[int], partition: Partition, seed: int) -> list[list[int]]:
    """Cut the labels into one shard for each class of each client, and deal these out."""
    from flwr_datasets.partitioner import PathologicalPartitioner

    labels, shards = max(codes) + 1, partition.clients * partition.classes
    if partition.classes > labels or shards < labels:
        raise DataError(
            f"{partition.clients} clients with {partition.classes} labels each cannot hold "
            f"{labels} labels: classes must be at most {labels}, and clients times classes at least"
        )
    partitioner = PathologicalPartitioner(
        num_partitions=shards,
        partition_by="label",
        num_classes_per_partition=1,
        class_assignment_mode="deterministic",
        seed=seed,
    )
    try:
        cut = _taken(partitioner, _numbered(codes), shards)
    except ValueError as error:
        raise DataError(
            f"a label has fewer rows than its share of {partition.clients} clients with "
            f"{partition.classes} labels each: ask for fewer clients or classes"
        ) from error
    shares = [[row for s in hand for row in cut[s]] for hand in _deal(labels, partition, seed)]
    fewest = min(map(len, shares))
    if fewest < partition.least:
        raise DataError(
            f"a client would get {fewest} rows, fewer than least = {partition.least}: ask for "
            f"fewer than {partition.clients} clients, or for a smaller least"
        )
    return shares


def _deal(labels: int, partition: Partition, seed: int) -> list[list[int]]:
    """The shards of each client, no two of one label: shard s is of label s modulo `labels`.

    Each label's shards go to the clients with the most room, which always comes out even.
    """
    import numpy as np

    draw = np.random.default_rng(seed)
    hands: list[list[int]] = [[] for _ in range(partition.clients)]
    for label in draw.permutation(labels).tolist():
        shards = range(label, partition.clients * partition.classes, labels)
        order = draw.permutation(partition.clients).tolist()
        emptiest = sorted(order, key=lambda client: len(hands[client]))
        for shard, client in zip(shards, emptiest, strict=False):
            hands[client].append(shard)
    return hands


def _by_column(table: Dataset, partition: Partition) -> dict[str, list[int]]:
    """The rows of each value of the column that is large enough."""
    held: dict[Any, list[int]] = {}
    for row, value in enumerate(values(table, partition.column)):
        # NaN differs from itself: it would be another client in every row, all of one name.
        if not isinstance(value, Hashable) or value != value:
            raise DataError(f"column {partition.column!r} holds {value!r}, which is no client")
        held.setdefault(value, []).append(row)
    enough = {value: rows for value, rows in held.items() if len(rows) >= partition.least}
    largest = sorted(enough, key=lambda value: (-len(enough[value]), value))
    if not largest or len(largest) < partition.clients:
        raise DataError(
            f"column {partition.column!r} has {len(largest)} values with {partition.least} rows or "
            f"more, and {partition.clients} clients are asked for: ask for fewer, or lower least"
        )
    kept = sorted(largest[: partition.clients or None])
    return {str(value): enough[value] for value in kept}


def _each_divided(
    table: Dataset, held: dict[str, list[int]], partition: Partition, *, seed: int, label: str
) -> dict[str, list[int]]:
    """The rows of each value among its clients, by a draw that no other value changes."""
    if not label:
        raise DataError(f"each = {partition.each} divides by labels: name their column")
    found, fewest = values(table, label), partition.each * max(partition.least, 1)
    inner = replace(partition, by="dirichlet", clients=partition.each, each=1)
    shares: dict[str, list[int]] = {}
    for value, held_rows in held.items():
        if len(held_rows) < fewest:
            raise DataError(
                f"{len(held_rows)} rows with {partition.column} = {value} cannot give "
                f"{partition.each} clients {max(partition.least, 1)} each: lower each or least, or "
                "leave that value out by a smaller number of clients"
            )
        codes = _codes([found[row] for row in held_rows])
        own_seed = streams.seed("each", seed, value) % 2**32
        for place, share in enumerate(_dirichlet(codes, inner, own_seed)):
            shares[f"{value}-{place}"] = sorted(held_rows[i] for i in share)
    return shares


def halve(table: Dataset, *, share: float, seed: int) -> tuple[Dataset, Dataset]:
    """A client's own rows to train on, about this share of them, and the others to test on.

    Each side has at least one row if there are two; a single row is for training.
    """
    import numpy as np

    if not 0 < share < 1:
        raise DataError(f"share = {share} of the rows to train on: it must be between 0 and 1")
    count = len(table)
    order = np.random.default_rng(seed).permutation(count).tolist()
    first = max(min(round(share * count), count - 1), min(count, 1))
    return rows(table, sorted(order[:first])), rows(table, sorted(order[first:]))
