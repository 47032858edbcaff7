# SPDX-License-Identifier: Apache-2.0
"""Data of a study: load its dataset, and prepare each client's training and held-out examples.

Under differential privacy, no example decides which other examples are used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from fedplan.data.examples import Examples
from fedplan.data.metrics import metric_named
from fedplan.data.partition import sample_rows
from fedplan.data.row_digests import example_digests
from fedplan.data.tables import (
    ROW,
    DataError,
    class_names,
    filter_rows,
    label_names,
    label_text,
    load_table,
    matches_any,
    open_images,
    plain_cells,
    require_column,
    row_labels,
    select_rows,
    split_labels,
)
from fedplan.data.tasks.definition import Task
from fedplan.data.tasks.kinds import make_task, task_class
from fedplan.federation.ledger.digests import ExamplesSummary, summarize_examples
from fedplan.studies.data_split import (
    ClientRows,
    drop_common,
    drop_incomplete,
    split_rows,
    task_columns,
)
from fedplan.studies.schema import Study

if TYPE_CHECKING:
    from datasets import Dataset


@dataclass(frozen=True)
class FederatedData:
    """Prepared (tokenized or resized) examples of all clients, and the task that prepared these.

    `client_tests`: held-out examples, for clients that have any. `common_test`: the examples on
    which the global model is evaluated. `client_validations` and `common_validation`: the same for
    the examples on which something is chosen. `notes`: sentences for the user about the data.
    `test_groups`: the value of `data.group` of each test example, by client, and of the common test
    set by ""; empty without groups. `test_rows`: the row of each test example in the dataset's
    file, in the same way; empty if it is no single file, or with [privacy].
    `left_out`: at a site, a sentence about rows that do not fit the study; it must stay there.
    """

    train: dict[str, Examples]
    client_tests: dict[str, Examples]
    common_test: Examples | None
    task: Task
    notes: tuple[str, ...] = ()
    left_out: str = ""
    client_validations: dict[str, Examples] = field(default_factory=dict[str, Examples])
    common_validation: Examples | None = None
    test_groups: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    test_rows: dict[str, list[int]] = field(default_factory=dict[str, list[int]])

    def held_out(self, name: str) -> dict[str, Examples]:
        """Return a client's examples that are not trained on, as "test" and "validation"."""
        sets = {"test": self.client_tests, "validation": self.client_validations}
        return {kind: examples[name] for kind, examples in sets.items() if name in examples}

    @cached_property
    def train_summaries(self) -> dict[str, ExamplesSummary]:
        """Size, digest and label counts of each client's training examples."""
        return {name: summarize_examples(examples) for name, examples in self.train.items()}

    @property
    def digests(self) -> dict[str, str]:
        """Digest of each client's training examples."""
        return {name: summary.digest for name, summary in self.train_summaries.items()}


