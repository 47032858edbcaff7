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

from fedplan.data.example_digests import example_digests
from fedplan.data.examples import Examples
from fedplan.data.metrics import metric_named
from fedplan.data.partition import Partition, partition_table, sample_rows, training_mask
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
    select_rows,
)
from fedplan.data.tasks import Task, make_task, task_class
from fedplan.federation.digests import examples_digest
from fedplan.studies.schema import Study

if TYPE_CHECKING:
    from datasets import Dataset


@dataclass(frozen=True)
class FederatedData:
    """Prepared examples of all clients.

    `train`: training examples by client.
    `client_tests`: held-out examples by client, for clients that have any.
    `common_test`: the common test set, or None.
    `notes`: messages for the user about the data.
    """

    train: dict[str, Examples]
    client_tests: dict[str, Examples]
    common_test: Examples | None
    task: Task
    notes: tuple[str, ...] = ()

    @cached_property
    def digests(self) -> dict[str, str]:
        """Digest of each client's training examples."""
        return {name: examples_digest(examples) for name, examples in self.train.items()}


NO_TEST = (
    "No common test set, so the global model is not evaluated: set data.test_split, "
    "data.test_filter or data.test_path to have one."
)
"""Note of a study without a common test set."""
TRUNCATING_TASKS = ("causal-lm", "masked-lm")
"""Tasks that would otherwise split a long text into several examples."""
TRUNCATION_NOTE = "Each text is one example: longer texts are truncated to {} tokens."
"""Note under example-level differential privacy."""


def load_federated_data(study: Study, site_table: tuple[str, Dataset] | None) -> FederatedData:
    """Load and prepare the data of a study.

    `site_table`: at a site, its name and its own dataset, which replaces `data.path`. Without
    either there are no clients, only the common test and the task. Raises DataError for data that
    the study cannot use, or a study of in-memory data.
    """
    if study.data.from_python:
        raise DataError("this study has in-memory data: there is none to load")
    test, table = (
        _load_common_test(study),
        _load_train_table(study, site_table[1] if site_table else None),
    )
    study_task = _make_task(study, _find_labels(study, [t for t in (table, test) if t is not None]))
    notes = [] if test is not None else [NO_TEST]
    notes += (
        [TRUNCATION_NOTE.format(study_task.max_length)]
        if study_task.one_example_per_row and study_task.kind in TRUNCATING_TASKS
        else []
    )
    notes += study_task.notes
    train, client_tests = dict[str, Examples](), dict[str, Examples]()
    if table is not None:
        table, fingerprints, overlap_notes = _drop_tested(
            table, test, study_task, allow_empty=study.privacy is not None
        )
        train, client_tests = _prepare_clients(study, table, fingerprints, site_table, study_task)
        # Under differential privacy, counts of examples and empty clients are not revealed.
        notes += [] if study.privacy else [*overlap_notes, *_drop_empty_clients(train, site_table)]
    nonempty_tests = {
        name: examples for name, examples in client_tests.items() if len(examples) and name in train
    }
    return FederatedData(
        train, nonempty_tests, study_task.prepare(test) if test else None, study_task, tuple(notes)
    )


@dataclass(frozen=True)
class DataSplit:
    """Row numbers of a study's dataset, by client.

    `train`, `client_tests`: rows of the training table that a client trains on, and holds out.
    `labels`: the labels of each row, for classification tasks; else empty.
    `common_test_size`: number of examples of the common test set.
    """

    train: dict[str, list[int]]
    client_tests: dict[str, list[int]]
    labels: list[list[str]]
    common_test_size: int


def compute_split(study: Study) -> DataSplit:
    """Return the rows of each client, as a run would divide them, without tokenizing any example.

    Raises DataError for a study without `data.path`.
    """
    if not study.data.path:
        raise DataError(
            "data.path is empty: each site has its own dataset, or the data came from Python; give "
            "a study with data.path"
        )
    test, table = _load_common_test(study), cast("Dataset", _load_train_table(study, None))
    study_task = _make_task(study, _find_labels(study, [t for t in (table, test) if t is not None]))
    table, fingerprints, _ = _drop_tested(
        table, test, study_task, allow_empty=study.privacy is not None
    )
    in_train = training_mask(
        fingerprints, fraction=1 - study.data.holdout_fraction, seed=study.seed
    )
    indices = _client_indices(study, table, None)
    train, client_tests = (
        {
            name: [row for row in numbers if bool(in_train[row]) == train_side]
            for name, numbers in indices.items()
        }
        for train_side in (True, False)
    )
    has_classes = bool(study_task.label) and study_task.answer_kind in ("class", "labels")
    values = label_values(table, study_task.label) if has_classes else []
    labels = [cast("list[str]", value) if isinstance(value, list) else [value] for value in values]
    return DataSplit(train, client_tests, labels, len(test) if test is not None else 0)


def _prepare_clients(
    study: Study,
    table: Dataset,
    fingerprints: list[bytes],
    site_table: tuple[str, Dataset] | None,
    study_task: Task,
) -> tuple[dict[str, Examples], dict[str, Examples]]:
    """Return the prepared training examples and held-out examples, each by client.

    `fingerprints`: content of each row; equal rows fall on the same side.
    """
    in_train = training_mask(
        fingerprints, fraction=1 - study.data.holdout_fraction, seed=study.seed
    )
    task_table = table.select_columns(_task_columns(study_task))
    train, client_tests = dict[str, Examples](), dict[str, Examples]()
    for name, numbers in _client_indices(study, table, site_table).items():
        sides = ([row for row in numbers if in_train[row] == side] for side in (True, False))
        train[name], client_tests[name] = (
            study_task.prepare(select_rows(task_table, side)) for side in sides
        )
    return train, client_tests


