# SPDX-License-Identifier: Apache-2.0
"""Data of a study: load its dataset, and divide it into each client's training and test examples.

No test example is trained on by any client. Under differential privacy, no example decides which
other examples are used.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

from fedplan.data.examples import Examples
from fedplan.data.metrics import metric_named
from fedplan.data.partition import (
    Partition,
    example_digests,
    partition_table,
    sample_rows,
    training_mask,
)
from fedplan.data.tables import (
    DataError,
    class_names,
    column_values,
    filter_rows,
    label_names,
    label_text,
    label_values,
    load_table,
    matches_any,
    plain_cells,
    require_column,
    select_rows,
)
from fedplan.data.tasks.definition import Task
from fedplan.data.tasks.kinds import make_task, task_class
from fedplan.federation.ledger.digests import examples_digest
from fedplan.studies.schema import Study

if TYPE_CHECKING:
    from datasets import Dataset


@dataclass(frozen=True)
class FederatedData:
    """Prepared (tokenized or resized) examples of all clients, and the task that prepared these.

    `client_tests`: held-out examples, for clients that have any. `common_test`: the examples on
    which the global model is evaluated. `notes`: sentences for the user about the data. `left_out`:
    at a site, a sentence about rows that do not fit the study; it must stay there.
    """

    train: dict[str, Examples]
    client_tests: dict[str, Examples]
    common_test: Examples | None
    task: Task
    notes: tuple[str, ...] = ()
    left_out: str = ""

    @cached_property
    def digests(self) -> dict[str, str]:
        """Digest of each client's training examples."""
        return {name: examples_digest(examples) for name, examples in self.train.items()}


NO_TEST = (
    "No common test set, so the global model is not evaluated: set data.test_split, "
    "data.test_filter or data.test_path to have one."
)
"""Note of a study without a common test set."""
EMPTY_CLIENTS = "clients have no training example, and take no part."
"""End of the note on clients that are left out."""
TRUNCATING_TASKS = ("causal-lm", "masked-lm")
"""Tasks that would otherwise split a long text into several examples."""
TRUNCATION_NOTE = "Each text is one example: longer texts are truncated to {} tokens."
"""Note under example-level differential privacy."""


def load_federated_data(study: Study, site_table: tuple[str, Dataset] | None) -> FederatedData:
    """Load a study's dataset, divide the rows among clients, and prepare all examples.

    `site_table`: at a client's site, the client's name and own dataset, in place of `data.path`;
    this client gets all rows. With neither, the result has no clients, only common test set and
    task. Clients without training examples are dropped, but not under differential privacy. At a
    site under differential privacy, rows that do not fit the study are left out: an error would
    tell the server what rows hold. Raises DataError for other data that the study cannot use.
    """
    if study.data.from_python:
        raise DataError("this study has in-memory data: there is none to load")
    test = _load_common_test(study)
    table = _load_train_table(study, site_table[1] if site_table else None)
    task = _make_task(study, _find_labels(study, [t for t in (table, test) if t is not None]))
    notes = [] if test is not None else [NO_TEST]
    if task.one_example_per_row and task.kind in TRUNCATING_TASKS:
        notes.append(TRUNCATION_NOTE.format(task.max_length))
    notes += task.notes
    train, client_tests, left_out = dict[str, Examples](), dict[str, Examples](), ""
    if table is not None:
        try:
            train, client_tests, overlap_notes = _prepare(study, task, table, test, site_table)
        except Exception:
            if study.privacy is None or site_table is None:
                raise
            table, left_out = _leave_out_unfit(task, table)
            train, client_tests, overlap_notes = _prepare(study, task, table, test, site_table)
        # Under differential privacy, counts of examples and empty clients are not revealed.
        notes += [] if study.privacy else [*overlap_notes, *_drop_empty_clients(train, site_table)]
    nonempty_tests = {
        name: examples for name, examples in client_tests.items() if len(examples) and name in train
    }
    common_test = task.prepare(test) if test else None
    return FederatedData(train, nonempty_tests, common_test, task, tuple(notes), left_out)


def _prepare(
    study: Study,
    task: Task,
    table: Dataset,
    test: Dataset | None,
    site_table: tuple[str, Dataset] | None,
) -> tuple[dict[str, Examples], dict[str, Examples], list[str]]:
    """Divide the rows of a table among clients and prepare them; return (train, tests, notes)."""
    train, client_tests = dict[str, Examples](), dict[str, Examples]()
    table, fingerprints, notes = _drop_tested(study, task, table, test)
    task_table = table.select_columns(_task_columns(task))
    for name, (train_rows, test_rows) in _split_rows(
        study, table, fingerprints, site_table
    ).items():
        train[name] = task.prepare(select_rows(task_table, train_rows))
        client_tests[name] = task.prepare(select_rows(task_table, test_rows))
    return train, client_tests, notes


