# SPDX-License-Identifier: Apache-2.0
"""Split of a study's rows: each client's rows to train on, to choose on and to test.

No test or validation row is trained on by any client. All rows with an equal value in `data.group`
are on one side; equal rows of different groups may then be on both. Under differential privacy, no
row decides which other rows are used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from fedplan.data.partition import Partition, partition_table, training_mask
from fedplan.data.row_digests import example_digests, group_digests
from fedplan.data.tables import DataError, label_text, missing_cells, select_rows
from fedplan.data.tasks.definition import Task
from fedplan.data.tasks.kinds import task_class
from fedplan.studies.schema import Study

if TYPE_CHECKING:
    from datasets import Dataset


class ClientRows(NamedTuple):
    """Row numbers of one client: to train on, to choose on (validation) and to test."""

    train: list[int]
    validation: list[int]
    test: list[int]


def task_columns(task: Task) -> list[str]:
    """Return the columns of inputs and label."""
    return [*task.columns, *([task.label] if task.label else [])]


def split_rows(study: Study, task: Task, table: Dataset, site: str = "") -> dict[str, ClientRows]:
    """Return the rows of each client by name; equal rows, and all of a group, are on one side.

    `site`: name of the only client, which gets all rows.
    """
    section, seed = study.data, study.seed
    digests = example_digests(table, task_columns(task))
    if section.group:
        digests = group_digests(table, section.group, digests)
    in_test = ~training_mask(digests, fraction=1 - section.holdout_fraction, seed=seed)
    fraction = 1 - section.validation_fraction
    in_validation = ~training_mask(digests, fraction=fraction, seed=seed, held_out="validation")
    if site:
        indices = {site: list(range(len(table)))}
    else:
        partition = Partition(
            kind=section.partition,
            num_clients=section.num_clients,
            column=section.partition_column,
            alpha=section.alpha,
            classes_per_client=section.classes_per_client,
            min_examples=section.min_examples,
            clients_per_value=section.clients_per_value,
        )
        public = _public_values(study, partition) if study.privacy is not None else None
        # A regression target is not a label to divide by: each number would be one.
        label = "" if task_class(study.task.kind).answer_kind == "number" else study.task.label
        indices = partition_table(
            table, partition, seed=seed, label=label, group=section.group, known_values=public
        )
    clients = dict[str, ClientRows]()
    for name, rows in indices.items():
        rest = [row for row in rows if not in_test[row]]
        train = [row for row in rest if not in_validation[row]]
        validation = [row for row in rest if in_validation[row]]
        clients[name] = ClientRows(train, validation, [row for row in rows if in_test[row]])
    return clients


def drop_incomplete(
    study: Study, table: Dataset, kind: str = "training"
) -> tuple[Dataset, list[str]]:
    """Drop the rows without a value in a column of inputs, labels or clients; return notes, too.

    With privacy all rows are kept: how many are incomplete would be revealed. Raises DataError for
    an unknown column, or if no row is left.
    """
    if study.privacy is not None:
        return table, []
    task, section = study.task, study.data
    columns = [*task.input_columns, *([task.label] if task.label else [])]
    if section.partition == "column" and section.path and kind == "training":
        columns.append(section.partition_column)
    missing = {column: missing_cells(table, column) for column in dict.fromkeys(columns)}
    rows = [row for row, cells in enumerate(zip(*missing.values(), strict=True)) if not any(cells)]
    if len(rows) == len(table):
        return table, []
    counts = ", ".join(f"{column!r}: {sum(each)}" for column, each in missing.items() if any(each))
    if not rows:
        raise DataError(f"every {kind} row lacks a value ({counts}): name other columns")
    dropped = len(table) - len(rows)
    note = f"{dropped} of {len(table)} {kind} rows lack a value ({counts}), and are left out."
    return select_rows(table, rows), [note]


def drop_common(
    study: Study,
    task: Task,
    table: Dataset,
    test: Dataset | None,
    validation: Dataset | None = None,
    *,
    kind: str = "training",
) -> tuple[Dataset, list[str]]:
    """Drop the rows that, or whose group, are in the common test or validation set too; with notes.

    Raises DataError if no row is left, but not with privacy.
    """
    # Training rows are dropped, not test rows: every site knows the test set, but nobody knows the
    # rows of all sites.
    columns, group = task_columns(task), study.data.group
    digests, notes = example_digests(table, columns), list[str]()
    groups = group_digests(table, group, digests) if group else []
    common_rows, common_groups = set[bytes](), set[bytes]()
    sets = {"test": test, "validation": validation}
    common = {name: other for name, other in sets.items() if other is not None}
    for name, other in common.items():
        other_digests = example_digests(other, columns)
        common_rows.update(other_digests)
        if group in other.column_names:
            common_groups.update(group_digests(other, group, other_digests))
        elif group:
            notes.append(
                f"The common {name} set has no column {group!r}: whether its groups are among "
                f"the {kind} rows is not known."
            )
    rows = [
        row
        for row, digest in enumerate(digests)
        if digest not in common_rows and not (group and groups[row] in common_groups)
    ]
    dropped = len(table) - len(rows)
    where = f"in the common {' or '.join(common)} set too"
    if dropped and not rows and study.privacy is None:
        raise DataError(
            f"all {dropped} {kind} rows are {where}: choose other test rows by data.test_split, "
            "data.test_filter or data.test_path, or leave these out"
        )
    if dropped:
        or_group = f", or others of the same {group!r} are" if group else ""
        notes.append(f"{dropped} {kind} rows are {where}{or_group}, and are left out.")
    return select_rows(table, rows), notes


def _public_values(study: Study, partition: Partition) -> list[str]:
    """Return the column values that define clients, as the study lists them; never reads the data.

    Raises DataError if neither `data.filter`, `clients.names` nor `task.labels` lists the values.
    """
    column = partition.column or study.task.label
    if partition.kind in ("iid", "dirichlet"):
        return []
    values: list[Any] = study.data.filter.get(column, [])
    if not values and partition.kind == "column" and partition.clients_per_value == 1:
        values = study.clients.names
    if not values and column == study.task.label:
        values = study.task.labels
    if not values:
        raise DataError(
            f"with [privacy], the values of column {column!r} must not be read from the data: list "
            f"all of them in data.filter, as filter = {{ {column} = [...] }}"
        )
    return list(dict.fromkeys(map(label_text, values)))