def _task_columns(study_task: Task) -> list[str]:
    """Return the input columns and the label column of a task."""
    return [*study_task.columns, *([study_task.label] if study_task.label else [])]


def _load_common_test(study: Study) -> Dataset | None:
    """Load the common test set; None if the study defines none.

    Raises DataError if it has no path or no row.
    """
    section = study.data
    if not (section.test_path or section.test_split or section.test_filter):
        return None
    path = section.test_path or section.path
    if not path:
        raise DataError(
            "data.test_filter needs a dataset: set data.test_path, since data.path is empty"
        )
    table = _filter_values(
        filter_rows(load_table(path, split=section.test_split), section.test_filter), section.filter
    )
    if not len(table):
        raise DataError(
            f"the common test selects no row of {path!r}: change data.test_filter or data.filter"
        )
    return (
        sample_rows(table, section.max_test_examples, seed=study.seed)
        if section.max_test_examples
        else table
    )


def _load_train_table(study: Study, site_rows: Dataset | None) -> Dataset | None:
    """Return the rows that clients train on and hold out, as selected by the study.

    They come from `site_rows` (a site's own dataset) or from `data.path`; returns None without
    either. Raises DataError if no row is left (except under differential privacy), or for
    `data.max_examples` under differential privacy.
    """
    section = study.data
    if section.max_examples and study.privacy is not None:
        raise DataError(
            "data.max_examples cannot be used with [privacy]: removing one row would let another "
            "one in; select rows by a value of their own instead, in data.train_filter"
        )
    if site_rows is None and not section.path:
        return None
    allow_empty = study.privacy is not None
    table = (
        site_rows
        if site_rows is not None
        else load_table(section.path, split=section.split, allow_empty=allow_empty)
    )
    table = _filter_values(
        filter_rows(table, section.train_filter, allow_empty=allow_empty), section.filter
    )
    if not len(table) and not allow_empty:
        raise DataError("no row is left to train on: change data.train_filter or data.filter")
    return (
        sample_rows(table, section.max_examples, seed=study.seed) if section.max_examples else table
    )


def _drop_tested(
    table: Dataset, test: Dataset | None, study_task: Task, *, allow_empty: bool
) -> tuple[Dataset, list[bytes], list[str]]:
    """Drop training rows that also occur in the common test set.

    Returns the remaining rows, their content fingerprints, and notes for the user. Rows are
    compared by the columns that the task uses. Raises DataError if no row is left, unless
    `allow_empty`.
    """
    # Training rows are dropped, not test rows: every site knows the test set, but nobody knows the
    # rows of all sites.
    columns = _task_columns(study_task)
    fingerprints = example_digests(table, columns)
    test_fingerprints = set(example_digests(test, columns)) if test is not None else set[bytes]()
    kept_rows = [
        row for row, fingerprint in enumerate(fingerprints) if fingerprint not in test_fingerprints
    ]
    dropped = len(table) - len(kept_rows)
    if dropped and not kept_rows and not allow_empty:
        raise DataError(
            f"all {dropped} training rows are in the common test set too: choose other test rows "
            "by data.test_split, data.test_filter or data.test_path, or leave these out"
        )
    notes = (
        [f"{dropped} rows are in the common test set too, and are not trained on."]
        if dropped
        else []
    )
    return select_rows(table, kept_rows), [fingerprints[row] for row in kept_rows], notes


def _drop_empty_clients(
    train: dict[str, Examples], site_table: tuple[str, Dataset] | None
) -> list[str]:
    """Remove clients without training examples from `train`, and return notes for the user.

    Raises DataError if no client is left, or if this site has no training example.
    """
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
    return [f"{len(empty)} clients have no training example, and take no part."] if empty else []


def _find_labels(study: Study, tables: list[Dataset]) -> list[str | int]:
    """Return the labels of the study, or those found in its tables.

    Under differential privacy, only labels from a table's schema are used; raises DataError if
    there are none.
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
    """Return the task of a study, with its tokenizer or image settings."""
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


def _client_indices(
    study: Study, table: Dataset, site_table: tuple[str, Dataset] | None
) -> dict[str, list[int]]:
    """Return the row numbers of each client; at a site, all rows."""
    if site_table is not None:
        return {site_table[0]: list(range(len(table)))}
    section = study.data
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
    return partition_table(table, partition, seed=study.seed, label=label, known_values=public)


def _public_values(study: Study, partition: Partition) -> list[str]:
    """Return the column values that define clients, as listed in the study, not read from the data.

    Empty for partitions that use no column. Raises DataError if the study does not list them.
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


def _filter_values(table: Dataset, allowed_values: Mapping[str, list[Any]]) -> Dataset:
    """Return the rows whose value of each listed column is allowed."""
    for column, allowed in allowed_values.items():
        values = column_values(table, column)
        table = select_rows(
            table, [row for row, value in enumerate(values) if matches_any(value, allowed)]
        )
    return table
