# SPDX-License-Identifier: Apache-2.0
"""Kinds: every task by its word, and what each of them must be told."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import isfinite
from typing import Any

from fedplan.data.metrics import METRICS, Metric
from fedplan.data.tables import DataError, label_order, label_text
from fedplan.data.tasks.definition import Task
from fedplan.data.tasks.language import (
    CausalLanguage,
    Instruction,
    MaskedLanguage,
    SequenceToSequence,
)
from fedplan.data.tasks.pictures import ImageClassification, ImageText
from fedplan.data.tasks.texts import MultiLabel, Regression, TextClassification
from fedplan.data.tasks.words import TokenClassification
from fedplan.naming import Registry

TASK_KINDS: dict[str, type[Task]] = {
    "text-classification": TextClassification,
    "multi-label": MultiLabel,
    "regression": Regression,
    "token-classification": TokenClassification,
    "image-classification": ImageClassification,
    "image-text": ImageText,
    "causal-lm": CausalLanguage,
    "masked-lm": MaskedLanguage,
    "seq2seq-lm": SequenceToSequence,
    "instruction": Instruction,
}
"""What a model can be asked to do; `catalog.TASKS` says for each how a model of it is loaded."""


TASK_NAMES: Registry[type[Task]] = Registry("task", TASK_KINDS)
"""All tasks that a study can name: those, and classes of `Task` with a `model_class` of theirs."""


def task_class(kind: str) -> type[Task]:
    """The class of a task, by its kind or where it stands: `package.module:Class`."""
    found: Any = TASK_NAMES.find(kind).value
    if not isinstance(found, type) or not issubclass(found, Task):
        raise DataError(f"the task {kind!r} is no class of fedplan.data.Task: make it one")
    return found


def task(
    kind: str,
    *,
    columns: str | Sequence[str],
    label: str = "",
    labels: Iterable[str | int] = (),
    model: str = "",
    tokenizer: str = "",
    max_length: int = Task.max_length,
    image_size: int = Task.image_size,
    template: str = Task.template,
    single: bool = Task.single,
    packing: bool = Task.packing,
    weights: Mapping[str, float] | Iterable[tuple[str, float]] = Task.weights,
    extra: Iterable[Metric] = Task.extra,
) -> Task:
    """A task by its kind.

    `columns` is where a row's input stands: one column, or two for pairs of texts, for a text and
    the one that follows from it, and for a prompt and its response. `labels` are all labels of all
    clients; their order does not matter. The tokenizer or the image processor is that of `model`, a
    folder or hub id, unless `tokenizer` names another. With `single` each row is one example,
    whatever is cut off.
    """
    found = task_class(kind)
    columns = (columns,) if isinstance(columns, str) else tuple(columns)
    known = tuple(sorted({str(each) for each in labels}, key=label_order))
    _require_columns(kind, columns)
    if found.answers in ("class", "labels") and not (label and known):
        raise DataError(f"{kind} needs the column of labels, and all labels: see labels_in")
    if found.answers == "number" and not label:
        raise DataError(f"{kind} needs the column of its numbers: name it as the label")
    if found.answers == "tokens":
        label = ""
    if found.answers in ("number", "tokens"):
        known = ()
    if kind.startswith("image") and image_size < 1:
        raise DataError(
            f"{kind} has image_size = {image_size}: say the side of the pictures that the model "
            "takes, such as 224"
        )
    _require_packing(kind, packing=packing, single=single)
    return found(
        kind,
        tokenizer or model,
        columns,
        label,
        known,
        max_length,
        image_size,
        template,
        single,
        packing,
        _weights(kind, known, weights),
        _extra(kind, extra),
    )


def refitted(made: Task, *, single: bool, extra: Iterable[Metric]) -> Task:
    """A task that somebody made, each row one example where that is asked, with more metrics."""
    _require_packing(made.kind, packing=made.packing, single=single)
    more = (*made.extra, *_extra(made.kind, extra))
    return replace(made, single=single or made.single, extra=more)


def _require_columns(kind: str, columns: tuple[str, ...]) -> None:
    least, most = task_class(kind).takes
    if not least <= len(columns) <= most:
        count = f"{least}" if least == most else f"{least} or {most}"
        raise DataError(f"{kind} has columns {list(columns)}: it takes {count}, as names apart")


def _require_packing(kind: str, *, packing: bool, single: bool) -> None:
    if packing and kind != "instruction":
        raise DataError(f"{kind} has packing = true: only the conversations of instruction have it")
    if packing and single:
        raise DataError(
            "packing puts several rows into one example, and privacy by example hides one row: "
            "leave packing out, or hide clients"
        )


def _weights(
    kind: str, labels: tuple[str, ...], said: Mapping[str, float] | Iterable[tuple[str, float]]
) -> tuple[tuple[str, float], ...]:
    """The weight of each label, in the order of the labels."""
    found = {label_text(label): float(weight) for label, weight in dict(said).items()}
    if strange := found.keys() - set(labels):
        there = ", ".join(labels) or "none"
        raise DataError(f"{kind} has a weight for {min(strange)!r}; its labels are {there}")
    if wrong := [label for label, weight in found.items() if not (isfinite(weight) and weight > 0)]:
        raise DataError(f"the weight of {wrong[0]!r} is {found[wrong[0]]}: it must be above 0")
    return tuple((label, found[label]) for label in labels if label in found)


def _extra(kind: str, said: Iterable[Metric]) -> tuple[Metric, ...]:
    asked, answers = tuple(said), task_class(kind).answers
    if odd := [metric.name for metric in asked if answers not in metric.of]:
        there = ", ".join(name for name, metric in METRICS.items() if answers in metric.of)
        raise DataError(f"the metric {odd[0]!r} cannot be taken of {kind}: there are {there}")
    return asked
