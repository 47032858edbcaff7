# SPDX-License-Identifier: Apache-2.0
"""Metrics: scores of a model's answers by name, and of many clients put together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, fsum, isnan, nan, sqrt
from typing import Any, Literal

import numpy as np

from fedplan.errors import FedplanError
from fedplan.naming import Registry

Answers = Literal["class", "labels", "number", "tokens"]
"""What a model answers: one of some classes, any of some labels, a number, or tokens."""
Measure = Callable[[Any, Any], float]
"""Takes the truth and the guesses, a row for each answer, and gives a score.

Classes and tokens are numbers, in the order of the task's labels or of the vocabulary; labels are
rows of 0 and 1.
"""


@dataclass(frozen=True)
class Metric:
    """A score by its name; `of` says which answers it can be taken of."""

    name: str
    measure: Measure
    of: tuple[Answers, ...] = ("class", "labels", "number", "tokens")


def _by(function: str, **settings: Any) -> Measure:
    """A function of scikit-learn, which is imported when it is first called."""

    def measure(truth: Any, guess: Any) -> float:
        from sklearn import metrics

        # It refuses what is no number; a model that diverged has a score, and that is none.
        if not np.isfinite(guess).all():
            return nan
        return float(getattr(metrics, function)(truth, guess, **settings))

    return measure


def _pearson(truth: Any, guess: Any) -> float:
    """The correlation of two columns; of one that does not move, none, as of R2."""
    first, second = (np.asarray(side, dtype=float) for side in (truth, guess))
    if not np.isfinite(second).all():
        return nan
    if np.ptp(first) == 0 or np.ptp(second) == 0:
        return 0.0
    return float(np.corrcoef(first, second)[0, 1])


_CHOSEN: tuple[Answers, ...] = ("class", "labels")
_ALL = (
    Metric("accuracy", _by("accuracy_score"), ("class", "labels", "tokens")),
    Metric("f1_macro", _by("f1_score", average="macro", zero_division=0), _CHOSEN),
    Metric("f1_micro", _by("f1_score", average="micro", zero_division=0), _CHOSEN),
    Metric("f1_weighted", _by("f1_score", average="weighted", zero_division=0), _CHOSEN),
    Metric("precision_macro", _by("precision_score", average="macro", zero_division=0), _CHOSEN),
    Metric("recall_macro", _by("recall_score", average="macro", zero_division=0), _CHOSEN),
    Metric("matthews_corrcoef", _by("matthews_corrcoef"), ("class",)),
    Metric("jaccard", _by("jaccard_score", average="samples", zero_division=1), ("labels",)),
    Metric("hamming_loss", _by("hamming_loss"), _CHOSEN),
    Metric("mae", _by("mean_absolute_error"), ("number",)),
    Metric("rmse", _by("root_mean_squared_error"), ("number",)),
    Metric("max_error", _by("max_error"), ("number",)),
    Metric("r2", _by("r2_score"), ("number",)),
    Metric("pearson", _pearson, ("number",)),
)
METRICS = {metric.name: metric for metric in _ALL}
"""What a study may ask for in `evaluate.metrics`."""


METRIC_NAMES: Registry[Metric | Measure] = Registry("metric", METRICS)
"""All metrics that a study can name: those, and functions of the truth and the guesses."""


def metric_named(name: str) -> Metric:
    """A metric by its name; a function of your own is called by its own name in the scores."""
    found = METRIC_NAMES.find(name).value
    return found if isinstance(found, Metric) else Metric(name.rpartition(":")[2], found)


def measured(metrics: Sequence[Metric], truth: Any, guess: Any) -> dict[str, float]:
    """What some metrics say of answers. R2 and Pearson need two rows, and are left out of one."""
    few = len(truth) < 2
    asked = [metric for metric in metrics if not (few and metric.name in ("r2", "pearson"))]
    return {metric.name: _said(metric, truth, guess) for metric in asked}


def _said(metric: Metric, truth: Any, guess: Any) -> float:
    found = metric.measure(truth, guess)
    try:
        return float(found)
    except (TypeError, ValueError) as error:
        raise FedplanError(
            f"the metric {metric.name!r} gives a {type(found).__name__}: it takes the truth and "
            "the guesses, and must give a number"
        ) from error


def spread(scores: Mapping[str, float], *, higher: bool = True) -> dict[str, float]:
    """How a score lies over the clients; `higher` says whether a higher one is better.

    `worst_decile` is the mean of the worst tenth, at least one client. A client whose score is
    not a number has diverged and counts as the worst.
    """
    if not scores:
        raise FedplanError("there is no score to spread: give at least one client's")
    sign = 1 if higher else -1
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


def _mean(numbers: Sequence[float]) -> float:
    return fsum(numbers) / len(numbers) if numbers else 0.0
