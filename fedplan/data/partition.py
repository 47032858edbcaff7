# SPDX-License-Identifier: Apache-2.0
"""Partition a table among clients, and split examples into training and test sets.

Every random choice about a row depends on the row's content and the seed only, so that a row that
is added or removed does not change the choices for other rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import isfinite
from typing import TYPE_CHECKING, cast

import numpy as np

from fedplan import seeds
from fedplan.data.row_digests import example_digests, group_digests, uniform_numbers
from fedplan.data.tables import (
    DataError,
    column_values,
    label_sort_key,
    label_text,
    label_values,
    select_rows,
)

if TYPE_CHECKING:
    from datasets import Dataset


PARTITION_KINDS = ("iid", "dirichlet", "pathological", "column")
"""The kinds of Partition."""
MAX_DRAWS = 100
"""Redraws of a partition until each client has `min_examples`, before an error is raised."""


@dataclass(frozen=True)
class Partition:
    """How to partition a table among clients; raises DataError if fields do not fit the `kind`.

    `iid`: at random, in `num_clients` about equal parts. `dirichlet`: the examples of each label in
    proportions drawn with `alpha`; a smaller alpha is more skewed. `pathological`: at most
    `classes_per_client` labels at each client. `column`: a client for each value of `column`, or
    for the `num_clients` most frequent values; with `clients_per_value` above 1, the examples of
    each value are divided among that many clients as by dirichlet. Each client has at least
    `min_examples`; values of a column with fewer are left out. Use `partition_examples`.
    """

    kind: str
    num_clients: int = 0
    column: str = ""
    alpha: float = 0.0
    classes_per_client: int = 0
    min_examples: int = 1
    clients_per_value: int = 1

    def __post_init__(self) -> None:
        if self.kind not in PARTITION_KINDS:
            raise DataError(
                f"there is no partition {self.kind!r}; there are {', '.join(PARTITION_KINDS)}"
            )
        self._require(self.num_clients >= (self.kind != "column"), "num_clients", "1 or more")
        self._require(self.min_examples >= 0, "min_examples", "0 or more")
        self._require(self.clients_per_value >= 1, "clients_per_value", "1 or more")
        self._require(
            self.clients_per_value == 1 or self.kind == "column",
            "clients_per_value",
            "1: only column takes more",
        )
        if self.kind == "dirichlet" or self.clients_per_value > 1:
            self._require(self.alpha > 0 and isfinite(self.alpha), "alpha", "above 0, such as 0.5")
        if self.kind == "pathological":
            self._require(self.classes_per_client >= 1, "classes_per_client", "1 or more")
        if self.kind == "column":
            self._require(bool(self.column), "column", "the name of a column")

    def _require(self, holds: bool, name: str, remedy: str) -> None:
        if not holds:
            value = getattr(self, name)
            raise DataError(
                f"a partition by {self.kind} has {name} = {value!r}: it must be {remedy}"
            )


def partition_examples(
    table: Dataset,
    partition: Partition,
    *,
    seed: int,
    label: str = "",
    group: str = "",
    known_values: Sequence[str] | None = None,
) -> dict[str, Dataset]:
    """Return the table of each client by name, with rows in the order of `table`.

    Arguments, names of clients and errors are those of `partition_table`.
    """
    indices = partition_table(
        table, partition, seed=seed, label=label, group=group, known_values=known_values
    )
    return {name: select_rows(table, rows) for name, rows in indices.items()}


def partition_table(
    table: Dataset,
    partition: Partition,
    *,
    seed: int,
    label: str = "",
    group: str = "",
    known_values: Sequence[str] | None = None,
) -> dict[str, list[int]]:
    """Return the row numbers of each client, by the client's name, in ascending order.

    The client of a row depends on the row's content and the seed only: equal rows have the same
    client, and a row that is added or removed moves no other. Clients are named client-00 and so
    on, or by their value of the column, followed by -0, -1 and so on with `clients_per_value`. Each
    row has one client, except that a partition by column may leave values out. `label` is the label
    column, for `clients_per_value` above 1, and for dirichlet and pathological if `partition` has
    no `column` of its own. Rows with the same value in the column `group` have one client, drawn by
    that value and the most frequent label of the group; a partition by column alone ignores it.

    `min_examples` and the choice of frequent values depend on the number of rows. If that must stay
    private, `known_values` are the labels, or the column's values, known beforehand: all are used,
    `min_examples` is ignored, and a client may have no rows. Raises DataError if the table cannot
    be partitioned this way.
    """
    if partition.kind == "column":
        return _by_column(
            table, partition, seed=seed, label=label, group=group, known_values=known_values
        )
    if known_values is None:
        _require_enough(len(table), partition)
    digests, labels = _unit_digests(table, group), list[str]()
    if partition.kind != "iid":
        column = partition.column or label
        if not column:
            raise DataError(f"a partition by {partition.kind} needs the label column: name it")
        labels = _label_texts(table, column)
        if group:
            labels = _group_labels(labels, digests, partition.kind, group)
    names = (
        list(known_values) if known_values is not None else sorted(set(labels), key=label_sort_key)
    )
    kinds = {"iid": _assign_iid, "dirichlet": _assign_dirichlet, "pathological": _assign_labels}
    assign = partial(kinds[partition.kind], digests, labels, names, partition)
    clients = _draw_until_enough(assign, seed, partition, require_min=known_values is None)
    width = max(2, len(str(partition.num_clients - 1)))
    return {f"client-{i:0{width}}": _rows_of(clients, i) for i in range(partition.num_clients)}


def _rows_of(assigned: np.ndarray, value: int | bool) -> list[int]:
    return np.flatnonzero(assigned == value).tolist()


def _require_enough(count: int, partition: Partition, of: str = "examples") -> None:
    if partition.num_clients * partition.min_examples > count:
        raise DataError(
            f"{count} {of} are too few for {partition.num_clients} clients with "
            f"{partition.min_examples} each: use fewer clients, or a smaller min_examples"
        )


Draw = tuple[int, int]
"""The seed, and the number of the draw."""


def _draw_until_enough(
    assign: Callable[[Draw], np.ndarray], seed: int, partition: Partition, *, require_min: bool
) -> np.ndarray:
    """Return the client number of each row, from the first draw with `min_examples` per client.

    With `require_min=False` that is the first draw. Raises DataError after MAX_DRAWS draws.
    """
    clients = assign((seed, 0))
    for number in range(1, MAX_DRAWS + 1):
        counts = np.bincount(clients, minlength=partition.num_clients)
        if not require_min or counts.min() >= partition.min_examples:
            return clients
        clients = assign((seed, number))
    alpha = f" with alpha = {partition.alpha}" if partition.alpha else ""
    raise DataError(
        f"in {MAX_DRAWS} draws, no partition of {len(clients)} examples by {partition.kind}{alpha} "
        f"gave each of {partition.num_clients} clients {partition.min_examples} examples: "
        f"{'raise alpha, or ' if alpha else ''}use fewer clients or a smaller min_examples"
    )


def _label_texts(table: Dataset, column: str) -> list[str]:
    labels = label_values(table, column)
    if lists := [label for label in labels if not isinstance(label, str)]:
        raise DataError(
            f"a table cannot be partitioned by values such as {lists[0]!r}: one label per row is "
            "needed"
        )
    return cast("list[str]", labels)


def _unit_digests(table: Dataset, group: str) -> list[bytes]:
    """Return the digest by which each row gets its client: of its group, or of the row itself."""
    digests = example_digests(table)
    return group_digests(table, group, digests) if group else digests


def _group_labels(labels: list[str], digests: list[bytes], kind: str, group: str) -> list[str]:
    """Return for each row the most frequent label of its group; of equally frequent, the first.

    Raises DataError if `kind` is pathological and a group has several labels: its client would get
    labels of another client.
    """
    counts = dict[bytes, Counter[str]]()
    for digest, label in zip(digests, labels, strict=True):
        counts.setdefault(digest, Counter())[label] += 1
    mixed = next((count for count in counts.values() if len(count) > 1), None)
    if mixed is not None and kind == "pathological":
        first, second, *_ = sorted(mixed, key=label_sort_key)
        raise DataError(
            f"a group of equal {group!r} has the labels {first!r} and {second!r}: a partition by "
            "pathological cannot keep it at one client; use dirichlet, or leave out the group"
        )
    by_group = {
        digest: min(count, key=lambda label: (-count[label], label_sort_key(label)))
        for digest, count in counts.items()
    }
    return [by_group[digest] for digest in digests]


# The `_assign_*` functions return the client number of each row, an int array. `digests` and
# `labels` are by row, `names` are all labels, and `draw` is the seed and number of the draw.


def _assign_iid(
    digests: list[bytes], labels: list[str], names: list[str], partition: Partition, draw: Draw
) -> np.ndarray:
    return (uniform_numbers(digests, "iid", *draw) * partition.num_clients).astype(int)


def _assign_dirichlet(
    digests: list[bytes], labels: list[str], names: list[str], partition: Partition, draw: Draw
) -> np.ndarray:
    uniform = uniform_numbers(digests, "dirichlet", *draw)
    label_array = np.array(labels, dtype=object)
    clients = np.zeros(len(digests), dtype=int)
    for label in set(labels):
        generator = np.random.default_rng(seeds.seed("dirichlet", *draw, label))
        bounds = generator.dirichlet([partition.alpha] * partition.num_clients).cumsum()
        rows = label_array == label
        clients[rows] = bounds.searchsorted(uniform[rows], side="right").clip(
            max=partition.num_clients - 1
        )
    return clients


def _assign_labels(
    digests: list[bytes], labels: list[str], names: list[str], partition: Partition, draw: Draw
) -> np.ndarray:
    """Give each client `classes_per_client` of the labels `names`.

    All labels have equally many clients, or one more: each label goes to the clients with the
    fewest labels so far.
    """
    if unknown := set(labels) - set(names):
        raise DataError(f"label {min(unknown)!r} is not one of the labels {', '.join(names)}")
    count, shards = len(names), partition.num_clients * partition.classes_per_client
    if partition.classes_per_client > count or shards < count:
        raise DataError(
            f"{count} labels cannot be divided among {partition.num_clients} clients with "
            f"{partition.classes_per_client} labels each: classes_per_client must be at most "
            f"{count}, and clients times classes_per_client at least {count}"
        )
    generator = np.random.default_rng(seeds.seed("deal", *draw))
    label_counts, clients_by_label = [0] * partition.num_clients, dict[str, list[int]]()
    for index in cast("list[int]", generator.permutation(count).tolist()):
        order = cast("list[int]", generator.permutation(partition.num_clients).tolist())
        fewest_first = sorted(order, key=lambda client: label_counts[client])
        chosen = fewest_first[: len(range(index, shards, count))]
        clients_by_label[names[index]] = chosen
        for client in chosen:
            label_counts[client] += 1
    clients = list[int]()
    for label, number in zip(labels, uniform_numbers(digests, "pathological", *draw), strict=True):
        candidates = clients_by_label[label]
        clients.append(candidates[int(number * len(candidates))])
    return np.array(clients, dtype=int)


def _by_column(
    table: Dataset,
    partition: Partition,
    *,
    seed: int,
    label: str,
    group: str,
    known_values: Sequence[str] | None,
) -> dict[str, list[int]]:
    rows_by_value = dict[str, list[int]]()
    for row, value in enumerate(column_values(table, partition.column)):
        if not isinstance(value, Hashable):
            raise DataError(f"column {partition.column!r} has {value!r}, which names no client")
        rows_by_value.setdefault(label_text(value), []).append(row)
    count, least = partition.num_clients, partition.min_examples
    if known_values is None:
        values = [name for name, rows in rows_by_value.items() if len(rows) >= least]
        if not values or len(values) < count:
            raise DataError(
                f"column {partition.column!r} has {len(values)} values with {least} examples or "
                f"more, too few for {count} clients: use fewer clients, or a smaller min_examples"
            )
        values.sort(key=lambda name: (-len(rows_by_value[name]), label_sort_key(name)))
        values = values[: count or None]
    else:
        values = known_values
        if count not in (0, len(values)):
            raise DataError(
                f"column {partition.column!r} has {len(values)} known values, but the partition "
                f"has {count} clients: with privacy, the most frequent values must not be chosen, "
                f"so set num_clients = {len(values)}"
            )
    chosen = {value: rows_by_value.get(value, []) for value in sorted(values, key=label_sort_key)}
    if partition.clients_per_value == 1:
        return chosen
    require_min = known_values is None
    return _divide_values(
        table, chosen, partition, seed=seed, label=label, group=group, require_min=require_min
    )


def _divide_values(
    table: Dataset,
    rows_by_value: Mapping[str, list[int]],
    partition: Partition,
    *,
    seed: int,
    label: str,
    group: str,
    require_min: bool,
) -> dict[str, list[int]]:
    """Divide the rows of each value among `clients_per_value` clients, by labels as dirichlet."""
    if not label:
        raise DataError(
            f"clients_per_value = {partition.clients_per_value} needs the label column: name it"
        )
    digests, labels = _unit_digests(table, group), _label_texts(table, label)
    inner = replace(
        partition, kind="dirichlet", num_clients=partition.clients_per_value, clients_per_value=1
    )
    rows_by_client = dict[str, list[int]]()
    for value, rows in rows_by_value.items():
        if require_min:
            _require_enough(len(rows), inner, f"examples with {partition.column} = {value}")
        value_digests, value_labels = [digests[row] for row in rows], [labels[row] for row in rows]
        if group:
            value_labels = _group_labels(value_labels, value_digests, inner.kind, group)
        assign = partial(_assign_dirichlet, value_digests, value_labels, [], inner)
        value_seed = seeds.seed("each", seed, value)
        clients = _draw_until_enough(assign, value_seed, inner, require_min=require_min)
        for number in range(partition.clients_per_value):
            rows_by_client[f"{value}-{number}"] = [rows[i] for i in _rows_of(clients, number)]
    return rows_by_client


def training_mask(
    digests: Sequence[bytes], *, fraction: float, seed: int, held_out: str = "own test"
) -> np.ndarray:
    """Return a boolean array by digest: whether to train on an example, true for about `fraction`.

    Equal examples are on one side, also at different clients. `held_out` names the other side; each
    name gives an independent choice. Raises DataError if not 0 < fraction <= 1.
    """
    if not 0 < fraction <= 1:
        raise DataError(f"the training fraction is {fraction}: it must be above 0 and at most 1")
    return uniform_numbers(digests, held_out, seed) < fraction


def sample_rows(table: Dataset, max_rows: int, *, seed: int) -> Dataset:
    """Return at most `max_rows` rows, drawn by content and seed, in the order of the table."""
    if len(table) <= max_rows:
        return table
    order = uniform_numbers(example_digests(table), "limit", seed).argsort(kind="stable")
    return select_rows(table, sorted(order[:max_rows].tolist()))
