# SPDX-License-Identifier: Apache-2.0
"""Metrics of predictions by name and direction, and the spread of a metric over clients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, fsum, inf, isnan, nan, sqrt
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from fedplan.data.predictions import Predictions
from fedplan.data.probability_metrics import auprc, auroc, brier, calibration_error
from fedplan.data.text_metrics import chrf, exact_match, rouge_l
from fedplan.errors import FedplanError
from fedplan.naming import Registry

AnswerKind = Literal["class", "labels", "number", "tokens"]
"""Kinds of predictions: one class, any of some labels, a number, or tokens."""
MetricFunction = Callable[[Any, Any], float | None]
"""Returns a metric from arrays of true values and predictions, with a row for each prediction.

Classes and tokens are indices of the task's labels or of the vocabulary; labels are rows of 0 and
1. Probabilities have a column for each label. None: the metric is not defined for these rows.
"""
MetricInput = Literal["labels", "probabilities", "texts"]
"""What a metric takes beside the truth: predicted values, probabilities of classes or labels, or
generated texts (with the true texts)."""


@dataclass(frozen=True)
class Metric:
    """A metric: `function` of the truth and of what it `takes`, for some `answer_kinds`.

    With fewer than `min_rows` rows there is no value. `higher_is_better` is the direction, and
    `bounds` are the lowest and highest value that the function can return. With `binary`, it
    applies to tasks with two labels only; the second label is the positive one.
    """

    name: str
    function: MetricFunction
    answer_kinds: tuple[AnswerKind, ...] = ("class", "labels", "number", "tokens")
    min_rows: int = 1
    takes: MetricInput = "labels"
    higher_is_better: bool = True
    bounds: tuple[float, float] = (-inf, inf)
    binary: bool = False

    def __call__(self, predictions: Predictions) -> float | None:
        """Return the metric of predictions; None if it is not defined for these.

        Raises FedplanError if the predictions have no probabilities or texts and the metric needs
        them, or if the function returns no number.
        """
        if len(predictions.truth) < self.min_rows:
            return None
        truth, values = predictions.truth, predictions.predicted
        if self.takes == "probabilities":
            values = predictions.probabilities
        elif self.takes == "texts":
            truth, values = predictions.texts.T if predictions.texts is not None else (None, None)
        if values is None:
            raise FedplanError(
                f"the metric {self.name!r} takes {self.takes}, and this task predicts none: use a "
                "metric of labels"
            )
        value = self.function(truth, values)
        try:
            return None if value is None else float(value)
        except (TypeError, ValueError) as error:
            raise FedplanError(
                f"the metric {self.name!r} returned a {type(value).__name__}: a metric takes the "
                f"true values and the predicted {self.takes}, and must return a number"
            ) from error


def _sklearn(function: str, **settings: Any) -> MetricFunction:
    """Return a metric function that calls `sklearn.metrics.<function>` with `settings`."""

    def measure(truth: Any, predictions: Any) -> float:
        from sklearn import metrics

        # scikit-learn raises for these predictions, which a diverged model makes.
        if not np.isfinite(predictions).all():
            return nan
        return float(getattr(metrics, function)(truth, predictions, **settings))

    return measure


def _accuracy(truth: Any, predictions: Any) -> float:
    """Return the fraction of rows that are right; a row of labels is if all its labels are."""
    return float((truth == predictions).reshape(len(truth), -1).all(-1).mean())


def _average_score(score: str, average: str) -> MetricFunction:
    """Return the metric function of an "f1", "precision" or "recall", as scikit-learn averages it.

    A hundred times faster than scikit-learn, which matters for bootstrap intervals.
    """

    def measure(truth: Any, predictions: Any) -> float:
        right, predicted, support = class_counts(truth, predictions)
        parts = {"f1": (predicted + support) / 2, "precision": predicted, "recall": support}
        whole = parts[score]
        if average == "micro":
            return float(right.sum() / max(whole.sum(), 1))
        values = np.divide(right, whole, out=np.zeros(len(right)), where=whole > 0)
        # Classes that neither side has do not count; of labels all do.
        weights = (
            support if average == "weighted" else (predicted + support > 0) | (truth.ndim == 2)
        )
        return float(np.average(values, weights=weights)) if weights.any() else 0.0

    return measure


def class_counts(truth: Any, predictions: Any) -> tuple[Any, Any, Any]:
    """Return (right predictions, predictions, true rows) of each class or label, as floats."""
    if truth.ndim == 2:
        sides = truth * predictions, predictions, truth
        return tuple(side.sum(0).astype(float) for side in sides)  # pyright: ignore[reportReturnType]
    size = int(max(truth.max(), predictions.max())) + 1
    sides = truth[truth == predictions], predictions, truth
    return tuple(np.bincount(side, minlength=size).astype(float) for side in sides)  # pyright: ignore[reportReturnType]


def _error(summary: Callable[[Any], Any]) -> MetricFunction:
    """Return the metric function that summarizes the errors of predicted numbers."""

    def measure(truth: Any, predictions: Any) -> float:
        return float(summary(np.asarray(predictions, float) - np.asarray(truth, float)))

    return measure


def _r2(truth: Any, predictions: Any) -> float:
    """Return the coefficient of determination; of a constant truth 1 if all is right, else 0."""
    errors, spread = (
        (np.asarray(truth, float) - side) ** 2 for side in (predictions, truth.mean())
    )
    if not spread.sum():
        return nan if np.isnan(errors).any() else float(not errors.sum())
    return float(1 - errors.sum() / spread.sum())


def _recall_of(label: int) -> MetricFunction:
    """Return the metric: which fraction of the rows with the class `label` is predicted so."""

    def recall(truth: Any, predictions: Any) -> float | None:
        hits = predictions[truth == label] == label
        return float(hits.mean()) if len(hits) else None

    return recall


def _pearson(truth: Any, predictions: Any) -> float:
    """Return Pearson's correlation: 0 if a side is constant, NaN for non-finite predictions."""
    first, second = (np.asarray(side, dtype=float) for side in (truth, predictions))
    if not np.isfinite(second).all():
        return nan
    if np.ptp(first) == 0 or np.ptp(second) == 0:
        return 0.0
    return float(np.corrcoef(first, second)[0, 1])


