# SPDX-License-Identifier: Apache-2.0
"""Metrics of predictions by name, and the spread of a metric over clients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, fsum, isnan, nan, sqrt
from typing import Any, Literal

import numpy as np

from fedplan.errors import FedplanError
from fedplan.naming import Registry

AnswerKind = Literal["class", "labels", "number", "tokens"]
"""Kinds of predictions: one class, any of some labels, a number, or tokens."""
MetricFunction = Callable[[Any, Any], float]
"""Returns a metric from arrays of true and predicted values, with a row for each prediction.

Classes and tokens are indices of the task's labels or of the vocabulary; labels are rows of 0 and
1.
"""


@dataclass(frozen=True)
class Metric:
    """A metric: `function` of (true, predicted) arrays, and the `answer_kinds` it applies to.

    With fewer than `min_rows` rows there is no value.
    """

    name: str
    function: MetricFunction
    answer_kinds: tuple[AnswerKind, ...] = ("class", "labels", "number", "tokens")
    min_rows: int = 1


def _sklearn(function: str, **settings: Any) -> MetricFunction:
    """Return a metric function that calls `sklearn.metrics.<function>` with `settings`."""

    def measure(truth: Any, predictions: Any) -> float:
        from sklearn import metrics

        # scikit-learn raises for these predictions, which a diverged model makes.
        if not np.isfinite(predictions).all():
            return nan
        return float(getattr(metrics, function)(truth, predictions, **settings))

    return measure


def _pearson(truth: Any, predictions: Any) -> float:
    """Return Pearson's correlation: 0 if a side is constant, NaN for non-finite predictions."""
    first, second = (np.asarray(side, dtype=float) for side in (truth, predictions))
    if not np.isfinite(second).all():
        return nan
    if np.ptp(first) == 0 or np.ptp(second) == 0:
        return 0.0
    return float(np.corrcoef(first, second)[0, 1])


_CLASSIFICATION: tuple[AnswerKind, ...] = ("class", "labels")
_BUILT_IN = (
    Metric("accuracy", _sklearn("accuracy_score"), ("class", "labels", "tokens")),
    *(
        Metric(
            f"{score}_{average}",
            _sklearn(f"{score}_score", average=average, zero_division=0),
            _CLASSIFICATION,
        )
        for score, average in (
            *(("f1", "macro"), ("f1", "micro"), ("f1", "weighted")),
            *(("precision", "macro"), ("recall", "macro")),
        )
    ),
    Metric("matthews_corrcoef", _sklearn("matthews_corrcoef"), ("class",)),
    Metric("jaccard", _sklearn("jaccard_score", average="samples", zero_division=1), ("labels",)),
    Metric("hamming_loss", _sklearn("hamming_loss"), _CLASSIFICATION),
    Metric("mae", _sklearn("mean_absolute_error"), ("number",)),
    Metric("rmse", _sklearn("root_mean_squared_error"), ("number",)),
    Metric("max_error", _sklearn("max_error"), ("number",)),
    Metric("r2", _sklearn("r2_score"), ("number",), min_rows=2),
    Metric("pearson", _pearson, ("number",), min_rows=2),
)
METRICS = {metric.name: metric for metric in _BUILT_IN}
"""Built-in metrics of `evaluate.metrics`, by name."""


METRIC_NAMES: Registry[Metric | MetricFunction] = Registry("metric", METRICS)
"""All metrics that a study can name: METRICS, and functions as `package.module:function`."""


def metric_named(name: str) -> Metric:
    """Return a metric by its name.

    A function `module:f` is imported and becomes a metric named `f`. Raises FedplanError if there
    is no such metric.
    """
    value = METRIC_NAMES.find(name).value
    return value if isinstance(value, Metric) else Metric(name.rpartition(":")[2], value)


def compute_metrics(metrics: Sequence[Metric], truth: Any, predictions: Any) -> dict[str, float]:
    """Return the value of each metric by name, from arrays of `truth` and `predictions`.

    A metric that needs more rows (`min_rows`) is left out. Raises FedplanError if a metric returns
    no number.
    """
    values = dict[str, float]()
    for metric in metrics:
        if len(truth) < metric.min_rows:
            continue
        value = metric.function(truth, predictions)
        try:
            values[metric.name] = float(value)
        except (TypeError, ValueError) as error:
            raise FedplanError(
                f"the metric {metric.name!r} returned a {type(value).__name__}: a metric takes the "
                "true and the predicted values, and must return a number"
            ) from error
    return values


def score_spread(scores: Mapping[str, float], *, higher_is_better: bool = True) -> dict[str, float]:
    """Return mean, std, worst, worst_decile, best and count of a score over clients.

    `scores` is by client. `worst_decile` is the mean of the worst tenth, at least one client. A
    client with a score of NaN has diverged and counts as the worst; mean and std are then NaN.
    Raises FedplanError without scores.
    """
    if not scores:
        raise FedplanError("there are no scores: give the score of at least one client")
    sign = 1 if higher_is_better else -1
    ordered = sorted(scores.values(), key=lambda score: (not isnan(score), sign * score))
    mean = _mean(ordered)
    return {
        "mean": mean,
        "std": sqrt(_mean([(score - mean) ** 2 for score in ordered])),
        "worst": ordered[0],
        "worst_decile": _mean(ordered[: ceil(len(ordered) / 10)]),
        "best": ordered[-1],
        "count": float(len(ordered)),
    }


def metric_spread(
    metric: str, scores: Mapping[str, float], *, higher_is_better: bool = True
) -> dict[str, float]:
    """Return `score_spread` of a metric over clients, with keys for a round's row.

    `scores` are the metric's values by client. The mean has the metric's own name, such as
    `accuracy`; the others are `accuracy_std`, `accuracy_worst`, `accuracy_worst_decile` and
    `accuracy_best`. `clients` is the number of clients. Raises FedplanError without scores.
    """
    spread = score_spread(scores, higher_is_better=higher_is_better)
    named = {"mean": metric, "count": "clients"}
    return {named.get(name, f"{metric}_{name}"): value for name, value in spread.items()}


def _mean(numbers: Sequence[float]) -> float:
    return fsum(numbers) / len(numbers) if numbers else 0.0