NO_TEST = (
    "No common test set: the global model is tested on all clients' test examples, and under "
    "differential privacy only with evaluate.noise_multiplier. Set data.test_split, "
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
    (table, test, validation), notes = _load_tables(study, site_table[1] if site_table else None)
    tables = [each for each in (table, test, validation) if each is not None]
    task = _make_task(study, _find_labels(study, tables))
    notes += [] if test is not None else [NO_TEST]
    if validation is not None:
        validation, validation_notes = drop_common(study, task, validation, test, kind="validation")
        notes += validation_notes
    if task.one_example_per_row and task.kind in TRUNCATING_TASKS:
        notes.append(TRUNCATION_NOTE.format(task.max_length))
    notes += task.notes
    clients, left_out = dict[str, ClientExamples](), ""
    if table is not None:
        common = (test, validation)
        try:
            clients, task, overlap_notes = _prepare(study, task, table, common, site_table)
        except Exception:
            if study.privacy is None or site_table is None:
                raise
            table, left_out = _leave_out_unfit(task, table)
            clients, task, overlap_notes = _prepare(study, task, table, common, site_table)
        if not study.privacy:  # else counts of examples and empty clients are not revealed
            notes += [*overlap_notes, *_drop_empty_clients(clients, site_table)]
    tested = {name: each for name, each in clients.items() if len(each.test)}
    return FederatedData(
        {name: examples.train for name, examples in clients.items()},
        {name: each.test for name, each in tested.items()},
        task.prepare(test) if test else None,
        task,
        tuple(notes),
        left_out,
        {name: each.validation for name, each in clients.items() if len(each.validation)},
        task.prepare(validation) if validation else None,
        {"": _groups(study, test), **{name: each.test_groups for name, each in tested.items()}},
        {"": _row_numbers(test), **{name: each.test_rows for name, each in tested.items()}},
    )


class ClientExamples(NamedTuple):
    """A client's examples to train on, to choose on and to test; groups and rows of the last."""

    train: Examples
    validation: Examples
    test: Examples
    test_groups: list[str]
    test_rows: list[int]


def _prepare(
    study: Study,
    task: Task,
    table: Dataset,
    common: tuple[Dataset | None, Dataset | None],
    site_table: tuple[str, Dataset] | None,
) -> tuple[dict[str, ClientExamples], Task, list[str]]:
    """Divide the rows of a table among clients and prepare them; return (clients, task, notes).

    The returned task has balanced class weights if the study asks for these.
    """
    table, notes = drop_common(study, task, table, *common)
    task_table = table.select_columns(task_columns(task))
    rows = split_rows(study, task, table, site_table[0] if site_table else "")
    if study.task.class_weights == "balanced":
        train_rows = [row for each in rows.values() for row in each.train]
        weights = _balanced_weights(task, select_rows(task_table, train_rows))
        task = replace(task, weights=weights)
        listed = ", ".join(f"{label} {weight:.3g}" for label, weight in weights)
        notes.append(f"Class weights: {listed}.")
    clients = dict[str, ClientExamples]()
    for name, each in rows.items():
        parts = [task.prepare(select_rows(task_table, part)) for part in each]
        tests = select_rows(table, each.test)
        clients[name] = ClientExamples(
            parts[0], parts[1], parts[2], _groups(study, tests), _row_numbers(tests)
        )
    return clients, task, notes


def _balanced_weights(task: Task, table: Dataset) -> tuple[tuple[str, float], ...]:
    """Return (label, weight) by label: total / (labels * count), with a count of 1 at least."""
    counts = Counter(label for row in row_labels(table, task.label) for label in row)
    total = sum(counts.values())
    return tuple(
        (label, total / (len(task.labels) * max(1, counts[label]))) for label in task.labels
    )


def _groups(study: Study, table: Dataset | None) -> list[str]:
    """Return the group of each row as text; empty without groups, or with cells without one."""
    group = study.data.group
    if table is None or not group or group not in table.column_names:
        return []
    return [label_text(value) for value in plain_cells(table, group)]


def _row_numbers(table: Dataset | None) -> list[int]:
    """Return the number of each row in its file; empty if that is not known."""
    if table is None or ROW not in table.column_names:
        return []
    return cast("list[int]", table[ROW][:])


def _leave_out_unfit(task: Task, table: Dataset) -> tuple[Dataset, str]:
    """Return the rows that a task can prepare and digest, each by itself, and a text on the others.

    Raises what does not depend on any row, as a missing column.
    """
    columns = task_columns(task)
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
        if names and min(values, default=0) < 0:  # `datasets` writes -1 for no class
            return False
        texts = {str(names[value]) if names else label_text(value) for value in values}
    except (IndexError, TypeError):
        return False
    return texts <= set(labels)


@dataclass(frozen=True)
class DataSplit:
    """Row numbers of each client, without rows of a common set, and the labels of all rows."""

    clients: dict[str, ClientRows]
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
    (table, *common), _ = _load_tables(study, None)
    assert table is not None
    task = _make_task(study, _find_labels(study, [t for t in (table, *common) if t is not None]))
    table, _ = drop_common(study, task, table, *common)
    has_classes = bool(task.label) and task.answer_kind in ("class", "labels")
    labels = row_labels(table, task.label) if has_classes else []
    test_size = len(common[0]) if common[0] is not None else 0
    return DataSplit(split_rows(study, task, table), labels, test_size)


def _load_tables(
    study: Study, site_rows: Dataset | None
) -> tuple[tuple[Dataset | None, Dataset | None, Dataset | None], list[str]]:
    """Load the training, common test and common validation tables, or None; and notes."""
    section, train = study.data, _load_train_table(study, site_rows)
    test, validation = None, None
    if section.test_path or section.test_split or section.test_filter:
        path, conditions = section.test_path or section.path, section.test_filter
        test = _load_common(study, path, section.test_split, conditions, "data.test_filter")
        limit = section.max_test_examples
        test = sample_rows(test, limit, seed=study.seed) if limit else test
    if split := section.validation_split:
        path = section.path or section.test_path
        validation = _load_common(study, path, split, {}, "data.validation_split")
    tables: list[Dataset | None] = []
    notes = list[str]()
    for kind, table in (("training", train), ("test", test), ("validation", validation)):
        if table is not None and study.task.label_separator:
            table = split_labels(table, study.task.label, study.task.label_separator)
        if table is not None:
            table, table_notes = drop_incomplete(study, table, kind)
            notes += table_notes
        tables.append(table)
    train, test, validation = tables
    return (train, test, validation), notes


def _load_common(
    study: Study, path: str, split: str, conditions: Mapping[str, str | int], fields: str
) -> Dataset:
    """Return the rows of a common set; DataError, which names its `fields`, if there are none."""
    if not path:
        raise DataError(f"{fields} needs a dataset: set data.test_path, since data.path is empty")
    numbered = study.privacy is None
    table = filter_rows(load_table(path, split=split, numbered=numbered), conditions)
    table = _open_images(study, _filter_values(table, study.data.filter), path)
    if not len(table):
        raise DataError(
            f"{fields} selects no row of {path!r} for a common set: change it, or data.filter"
        )
    return table


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
        table = load_table(
            section.path, split=section.split, allow_empty=is_private, numbered=not is_private
        )
    table = filter_rows(table, section.train_filter, allow_empty=is_private)
    table = _filter_values(table, section.filter, all_occur=site_rows is None and not is_private)
    if not len(table) and not is_private:
        raise DataError("no row is left to train on: change data.train_filter or data.filter")
    limit = section.max_examples
    table = sample_rows(table, limit, seed=study.seed) if limit else table
    return table if site_rows is not None else _open_images(study, table, section.path)


def _open_images(study: Study, table: Dataset, path: str) -> Dataset:
    """Return the table of a task on images with the contents of image files: see `open_images`."""
    columns = study.task.input_columns if study.task.kind.startswith("image") else []
    return open_images(table, columns, path, private=study.privacy is not None)


def _drop_empty_clients(
    clients: dict[str, ClientExamples], site_table: tuple[str, Dataset] | None
) -> list[str]:
    """Delete clients without training examples from `clients`; return notes for the user."""
    empty = [name for name, examples in clients.items() if not len(examples.train)]
    if site_table and empty:
        raise DataError(
            f"{site_table[0]} has no training example: all are held out for its test; lower "
            "data.holdout_fraction"
        )
    for name in empty:
        del clients[name]
    if empty and not clients:
        raise DataError(
            "no client has a training example: use fewer clients, or lower data.holdout_fraction"
        )
    return [f"{len(empty)} {EMPTY_CLIENTS}"] if empty else []


def _find_labels(study: Study, tables: list[Dataset]) -> list[str | int]:
    """Return the labels in the study, or else those in the tables; empty for other tasks.

    Under differential privacy only class names of a schema; DataError if there are none.
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
        columns=section.input_columns,
        label=section.label,
        labels=labels,
        model=study.model.path or study.model.vision,
        tokenizer=section.tokenizer,
        max_length=section.max_length,
        image_size=section.image_size,
        template=section.prompt_template,
        one_example_per_row=privacy is not None and privacy.unit == "example",
        packing=section.packing,
        weights={} if section.class_weights == "balanced" else section.class_weights,
        extra_metrics=map(metric_named, study.evaluate.metrics),
    )


def _filter_values(
    table: Dataset, allowed_values: Mapping[str, list[Any]], *, all_occur: bool = False
) -> Dataset:
    """Return the rows of a table with an allowed value in each listed column.

    With `all_occur`, raises DataError for an allowed value that no row has.
    """
    for column, allowed in allowed_values.items():
        values = plain_cells(table, column)
        present = {label_text(value) for value in values if value is not None}
        if absent := [value for value in allowed if all_occur and label_text(value) not in present]:
            listed = ", ".join(sorted(present)[:20])
            raise DataError(
                f"data.filter has {column} = {absent[0]!r}, and no row has that; there are {listed}"
            )
        table = select_rows(
            table, [row for row, value in enumerate(values) if matches_any(value, allowed)]
        )
    return table
