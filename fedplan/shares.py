# SPDX-License-Identifier: Apache-2.0
"""Shares: the rows that each client of a study trains on and is tested on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from fedplan import streams
from fedplan.config import Study
from fedplan.content import mark_of as mark_of
from fedplan.fit import Examples
from fedplan.tables import labels_in, load, rows, values, where
from fedplan.tasks import Task, task

if TYPE_CHECKING:
    from datasets import Dataset


@dataclass(frozen=True)
class Shares:
    """The rows of each client, to train and to test on, and those of the common test, if any."""

    train: dict[str, Examples]
    own: dict[str, Examples]
    test: Examples | None
    task: Task


def shares_of(study: Study, own: tuple[str, Dataset] | None) -> Shares:
    """The rows of a study; `own` is a site's name with the table that it brings."""
    said = study.data
    whole, test = (
        _kept(study, path, split, kept, limit) if path else None
        for path, split, kept, limit in (
            (said.path, said.split, said.train, said.limit),
            (said.test_path or said.path, said.test_split, said.test, said.test_limit),
        )
    )
    if study.task.labels or not study.task.label:
        made = _task(study, study.task.labels)
    else:
        made = _task(study, labels_in([t for t in (whole, test) if t], study.task.label))
    held = _held(study, whole) if whole else {own[0]: _only(own[1], said.only)} if own else {}
    train, tests = dict[str, Examples](), dict[str, Examples]()
    for name, table in held.items():
        first, second = _halves(table, said.own_test, study.seed)
        train[name] = made.prepare(first)
        if len(second):
            tests[name] = made.prepare(second)
    return Shares(train, tests, made.prepare(test) if test else None, made)


def _task(study: Study, labels: Iterable[str | int]) -> Task:
    asked = study.task
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
    )


def _held(study: Study, table: Dataset) -> dict[str, Dataset]:
    """Each client's rows, where one table is divided among them."""
    from fedplan.data import Partition, divide

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
    return divide(table, partition, seed=study.seed, label=study.task.label)


def _halves(table: Dataset, test: float, seed: int) -> tuple[Dataset, Dataset]:
    from fedplan.data import halve

    return halve(table, share=1 - test, seed=seed) if test else (table, rows(table, []))


def _kept(
    study: Study, path: str, split: str, kept: Mapping[str, str | int], limit: int
) -> Dataset:
    table = where(load(path, split=split), kept)
    return _limited(_only(table, study.data.only), limit, study.seed)


def _only(table: Dataset, only: Mapping[str, list[Any]]) -> Dataset:
    for column, kept in only.items():
        wanted = set(kept)
        table = rows(table, [i for i, v in enumerate(values(table, column)) if v in wanted])
    return table


def _limited(table: Dataset, limit: int, seed: int) -> Dataset:
    if not limit or limit >= len(table):
        return table
    order = torch.randperm(len(table), generator=streams.generator("limit", seed))
    return rows(table, sorted(order[:limit].tolist()))
