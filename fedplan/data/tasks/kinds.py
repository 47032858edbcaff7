# SPDX-License-Identifier: Apache-2.0
"""All kinds of tasks by name, and `make_task`, which checks the arguments of each kind."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import isfinite
from typing import Any

from fedplan.data.metrics import METRICS, Metric
from fedplan.data.tables import DataError, label_sort_key, label_text
from fedplan.data.tasks.classification import (
    ImageClassification,
    ImageMultiLabel,
    ImageText,
    MultiLabel,
    Regression,
    TextClassification,
    TokenClassification,
)
from fedplan.data.tasks.definition import Task
from fedplan.data.tasks.language import (
    CausalLanguage,
    Instruction,
    MaskedLanguage,
    SequenceToSequence,
)
from fedplan.naming import Registry

TASK_KINDS: dict[str, type[Task]] = {
    "text-classification": TextClassification,
    "multi-label": MultiLabel,
    "regression": Regression,
    "token-classification": TokenClassification,
    "image-classification": ImageClassification,
    "image-multi-label": ImageMultiLabel,
    "image-text": ImageText,
    "causal-lm": CausalLanguage,
    "masked-lm": MaskedLanguage,
    "seq2seq-lm": SequenceToSequence,
    "instruction": Instruction,
}
"""Built-in tasks by kind; `catalog.TASK_CLASSES` has the model class of each."""


MAX_IMAGE_SIZE = 1024
"""Largest `image_size`: a site has all images in memory, of the size that a study sets."""
TASK_NAMES: Registry[type[Task]] = Registry("task", TASK_KINDS)
"""All tasks that a study can name: TASK_KINDS, and subclasses of Task with a `model_class`."""


def task_class(kind: str) -> type[Task]:
    """Return the class of a task by its kind; imports a kind such as `package.module:Class`.

    Raises FedplanError for an unknown kind, DataError if the object is no subclass of Task.
    """
    value: Any = TASK_NAMES.find(kind).value
    if not isinstance(value, type) or not issubclass(value, Task):
        raise DataError(f"the task {kind!r} is not a subclass of fedplan.data.Task: make it one")
    return value


def has_score_counts(kind: str) -> bool:
    """Return whether a kind of task predicts a class, or any of some labels, for each example."""
    built_in = TASK_KINDS.get(kind)
    one_each = kind != "token-classification"
    return built_in is not None and one_each and built_in.answer_kind in ("class", "labels")


def make_task(
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
    one_example_per_row: bool = Task.one_example_per_row,
    packing: bool = Task.packing,
    weights: Mapping[str, float] | Iterable[tuple[str, float]] = Task.weights,
    extra_metrics: Iterable[Metric] = Task.extra_metrics,
) -> Task:
    """Make a task of a kind, with checked arguments; nothing is loaded yet.

    `columns` is the input column, or two: a pair of texts, a text and its target, or a prompt and
    its response. `labels` are the labels of all clients, in any order; the task has them sorted,
    and of two the last is the positive one. The tokenizer or image processor is that of `model`, a
    folder or Hub id; `tokenizer` names another. All other arguments are fields of Task. Raises
    DataError if an argument is missing or does not fit the kind.
    """
    cls = task_class(kind)
    columns = (columns,) if isinstance(columns, str) else tuple(columns)
    sorted_labels = tuple(sorted({str(each) for each in labels}, key=label_sort_key))
    fewest, most = cls.input_columns
    if not fewest <= len(columns) <= most:
        count = f"{fewest}" if fewest == most else f"{fewest} or {most}"
        raise DataError(
            f"{kind} has the input columns {list(columns)}: it takes {count}, as separate names"
        )
    if cls.answer_kind != "tokens" and not label:
        content = "numbers" if cls.answer_kind == "number" else "labels"
        raise DataError(f"{kind} needs the column of its {content}: name it as label of the task")
    if cls.answer_kind in ("class", "labels") and not sorted_labels:
        raise DataError(f"{kind} needs all labels: list them as labels of the task")
    if cls.answer_kind == "tokens":
        label = ""
    if cls.answer_kind in ("number", "tokens"):
        sorted_labels = ()
    if kind.startswith("image") and not 1 <= image_size <= MAX_IMAGE_SIZE:
        raise DataError(
            f"{kind} has image_size = {image_size}: give the side of the model's images in pixels, "
            f"such as 224, at most {MAX_IMAGE_SIZE}"
        )
    _require_packing(kind, packing=packing, one_example_per_row=one_example_per_row)
    return cls(
        kind,
        tokenizer or model,
        columns,
        label,
        sorted_labels,
        max_length,
        image_size,
        template,
        one_example_per_row,
        packing,
        _label_weights(kind, sorted_labels, weights),
        _applicable_metrics(kind, sorted_labels, extra_metrics),
    )


def adapt_task(task: Task, *, one_example_per_row: bool, extra_metrics: Iterable[Metric]) -> Task:
    """Return a copy of a task with more extra metrics, and with one example per row if true.

    Raises DataError if a metric does not apply to the task, or if packing excludes one per row.
    """
    _require_packing(task.kind, packing=task.packing, one_example_per_row=one_example_per_row)
    return replace(
        task,
        one_example_per_row=one_example_per_row or task.one_example_per_row,
        extra_metrics=(
            *task.extra_metrics,
            *_applicable_metrics(task.kind, task.labels, extra_metrics),
        ),
    )


def _require_packing(kind: str, *, packing: bool, one_example_per_row: bool) -> None:
    if packing and kind != "instruction":
        raise DataError(f"{kind} has packing = true: only the task instruction can be packed")
    if packing and one_example_per_row:
        raise DataError(
            "packing joins several rows in one example, but example-level privacy needs one row "
            "per example: set packing = false, or use client-level privacy"
        )


def _label_weights(
    kind: str, labels: tuple[str, ...], weights: Mapping[str, float] | Iterable[tuple[str, float]]
) -> tuple[tuple[str, float], ...]:
    """Return (label, weight) pairs in the order of `labels`; labels without weight are left out."""
    by_label = {label_text(label): float(weight) for label, weight in dict(weights).items()}
    if unknown := by_label.keys() - set(labels):
        names = ", ".join(labels) or "none"
        raise DataError(f"{kind} has a weight for {min(unknown)!r}; its labels are {names}")
    for label, weight in by_label.items():
        if not (isfinite(weight) and weight > 0):
            raise DataError(f"the weight of {label!r} is {weight}: it must be above 0")
    return tuple((label, by_label[label]) for label in labels if label in by_label)


def _applicable_metrics(
    kind: str, labels: Sequence[str], metrics: Iterable[Metric]
) -> tuple[Metric, ...]:
    metrics, answer_kind = tuple(metrics), task_class(kind).answer_kind
    for metric in metrics:
        if METRICS.get(metric.name, metric) != metric:
            raise DataError(
                f"the metric {metric.name!r} has the name of a metric of fedplan: give it another"
            )
        if answer_kind not in metric.answer_kinds:
            names = ", ".join(n for n, each in METRICS.items() if answer_kind in each.answer_kinds)
            raise DataError(
                f"the metric {metric.name!r} does not apply to {kind}: use one of {names}"
            )
        if metric.takes == "texts" and not task_class(kind).generates:
            raise DataError(
                f"the metric {metric.name!r} compares answers, and {kind} has none: use the task "
                "instruction or seq2seq-lm"
            )
        if metric.binary and len(labels) != 2:
            raise DataError(
                f"the metric {metric.name!r} is of two labels, and the task has {len(labels)}: use "
                "recall_macro, or see the table of classes in the report"
            )
    return metrics