def _leave_out_unfit(task: Task, table: Dataset) -> tuple[Dataset, str]:
    """Return the rows that a task can prepare and digest, each by itself, and a text on the others.

    Raises what does not depend on any row: a missing column, or a task that cannot prepare a table
    without rows.
    """
    columns = _task_columns(task)
    for column in columns:
        require_column(table, column)
    task_table = table.select_columns(columns)
    task.prepare(select_rows(task_table, []))
    names = class_names(table, task.label) if task.label else None
    has_labels = bool(task.label) and task.answer_kind in ("class", "labels")
    cells = cast("list[Any]", table[task.label][:]) if has_labels else []
    rows = [i for i, cell in enumerate(cells) if _is_labelled(cell, names, task.labels)]
    fault = f"column {task.label!r} has a value that is not one of the task's labels"

    def fitting(rows: list[int]) -> list[int]:
        nonlocal fault
        try:
            part = select_rows(task_table, rows)
            example_digests(part)
            task.prepare(part)
        except Exception as error:
            if len(rows) == 1:
                fault = str(error) or type(error).__name__
                return []
            middle = len(rows) // 2
            return [*fitting(rows[:middle]), *fitting(rows[middle:])]
        return rows

    kept = fitting(rows if has_labels else list(range(len(table))))
    count = len(table) - len(kept)
    text = f"{count} of {len(table)} rows do not fit the study and are left out; one of them: "
    return select_rows(table, kept), text + fault if count else ""


def _is_labelled(cell: Any, names: list[str] | None, labels: Iterable[str]) -> bool:
    """Whether a cell of the label column is one of the labels, or a list of some of them."""
    values = cast("list[Any]", cell) if isinstance(cell, list) else [cell]
    try:
        texts = {str(names[value]) if names else label_text(value) for value in values}
    except (IndexError, TypeError):
        return False
    return texts <= set(labels)


@dataclass(frozen=True)
class DataSplit:
    """Row numbers of a study's training table, by client, to train on and to hold out.

    Rows that are also in the common test set were removed from the table before.
    `labels`: the labels of each row, for classification tasks; else empty.
    """

    train: dict[str, list[int]]
    client_tests: dict[str, list[int]]
    labels: list[list[str]]
    common_test_size: int


def compute_split(study: Study) -> DataSplit:
    """Return the rows of each client, as a run would divide the rows, without tokenizing any.

    Reads the dataset. Raises DataError for a study without `data.path`, or for unusable data.
    """
    if not study.data.path:
        raise DataError(
            "data.path is empty: each site has its own dataset, or the data came from Python; give "
            "a study with data.path"
        )
    test, table = _load_common_test(study), cast("Dataset", _load_train_table(study, None))
    task = _make_task(study, _find_labels(study, [t for t in (table, test) if t is not None]))
    table, fingerprints, _ = _drop_tested(study, task, table, test)
    rows = _split_rows(study, table, fingerprints, None)
    has_classes = bool(task.label) and task.answer_kind in ("class", "labels")
    values = label_values(table, task.label) if has_classes else []
    labels = [cast("list[str]", value) if isinstance(value, list) else [value] for value in values]
    return DataSplit(
        {name: train_rows for name, (train_rows, _) in rows.items()},
        {name: test_rows for name, (_, test_rows) in rows.items()},
        labels,
        len(test) if test is not None else 0,
    )


def _split_rows(
    study: Study,
    table: Dataset,
    fingerprints: list[bytes],
    site_table: tuple[str, Dataset] | None,
) -> dict[str, tuple[list[int], list[int]]]:
    """Return, by client name, the row numbers to train on and the row numbers to hold out.

    `fingerprints`: a digest of each row; equal rows are on the same side. `site_table`: the only
    client and its dataset; that client gets all rows. Without `site_table`, the study's partition
    divides the rows among clients.
    """
    section = study.data
    in_train = training_mask(fingerprints, fraction=1 - section.holdout_fraction, seed=study.seed)
    if site_table is not None:
        indices = {site_table[0]: list(range(len(table)))}
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
            table, partition, seed=study.seed, label=label, known_values=public
        )
    return {
        name: ([row for row in rows if in_train[row]], [row for row in rows if not in_train[row]])
        for name, rows in indices.items()
    }


def _task_columns(task: Task) -> list[str]:
    return [*task.columns, *([task.label] if task.label else [])]


def _load_common_test(study: Study) -> Dataset | None:
    """Load the common test set of a study; None if the study defines no common test set."""
    section = study.data
    if not (section.test_path or section.test_split or section.test_filter):
        return None
    path = section.test_path or section.path
    if not path:
        raise DataError(
            "data.test_filter needs a dataset: set data.test_path, since data.path is empty"
        )
    table = filter_rows(load_table(path, split=section.test_split), section.test_filter)
    table = _filter_values(table, section.filter)
    if not len(table):
        raise DataError(
            f"the common test selects no row of {path!r}: change data.test_filter or data.filter"
        )
    limit = section.max_test_examples
    return sample_rows(table, limit, seed=study.seed) if limit else table


