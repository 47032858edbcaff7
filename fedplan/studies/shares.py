# SPDX-License-Identifier: Apache-2.0
"""Shares: the rows that each client of a study trains on and is tested on.

No row is tested on, anywhere, that some client trains on; and where a study hides something, no row
changes which others are trained on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

from fedplan.data.content import contents
from fedplan.data.examples import Examples
from fedplan.data.metrics import metric_named
from fedplan.data.partition import Partition, division, some, to_train
from fedplan.data.tables import (
    DataError,
    is_among,
    label_text,
    labels_in,
    labels_of,
    load,
    names_in,
    rows,
    where,
)
from fedplan.data.tables import values as values_in
from fedplan.data.tasks import Task, task, task_class
from fedplan.federation.marks import mark_of
from fedplan.studies.schema import Study

if TYPE_CHECKING:
    from datasets import Dataset


@dataclass(frozen=True)
class Shares:
    """The rows of each client, to train and to test on, and those of the common test, if any.

    `notes` say what a person should know of them.
    """

    train: dict[str, Examples]
    own: dict[str, Examples]
    test: Examples | None
    task: Task
    notes: tuple[str, ...] = ()

    @cached_property
    def marks(self) -> dict[str, str]:
        """The mark of each client's rows to train on."""
        return {name: mark_of(examples) for name, examples in self.train.items()}


NO_TEST = (
    "No common test, so no score of the world: say data.test_split, data.test or data.test_path to "
    "have one."
)
CUT_KINDS = ("causal-lm", "masked-lm")
CUT = "Each text is one example: of a longer one, its first {} tokens."


def shares_of(study: Study, own: tuple[str, Dataset] | None) -> Shares:
    """The rows of a study; `own` is a site's name with the table that it brings."""
    if study.data.given:
        raise DataError("they were given from Python")
    test, table = _test(study), _table(study, own[1] if own else None)
    made = _task(study, _labels(study, [t for t in (table, test) if t is not None]))
    notes = [] if test is not None else [NO_TEST]
    notes += [CUT.format(made.max_length)] if made.single and made.kind in CUT_KINDS else []
    notes += made.notes
    train, tests = dict[str, Examples](), dict[str, Examples]()
    if table is not None:
        table, marks, left = _untested(table, test, made, empty=study.privacy is not None)
        train, tests = _prepared(study, table, marks, own, made)
        # What is counted of the rows is not said where they are hidden, nor is who has none.
        notes += [] if study.privacy else [*left, *_without_rows(train, own)]
    kept = {name: rows for name, rows in tests.items() if len(rows) and name in train}
    return Shares(train, kept, made.prepare(test) if test else None, made, tuple(notes))


@dataclass(frozen=True)
class Division:
    """Who holds what of a study's table, as numbers of rows: to train on, and held out.

    `labels` is the label of each row, where the task has classes, and `test` counts the common
    test's rows.
    """

    train: dict[str, list[int]]
    own: dict[str, list[int]]
    labels: list[list[str]]
    test: int


def division_of(study: Study) -> Division:
    """Who holds what of a study's table: no row is tokenised or decoded for it."""
    if not study.data.path:
        raise DataError(
            "data.path: this study has no table here: each site has its own, or rows came from "
            "Python; draw a study that names one"
        )
    test, table = _test(study), cast("Dataset", _table(study, None))
    made = _task(study, _labels(study, [t for t in (table, test) if t is not None]))
    table, marks, _ = _untested(table, test, made, empty=study.privacy is not None)
    first = to_train(marks, share=1 - study.data.own_test, seed=study.seed)
    held = _held(study, table, None)
    train, own = (
        {name: [r for r in numbers if bool(first[r]) == side] for name, numbers in held.items()}
        for side in (True, False)
    )
    classes = bool(made.label) and made.answers in ("class", "labels")
    found = labels_of(table, made.label) if classes else []
    labels = [cast("list[str]", each) if isinstance(each, list) else [each] for each in found]
    return Division(train, own, labels, len(test) if test is not None else 0)


def _prepared(
    study: Study, table: Dataset, marks: list[bytes], own: tuple[str, Dataset] | None, made: Task
) -> tuple[dict[str, Examples], dict[str, Examples]]:
    """Each client's rows to train on, and those held out for its own test."""
    first = to_train(marks, share=1 - study.data.own_test, seed=study.seed)
    slim = table.select_columns(_columns(made))
    train, tests = dict[str, Examples](), dict[str, Examples]()
    for name, numbers in _held(study, table, own).items():
        sides = ([row for row in numbers if first[row] == side] for side in (True, False))
        train[name], tests[name] = (made.prepare(rows(slim, side)) for side in sides)
    return train, tests


def _columns(made: Task) -> list[str]:
    """What a task sees of a row."""
    return [*made.columns, *([made.label] if made.label else [])]


def _test(study: Study) -> Dataset | None:
    """The rows of the common test; only if the study says which."""
    said = study.data
    if not (said.test_path or said.test_split or said.test):
        return None
    path = said.test_path or said.path
    if not path:
        raise DataError("data.test is of no table: say data.test_path, since there is no data.path")
    table = _only(where(load(path, split=said.test_split), said.test), said.only)
    if not len(table):
        raise DataError(f"the common test has no row of {path!r}: change data.test or data.only")
    return some(table, said.test_limit, seed=study.seed) if said.test_limit else table