_CLASSIFICATION: tuple[AnswerKind, ...] = ("class", "labels")
_UNIT, _ABOVE_ZERO = (0.0, 1.0), (0.0, inf)
_ERRORS: dict[str, Callable[[Any], Any]] = {
    "mae": lambda errors: np.abs(errors).mean(),
    "rmse": lambda errors: np.sqrt((errors**2).mean()),
    "max_error": lambda errors: np.abs(errors).max(),
}
_BUILT_IN = (
    Metric("accuracy", _accuracy, ("class", "labels", "tokens"), bounds=_UNIT),
    *(
        Metric(
            f"{score}_{average}",
            _average_score(score, average),
            _CLASSIFICATION,
            bounds=_UNIT,
        )
        for score, average in (
            *(("f1", "macro"), ("f1", "micro"), ("f1", "weighted")),
            *(("precision", "macro"), ("recall", "macro")),
        )
    ),
    Metric("sensitivity", _recall_of(1), ("class",), bounds=_UNIT, binary=True),
    Metric("specificity", _recall_of(0), ("class",), bounds=_UNIT, binary=True),
    *(
        Metric(function.__name__, function, _CLASSIFICATION, takes="probabilities", bounds=_UNIT)
        for function in (auroc, auprc)
    ),
    *(
        Metric(
            function.__name__,
            function,
            _CLASSIFICATION,
            takes="probabilities",
            higher_is_better=False,
            bounds=(0.0, highest),
        )
        for function, highest in ((brier, 2.0), (calibration_error, 1.0))
    ),
    Metric("matthews_corrcoef", _sklearn("matthews_corrcoef"), ("class",), bounds=(-1.0, 1.0)),
    Metric(
        "jaccard",
        _sklearn("jaccard_score", average="samples", zero_division=1),
        ("labels",),
        bounds=_UNIT,
    ),
    Metric(
        "hamming_loss",
        _sklearn("hamming_loss"),
        _CLASSIFICATION,
        higher_is_better=False,
        bounds=_UNIT,
    ),
    *(
        Metric(name, _error(summary), ("number",), higher_is_better=False, bounds=_ABOVE_ZERO)
        for name, summary in _ERRORS.items()
    ),
    Metric("r2", _r2, ("number",), min_rows=2, bounds=(-inf, 1.0)),
    *(
        Metric(function.__name__, function, ("tokens",), takes="texts", bounds=(0.0, highest))
        for function, highest in ((exact_match, 1.0), (rouge_l, 1.0), (chrf, 100.0))
    ),
    Metric("pearson", _pearson, ("number",), min_rows=2, bounds=(-1.0, 1.0)),
)
METRICS = {metric.name: metric for metric in _BUILT_IN}
"""Built-in metrics of `evaluate.metrics`, by name."""
_TASK_METRICS: dict[str, tuple[bool, tuple[float, float]]] = {
    "loss": (False, (-inf, inf)),
    "perplexity": (False, _ABOVE_ZERO),
    "f1": (True, _UNIT),
}
"""Direction and bounds of what tasks compute themselves, beside METRICS."""
_SPREAD_SUFFIXES = ("_worst_decile", "_worst", "_best")
"""Ends of the names of values over clients that have the direction of their metric."""


