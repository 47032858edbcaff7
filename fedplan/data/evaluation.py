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

from fedplan.data.metrics import METRICS, class_counts, compute_metrics
from fedplan.data.predictions import Array, Predictions
from fedplan.data.probability_metrics import binary_auroc, calibration_bins, class_columns
from fedplan.data.tasks.definition import Task

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
    bounds = dict[str, tuple[float | None, float | None]]()
    if intervals and examples > 1:
        bounds = _bootstrap(task, predictions, groups, threshold if binary else None, binary=binary)
        if not len(groups) and (predictions.sizes == 1).all():
            bounds |= _wilson(predictions, values)
    reasons = _no_interval(predictions, bounds, groups)
    tables["metrics"] = {
        name: {"value": _finite(value)}
        | (
            {"no_interval": reasons[name]}
            if name in reasons
            else {"low": bounds[name][0], "high": bounds[name][1]}
            if name in bounds
            else {}
        )
        for name, value in values.items()
    }
    if task.answer_kind in ("class", "labels") and len(predictions.truth):
        tables |= _class_tables(task, predictions)
    if binary:
        tables["threshold"] = 0.5 if threshold is None else threshold
    return tables


def youden_threshold(predictions: Predictions) -> float | None:
    """Return the probability of the second label at which sensitivity + specificity is highest.

    None if the examples have one label only. `predictions` are of validation examples.
    """
    truth, probabilities = predictions.truth, predictions.probabilities
    if probabilities is None or not 0 < truth.sum() < len(truth):
        return None
    false, true, thresholds = _roc(truth, probabilities[:, 1])
    return float(min(thresholds[(true - false).argmax()], 1.0))


def _at_threshold(predictions: Predictions, threshold: float | None) -> dict[str, float]:
    """Return sensitivity and specificity of two labels, where these are defined."""
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
) -> dict[str, tuple[float | None, float | None]]:
    """Return the bounds of the 95 % percentile interval of each metric; no interval if undefined.

    Examples, or whole groups, are drawn with replacement.
    """
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
    return {
        name: cast(
            "tuple[float | None, float | None]",
            tuple(map(_finite, np.quantile(drawn, (0.025, 0.975)))),
        )
        for name, drawn in samples.items()
        if name != "examples"
    }


def _no_interval(
    predictions: Predictions, names: Iterable[str], groups: Sequence[str]
) -> dict[str, str]:
    """Return why the resamples of a metric tell no interval, by name: few groups or examples."""
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


def _wilson(
    predictions: Predictions, values: Mapping[str, float]
) -> dict[str, tuple[float | None, float | None]]:
    """Return Wilson's 95 % interval of each metric that is a fraction of examples.

    Unlike the bootstrap it has a width if all or none of few examples are right.
    """
    from scipy import stats

    positives = int((predictions.truth == 1).sum())
    wholes = {"accuracy": len(predictions)}
    if predictions.truth.ndim == 1:
        wholes |= {"sensitivity": positives, "specificity": len(predictions) - positives}
    bounds = dict[str, tuple[float | None, float | None]]()
    for name, count in wholes.items():
        if name in values and isfinite(values[name]):
            right = round(values[name] * count)
            if not 0 <= right <= count or abs(values[name] * count - right) > 1e-3:
                continue  # a task's own metric of this name, which is no fraction of examples
            bounds[name] = cast("Any", stats).binomtest(right, count).proportion_ci(method="wilson")
    return bounds


def _class_tables(task: Task, predictions: Predictions) -> dict[str, Any]:
    """Return the table of classes, the confusion matrix, calibration and the ROC curve."""
    truth, guess = predictions.truth, predictions.predicted
    size = len(task.labels)
    right, predicted, support = (
        np.pad(counts, (0, size - len(counts))) for counts in class_counts(truth, guess)
    )
    probabilities = predictions.probabilities
    usable = probabilities is not None and bool(np.isfinite(probabilities).all())
    hits = class_columns(truth, probabilities) if usable and probabilities is not None else None
    rows = list[dict[str, Any]]()
    for i, label in enumerate(task.labels):
        area = None
        if hits is not None and probabilities is not None and 0 < hits[:, i].sum() < len(hits):
            area = binary_auroc(hits[:, i], probabilities[:, i])
        rows.append(
            {
                "label": label,
                "support": int(support[i]),
                "precision": _ratio(right[i], predicted[i]),
                "recall": _ratio(right[i], support[i]),
                "f1": _ratio(2 * right[i], predicted[i] + support[i]),
                "auroc": area,
            }
        )
    tables: dict[str, Any] = {"classes": rows}
    if truth.ndim == 1:
        counts = np.bincount(truth * size + guess, minlength=size * size)
        tables["confusion"] = counts.reshape(size, size).tolist()
    if usable and probabilities is not None:
        binary = truth.ndim == 1 and size == 2
        bins = zip(*calibration_bins(truth, probabilities), strict=True)
        tables["calibration"] = [
            [int(count), _finite(confidence), _finite(frequency)]
            for count, confidence, frequency in bins
        ]
        if binary and 0 < truth.sum() < len(truth):
            false, true, _ = _roc(truth, probabilities[:, 1])
            points = list(zip(false.tolist(), true.tolist(), strict=True))
            tables["roc"] = [points[i] for i in _thin(len(points))]
    return tables


def _roc(truth: Array, scores: Array) -> tuple[Array, Array, Array]:
    """Return (false positive rates, true positive rates, thresholds) of the ROC curve."""
    from sklearn import metrics

    return cast("tuple[Array, Array, Array]", cast("Any", metrics).roc_curve(truth, scores))


def _thin(count: int) -> Iterable[int]:
    """Return up to CURVE_POINTS indices of so many points, with the first and the last."""
    if count <= CURVE_POINTS:
        return range(count)
    return cast("list[int]", np.linspace(0, count - 1, CURVE_POINTS).round().astype(int).tolist())


def _ratio(part: float, whole: float) -> float | None:
    return float(part / whole) if whole else None


def _finite(value: float) -> float | None:
    return float(value) if isfinite(value) else None
