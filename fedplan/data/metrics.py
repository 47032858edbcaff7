# SPDX-License-Identifier: Apache-2.0
"""Predictions, their metrics by name and direction, and the spread of a metric over clients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, fsum, inf, isnan, sqrt
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from fedplan.data import metric_functions as functions
from fedplan.data.metric_functions import Array, MetricFunction
from fedplan.errors import FedplanError
from fedplan.naming import Registry

AnswerKind = Literal["class", "labels", "number", "tokens"]
"""Kinds of predictions: one class, any of some labels, a number, or tokens."""
MetricInput = Literal["labels", "probabilities", "texts"]
"""What a metric takes beside the truth: predicted values, probabilities of classes or labels, or
generated texts (with the true texts)."""


@dataclass(frozen=True)
class Predictions:
    """Predictions of a model for examples, with one row for each prediction.

    `truth` and `predicted`: classes or tokens as indices, numbers, or rows of 0 and 1 for any of
    some labels. `probabilities`: a column for each class or label; None for numbers and tokens.
    `sizes`: the number of predictions of each example, which is 1 unless an example has a label for
    each word or token. `texts`: of each example the true text and the generated one, if a metric
    asked for them.
    """

    truth: Array
    predicted: Array
    probabilities: Array | None
    losses: Array
    sizes: Array
    texts: Array | None = None

    def __len__(self) -> int:
        """Return the number of examples."""
        return len(self.sizes)

    @staticmethod
    def join(parts: Sequence[Predictions]) -> Predictions:
        """Return the predictions of all parts, in order; there must be one part or more."""
        columns: Any = zip(*(vars(part).values() for part in parts), strict=True)
        joined: list[Any] = [None if each[0] is None else np.concatenate(each) for each in columns]
        return Predictions(*joined)

    def select(self, examples: Array) -> Predictions:
        """Return the predictions of the examples at these indices, which may repeat."""
        rows = examples
        if not (self.sizes == 1).all():
            spans: list[Array] = np.split(np.arange(len(self.truth)), self.sizes.cumsum()[:-1])
            rows = np.concatenate([spans[int(i)] for i in examples])
        return Predictions(
            self.truth[rows],
            self.predicted[rows],
            None if self.probabilities is None else self.probabilities[rows],
            self.losses[rows],
            self.sizes[examples],
            None if self.texts is None else self.texts[examples],
        )


@dataclass(frozen=True)
class Metric:
    """A metric: `function` of the truth and of what it `takes`, for some `answer_kinds`.

    There is no value with fewer than `min_rows` rows. `bounds` are the lowest and highest value
    that the function can return. `binary` metrics apply to tasks with two labels, the second of
    which is positive.
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

        Raises FedplanError if the predictions lack what the metric takes, or if it is no number.
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


_CLASSES: tuple[AnswerKind, ...] = ("class", "labels")
_UNIT, _ABOVE_ZERO = (0.0, 1.0), (0.0, inf)
_ERRORS: dict[str, Callable[[Array], Any]] = {
    "mae": lambda errors: np.abs(errors).mean(),
    "rmse": lambda errors: np.sqrt((errors**2).mean()),
    "max_error": lambda errors: np.abs(errors).max(),
}
_BUILT_IN = (
    Metric("accuracy", functions.accuracy, ("class", "labels", "tokens"), bounds=_UNIT),
    *(
        Metric(f"{name}_{mean}", functions.average_score(name, mean), _CLASSES, bounds=_UNIT)
        for name, mean in (
            *(("f1", "macro"), ("f1", "micro"), ("f1", "weighted")),
            *(("precision", "macro"), ("recall", "macro")),
        )
    ),
    Metric("sensitivity", functions.recall_of(1), ("class",), bounds=_UNIT, binary=True),
    Metric("specificity", functions.recall_of(0), ("class",), bounds=_UNIT, binary=True),
    Metric("auroc", functions.auroc, _CLASSES, 1, "probabilities", True, _UNIT),
    Metric("auprc", functions.auprc, _CLASSES, 1, "probabilities", True, _UNIT),
    Metric("brier", functions.brier, _CLASSES, 1, "probabilities", False, (0.0, 2.0)),
    Metric(
        "calibration_error", functions.calibration_error, _CLASSES, 1, "probabilities", False, _UNIT
    ),
    Metric("matthews_corrcoef", functions.matthews_corrcoef, ("class",), bounds=(-1.0, 1.0)),
    Metric("jaccard", functions.jaccard, ("labels",), bounds=_UNIT),
    Metric("hamming_loss", functions.hamming_loss, _CLASSES, higher_is_better=False, bounds=_UNIT),
    *(
        Metric(name, functions.of_errors(summary), ("number",), 1, "labels", False, _ABOVE_ZERO)
        for name, summary in _ERRORS.items()
    ),
    Metric("r2", functions.r2, ("number",), min_rows=2, bounds=(-inf, 1.0)),
    Metric("exact_match", functions.exact_match, ("tokens",), 1, "texts", True, _UNIT),
    Metric("rouge_l", functions.rouge_l, ("tokens",), 1, "texts", True, _UNIT),
    Metric("chrf", functions.chrf, ("tokens",), 1, "texts", True, (0.0, 100.0)),
    Metric("pearson", functions.pearson, ("number",), min_rows=2, bounds=(-1.0, 1.0)),
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
    """Return a metric by its name; FedplanError if unknown. A function `module:f` is named `f`."""
    value = METRIC_NAMES.find(name).value
    return value if isinstance(value, Metric) else Metric(name.rpartition(":")[2], value)


def compute_metrics(metrics: Sequence[Metric], predictions: Predictions) -> dict[str, float]:
    """Return the value of each metric by name, without those that are not defined here."""
    values = {metric.name: metric(predictions) for metric in metrics}
    return {name: value for name, value in values.items() if value is not None}


def metric_direction(name: str, own: Mapping[str, bool] = MappingProxyType({})) -> bool | None:
    """Return whether a higher value of a metric is better; None if that is not known.

    `name` may stand in a round's row, as `global.accuracy` or `personal.accuracy_worst`; directions
    in `own` come first. A spread over clients, as `personal.accuracy_std`, is better if lower.
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
    """Return `score_spread` of a metric's values by client, with keys for a round's row.

    The mean has the metric's own name, such as `accuracy`; the others are `accuracy_std` and so on.
    `clients` is the number of clients. Raises FedplanError without scores.
    """
    spread = score_spread(scores, higher_is_better=higher_is_better)
    named = {"mean": metric, "count": "clients"}
    return {named.get(name, f"{metric}_{name}"): value for name, value in spread.items()}


def _mean(numbers: Sequence[float]) -> float:
    return fsum(numbers) / len(numbers) if numbers else 0.0