def _table(study: Study, own: Dataset | None) -> Dataset | None:
    """The rows to be trained on and held out, of one table or of a site's own."""
    said = study.data
    if said.limit and study.privacy is not None:
        raise DataError(
            "data.limit: which rows are within it follows from all rows, so that one row less lets "
            "another in, and privacy cannot hide that: cut the table beforehand, by something that "
            "each row says, and name that in data.train"
        )
    if own is None and not said.path:
        return None
    empty = study.privacy is not None
    table = own if own is not None else load(said.path, split=said.split, empty=empty)
    table = _only(where(table, said.train, empty=empty), said.only)
    if not len(table) and not empty:
        raise DataError("no row is left to train on: change data.train or data.only")
    return some(table, said.limit, seed=study.seed) if said.limit else table


def _untested(
    table: Dataset, test: Dataset | None, made: Task, *, empty: bool
) -> tuple[Dataset, list[bytes], list[str]]:
    """The rows that do not stand in the common test, what they hold, and what there is to say.

    They are told by what the task sees of them. It is they that give way, and not the test, because
    a site knows the test and nobody knows the rows of all sites. Where rows are hidden, none may be
    left, for the one that is would be told.
    """
    columns = _columns(made)
    marks = contents(table, columns)
    tested = set(contents(test, columns)) if test is not None else set[bytes]()
    kept = [row for row, mark in enumerate(marks) if mark not in tested]
    count = len(table) - len(kept)
    if count and not kept and not empty:
        raise DataError(
            f"all {count} rows to train on stand in the common test too: say by data.test_split, "
            "data.test or data.test_path which rows are for the test alone, or leave these out"
        )
    left = [f"{count} rows stand in the common test too, and are not trained on."] if count else []
    return rows(table, kept), [marks[row] for row in kept], left


def _without_rows(train: dict[str, Examples], own: tuple[str, Dataset] | None) -> list[str]:
    """Take out the clients that have no row to train on, and say so."""
    empty = [name for name, held in train.items() if not len(held)]
    if own and empty:
        raise DataError(
            f"{own[0]} has no row to train on: all are held out for its own test; lower "
            "data.own_test"
        )
    for name in empty:
        del train[name]
    if empty and not train:
        raise DataError("no client has a row to train on: ask for fewer, or lower data.own_test")
    return [f"{len(empty)} clients have no row to train on, and take no part."] if empty else []


def _labels(study: Study, tables: list[Dataset]) -> list[str | int]:
    """The labels that the study says, or those that its tables hold."""
    column, said = study.task.label, study.task.labels
    if said or not column or task_class(study.task.kind).answers not in ("class", "labels"):
        return said
    if study.privacy is None:
        return cast("list[str | int]", labels_in(tables, column))
    wanted = study.data.only.get(column)
    for names in (names_in(table, column) for table in tables):
        if names:
            return [name for name in names if wanted is None or is_among(name, wanted)]
    raise DataError(
        f"which labels there are in column {column!r} would follow from its rows, and privacy "
        "cannot hide that: say all of them in task.labels"
    )


def _task(study: Study, labels: Iterable[str | int]) -> Task:
    asked, hidden = study.task, study.privacy
    return task(
        asked.kind,
        columns=asked.input.split(),
        label=asked.label,
        labels=labels,
        model=study.model.path or study.model.vision,
        tokenizer=asked.tokenizer,
        max_length=asked.max_length,
        image_size=asked.image_size,
        template=asked.template,
        single=hidden is not None and hidden.unit == "example",
        packing=asked.packing,
        weights=asked.weights,
        extra=map(metric_named, study.evaluate.metrics),
    )


def _held(study: Study, table: Dataset, own: tuple[str, Dataset] | None) -> dict[str, list[int]]:
    """The numbers of each client's rows."""
    if own is not None:
        return {own[0]: list(range(len(table)))}
    said = study.data
    partition = Partition(
        by=said.by,
        clients=said.clients,
        column=said.column,
        alpha=said.alpha,
        classes=said.classes,
        least=said.least,
        each=said.each,
    )
    public = _public(study, partition) if study.privacy is not None else None
    # Each number would be a label of its own: by numbers no rows are divided.
    label = "" if task_class(study.task.kind).answers == "number" else study.task.label
    return division(table, partition, seed=study.seed, label=label, public=public)


def _public(study: Study, partition: Partition) -> list[str]:
    """What is known of a column that clients are made by, without a look at the rows."""
    column = partition.column or study.task.label
    if partition.by in ("iid", "dirichlet"):
        return []
    known: list[Any] = study.data.only.get(column, [])
    if not known and partition.by == "column" and partition.each == 1:
        known = study.clients.names
    if not known and column == study.task.label:
        known = study.task.labels
    if not known:
        raise DataError(
            f"which values there are in column {column!r} would follow from its rows, and privacy "
            f"cannot hide that: say all of them in data.only, as only = {{ {column} = [...] }}"
        )
    return list(dict.fromkeys(map(label_text, known)))


def _only(table: Dataset, only: Mapping[str, list[Any]]) -> Dataset:
    for column, kept in only.items():
        found = values_in(table, column)
        table = rows(table, [row for row, value in enumerate(found) if is_among(value, kept)])
    return table