METRIC_NAMES: Registry[Metric | MetricFunction] = Registry("metric", METRICS)
"""All metrics that a study can name: METRICS, and functions as `package.module:function`."""


def metric_named(name: str) -> Metric:
    """Return a metric by its name.

    A function `module:f` is imported and becomes a metric named `f`. Raises FedplanError if there
    is no such metric.
    """
    value = METRIC_NAMES.find(name).value
    return value if isinstance(value, Metric) else Metric(name.rpartition(":")[2], value)


def compute_metrics(metrics: Sequence[Metric], predictions: Predictions) -> dict[str, float]:
    """Return the value of each metric by name, without those that are not defined here.

    Raises FedplanError if a metric cannot be computed from the predictions.
    """
    values = {metric.name: metric(predictions) for metric in metrics}
    return {name: value for name, value in values.items() if value is not None}


def metric_direction(name: str, own: Mapping[str, bool] = MappingProxyType({})) -> bool | None:
    """Return whether a higher value of a metric is better; None if that is not known.

    `name` may stand in a round's row, as `global.accuracy` or `personal.accuracy_worst`. Directions
    are those of `own` (by the names of metrics), of registered metrics and of tasks. A spread
    over clients, as `personal.accuracy_std`, is better if lower.
    """
    plain = name.rpartition(".")[2]
    suffix = next((end for end in _SPREAD_SUFFIXES if plain.endswith(end)), "")
    registered = [each for each in METRIC_NAMES.registered.values() if isinstance(each, Metric)]
    directions = {
        **{metric.name: metric.higher_is_better for metric in registered},
        **{name: higher for name, (higher, _) in _TASK_METRICS.items()},
        **{name: metric.higher_is_better for name, metric in METRICS.items()},
        **own,
    }
    if plain.endswith("_std") and plain not in directions:
        return False
    return directions.get(plain, directions.get(plain.removesuffix(suffix)))


def metric_bounds(name: str) -> tuple[float, float]:
    """Return the lowest and highest value of a metric; minus and plus infinity if not known."""
    if name in METRICS:
        return METRICS[name].bounds
    return _TASK_METRICS[name][1] if name in _TASK_METRICS else (-inf, inf)


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
