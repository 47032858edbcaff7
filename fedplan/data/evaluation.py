# SPDX-License-Identifier: Apache-2.0
"""Tables of a model's test predictions: metrics with intervals, classes, curves.

All values are those of JSON, with None for a number that is not defined.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import isfinite
from typing import Any, cast

import numpy as np

from fedplan.data.metric_functions import (
    Array,
    binary_auroc,
    calibration_bins,
    class_columns,
    class_counts,
)
from fedplan.data.metrics import METRICS, Predictions, compute_metrics
from fedplan.data.tasks.definition import Task

Bounds = dict[str, tuple[float | None, float | None]]
"""Lowest and highest value of the interval of each metric."""
RESAMPLES, TOKEN_RESAMPLES = 500, 100
"""Bootstrap resamples of a test set; of tasks with a label for each token, which take longer."""
MIN_EXAMPLES = 5
"""Fewest examples with a label, and without it, of which an area under a curve tells anything, and
fewest groups of an interval."""
CURVE_POINTS = 200
"""Largest number of points of a curve."""


def evaluate_predictions(
    task: Task,
    predictions: Predictions,
    *,
    groups: Sequence[str] = (),
    threshold: float | None = None,
    intervals: bool = True,
) -> dict[str, Any]:
    """Return the tables of predictions, as JSON-compatible values.

    `examples`; `metrics` by name, each with `value` and, with `intervals`, the bounds `low` and
    `high` of the 95 % interval: Wilson's for a fraction of examples without groups, else of the
    bootstrap, or in `no_interval` why there is none; `classes` (support, precision, recall, f1 and
    auroc by label); `confusion` (rows: truth); `calibration` (count, confidence and frequency of
    each bin; of two labels for the second one); of two labels `roc` (false and true positive rate)
    and `threshold`. Tables that the task does not have are left out. `groups`: the group of each
    example, of which all or no example is drawn; `groups` is then their number. `threshold`: the
    probability of the second label from which it counts as predicted, in `sensitivity` and
    `specificity`; None is 0.5.
    """
    values = task.measure(predictions)
    examples = int(values.pop("examples"))
    binary = task.answer_kind == "class" and len(task.labels) == 2
    if binary:
        values |= _at_threshold(predictions, threshold)
    tables: dict[str, Any] = {"examples": examples}
    if len(groups):
        tables["groups"] = len(set(groups))
    bounds = Bounds()
    if intervals and examples > 1:
        bounds = _bootstrap(task, predictions, groups, threshold if binary else None, binary=binary)
        if not len(groups) and (predictions.sizes == 1).all():
            bounds |= _wilson(predictions, values)
    reasons = _no_interval(predictions, bounds, groups)
    tables["metrics"] = {}
    for name, value in values.items():
        entry: dict[str, Any] = {"value": _finite(value)}
        if name in reasons:
            entry["no_interval"] = reasons[name]
        elif name in bounds:
            entry["low"], entry["high"] = bounds[name]
        tables["metrics"][name] = entry
    if task.answer_kind in ("class", "labels") and len(predictions.truth):
        tables |= _class_tables(task, predictions)
    if binary:
        tables["threshold"] = 0.5 if threshold is None else threshold
    return tables


def youden_threshold(predictions: Predictions) -> float | None:
    """Return the probability of the second label at which sensitivity + specificity is highest.

    None if the examples have one label only.
    """
    truth, probabilities = predictions.truth, predictions.probabilities
    if probabilities is None or not 0 < truth.sum() < len(truth):
        return None
    false, true, thresholds = _roc(truth, probabilities[:, 1])
    return float(min(thresholds[(true - false).argmax()], 1.0))


def _at_threshold(predictions: Predictions, threshold: float | None) -> dict[str, float]:
    probabilities, guess = predictions.probabilities, predictions.predicted
    if threshold is not None and probabilities is not None:
        guess = (probabilities[:, 1] >= threshold).astype(int)
    values = {
        name: METRICS[name].function(predictions.truth, guess)
        for name in ("sensitivity", "specificity")
    }
    return {name: value for name, value in values.items() if value is not None}


def _bootstrap(
    task: Task,
    predictions: Predictions,
    groups: Sequence[str],
    threshold: float | None,
    *,
    binary: bool,
) -> Bounds:
    """Return the bounds of the 95 % percentile interval of each metric; examples or groups are
    drawn."""
    count = RESAMPLES if (predictions.sizes == 1).all() else TOKEN_RESAMPLES
    units: list[Array] = []
    if len(groups):
        names = np.asarray(groups)
        units = [np.flatnonzero(names == name) for name in sorted(set(groups))]
    draw, samples = np.random.default_rng(0), dict[str, list[float]]()
    own_task, extra = replace(task, extra_metrics=()), list(task.extra_metrics)
    for _ in range(count):
        rows = draw.integers(0, len(units) or len(predictions), len(units) or len(predictions))
        part = predictions.select(np.concatenate([units[i] for i in rows]) if units else rows)
        values = own_task.measure(part) | (_at_threshold(part, threshold) if binary else {})
        for metric in list(extra):
            try:
                values |= compute_metrics([metric], part)
            except Exception:  # a user's metric may not be able to read such rows: no interval
                extra.remove(metric)
                samples.pop(metric.name, None)
        for name, value in values.items():
            samples.setdefault(name, []).append(value)
    bounds = {n: np.quantile(drawn, (0.025, 0.975)) for n, drawn in samples.items()}
    return {
        n: (_finite(low), _finite(high)) for n, (low, high) in bounds.items() if n != "examples"
    }


def _no_interval(
    predictions: Predictions, names: Iterable[str], groups: Sequence[str]
) -> dict[str, str]:
    """Return why the resamples of a metric tell no interval, by name."""
    if 0 < len(set(groups)) < MIN_EXAMPLES:
        return dict.fromkeys(names, f"fewer than {MIN_EXAMPLES} groups")
    reasons = {name: "resamples make it larger" for name in names if name == "calibration_error"}
    if predictions.probabilities is None:
        return reasons
    hits = class_columns(predictions.truth, predictions.probabilities)
    counts = [int(count) for count in hits.sum(0) if 0 < count < len(hits)]
    if all(MIN_EXAMPLES <= count <= len(hits) - MIN_EXAMPLES for count in counts):
        return reasons
    few = f"fewer than {MIN_EXAMPLES} examples with or without a label"
    return reasons | {name: few for name in names if name in ("auroc", "auprc")}


def _wilson(predictions: Predictions, values: Mapping[str, float]) -> Bounds:
    """Return Wilson's 95 % interval of each metric that is a fraction of examples.

    Unlike the bootstrap it has a width if all or none of few examples are right.
    """
    from scipy import stats

    positives = int((predictions.truth == 1).sum())
    wholes = {"accuracy": len(predictions)}
    if predictions.truth.ndim == 1:
        wholes |= {"sensitivity": positives, "specificity": len(predictions) - positives}
    bounds = Bounds()
    for name, count in wholes.items():
        if name in values and isfinite(values[name]):
            right = round(values[name] * count)
            if not 0 <= right <= count or abs(values[name] * count - right) > 1e-3:
                continue  # a task's own metric of this name, which is no fraction of examples
            bounds[name] = cast("Any", stats).binomtest(right, count).proportion_ci(method="wilson")
    return bounds


def _class_tables(task: Task, predictions: Predictions) -> dict[str, Any]:
    truth, guess = predictions.truth, predictions.predicted
    size = len(task.labels)
    right, predicted, support = (
        np.pad(counts, (0, size - len(counts))) for counts in class_counts(truth, guess)
    )
    probabilities = predictions.probabilities
    if probabilities is not None and not np.isfinite(probabilities).all():
        probabilities = None
    areas: list[float | None] = [None] * size
    if probabilities is not None:
        columns = zip(class_columns(truth, probabilities).T, probabilities.T, strict=True)
        areas = [
            binary_auroc(hits, column) if 0 < hits.sum() < len(hits) else None
            for hits, column in columns
        ]
    tables: dict[str, Any] = {
        "classes": [
            {
                "label": label,
                "support": int(support[i]),
                "precision": _ratio(right[i], predicted[i]),
                "recall": _ratio(right[i], support[i]),
                "f1": _ratio(2 * right[i], predicted[i] + support[i]),
                "auroc": areas[i],
            }
            for i, label in enumerate(task.labels)
        ]
    }
    if truth.ndim == 1:
        counts = np.bincount(truth * size + guess, minlength=size * size)
        tables["confusion"] = counts.reshape(size, size).tolist()
    if probabilities is not None:
        tables["calibration"] = [
            [int(count), _finite(confidence), _finite(frequency)]
            for count, confidence, frequency in zip(
                *calibration_bins(truth, probabilities), strict=True
            )
        ]
        if truth.ndim == 1 and size == 2 and 0 < truth.sum() < len(truth):
            points = np.stack(_roc(truth, probabilities[:, 1])[:2], 1)
            if len(points) > CURVE_POINTS:  # the first and the last stay
                points = points[np.linspace(0, len(points) - 1, CURVE_POINTS).round().astype(int)]
            tables["roc"] = list(map(tuple, points.tolist()))
    return tables


def _roc(truth: Array, scores: Array) -> tuple[Array, Array, Array]:
    """Return (false positive rates, true positive rates, thresholds) of the ROC curve."""
    from sklearn import metrics

    return cast("tuple[Array, Array, Array]", cast("Any", metrics).roc_curve(truth, scores))


def _ratio(part: float, whole: float) -> float | None:
    return float(part / whole) if whole else None


def _finite(value: float) -> float | None:
    return float(value) if isfinite(value) else None