def _load_train_table(study: Study, site_rows: Dataset | None) -> Dataset | None:
    """Return the rows to train on and to hold out, from `site_rows` or else from `data.path`."""
    section, is_private = study.data, study.privacy is not None
    if section.max_examples and is_private:
        raise DataError(
            "data.max_examples cannot be used with [privacy]: removing one row would let another "
            "one in; select rows by a value of their own instead, in data.train_filter"
        )
    if site_rows is None and not section.path:
        return None
    table = site_rows
    if table is None:
        table = load_table(section.path, split=section.split, allow_empty=is_private)
    table = filter_rows(table, section.train_filter, allow_empty=is_private)
    table = _filter_values(table, section.filter, allow_missing=is_private)
    if not len(table) and not is_private:
        raise DataError("no row is left to train on: change data.train_filter or data.filter")
    limit = section.max_examples
    return sample_rows(table, limit, seed=study.seed) if limit else table


def _drop_tested(
    study: Study, task: Task, table: Dataset, test: Dataset | None
) -> tuple[Dataset, list[bytes], list[str]]:
    """Drop the rows of the training table that also occur in the study's common test set."""
    # Training rows are dropped, not test rows: every site knows the test set, but nobody knows the
    # rows of all sites.
    columns = _task_columns(task)
    fingerprints = example_digests(table, columns)
    tested = set(example_digests(test, columns)) if test is not None else set[bytes]()
    rows = [row for row, fingerprint in enumerate(fingerprints) if fingerprint not in tested]
    dropped = len(table) - len(rows)
    if dropped and not rows and study.privacy is None:
        raise DataError(
            f"all {dropped} training rows are in the common test set too: choose other test rows "
            "by data.test_split, data.test_filter or data.test_path, or leave these out"
        )
    note = f"{dropped} rows are in the common test set too, and are not trained on."
    remaining = [fingerprints[row] for row in rows]
    return select_rows(table, rows), remaining, [note] if dropped else []


def _drop_empty_clients(
    train: dict[str, Examples], site_table: tuple[str, Dataset] | None
) -> list[str]:
    """Delete clients without training examples from the dict `train`; return notes for the user."""
    empty = [name for name, examples in train.items() if not len(examples)]
    if site_table and empty:
        raise DataError(
            f"{site_table[0]} has no training example: all are held out for its test; lower "
            "data.holdout_fraction"
        )
    for name in empty:
        del train[name]
    if empty and not train:
        raise DataError(
            "no client has a training example: use fewer clients, or lower data.holdout_fraction"
        )
    return [f"{len(empty)} {EMPTY_CLIENTS}"] if empty else []


def _find_labels(study: Study, tables: list[Dataset]) -> list[str | int]:
    """Return the labels in the study, or else the labels in the tables; empty for other tasks.

    Under differential privacy, only class names of a table's schema are used, not values of rows;
    raises DataError if there are none.
    """
    column, labels = study.task.label, study.task.labels
    if labels or not column or task_class(study.task.kind).answer_kind not in ("class", "labels"):
        return labels
    if study.privacy is None:
        return cast("list[str | int]", label_names(tables, column))
    allowed = study.data.filter.get(column)
    for names in (class_names(table, column) for table in tables):
        if names:
            return [name for name in names if allowed is None or matches_any(name, allowed)]
    raise DataError(
        f"task.labels is empty: with [privacy], the labels of column {column!r} must not be read "
        "from the data; list all of them in task.labels"
    )


def _make_task(study: Study, labels: Iterable[str | int]) -> Task:
    """Return the task of a study with these labels; all other settings are those of the study."""
    section, privacy = study.task, study.privacy
    return make_task(
        section.kind,
        columns=section.input.split(),
        label=section.label,
        labels=labels,
        model=study.model.path or study.model.vision,
        tokenizer=section.tokenizer,
        max_length=section.max_length,
        image_size=section.image_size,
        template=section.prompt_template,
        one_example_per_row=privacy is not None and privacy.unit == "example",
        packing=section.packing,
        weights=section.class_weights,
        extra_metrics=map(metric_named, study.evaluate.metrics),
    )


def _public_values(study: Study, partition: Partition) -> list[str]:
    """Return the column values that define clients, as the study lists the values.

    Never reads the data. Empty for partitions that use no column. Raises DataError if neither
    `data.filter`, `clients.names` nor `task.labels` lists the values.
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


def _filter_values(
    table: Dataset, allowed_values: Mapping[str, list[Any]], *, allow_missing: bool = False
) -> Dataset:
    """Return the rows of a table with an allowed value in each listed column.

    A row without a value is an error, or left out with `allow_missing`.
    """
    for column, allowed in allowed_values.items():
        read = plain_cells if allow_missing else column_values
        values = read(table, column)
        table = select_rows(
            table, [row for row, value in enumerate(values) if matches_any(value, allowed)]
        )
    return table
