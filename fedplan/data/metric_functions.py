# SPDX-License-Identifier: Apache-2.0
"""Functions of metrics: of predicted labels and numbers, of probabilities, and of generated texts.

Each takes the truth and predictions of some rows: class indices, rows of 0 and 1 in a multi-label
task, numbers or texts; probabilities have a column for each class or label. A metric that is not
defined for the rows is None, and NaN for predictions or probabilities that are not finite.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import fsum, nan
from typing import Any, cast

import numpy as np

from fedplan.errors import import_extra

Array = np.ndarray[Any, np.dtype[Any]]
MetricFunction = Callable[[Any, Any], float | None]
"""Returns a metric from arrays of true values and predictions, with a row for each prediction."""
CALIBRATION_BINS = 10
"""Bins of equal width in which confidence and frequency are compared."""


def _from_sklearn(function: str, **settings: Any) -> MetricFunction:
    """Return a metric function that calls `sklearn.metrics.<function>` with `settings`."""

    def measure(truth: Any, predictions: Any) -> float:
        from sklearn import metrics

        # scikit-learn raises for these predictions, which a diverged model makes.
        if not np.isfinite(predictions).all():
            return nan
        return float(getattr(metrics, function)(truth, predictions, **settings))

    return measure


matthews_corrcoef = _from_sklearn("matthews_corrcoef")
jaccard = _from_sklearn("jaccard_score", average="samples", zero_division=1)
hamming_loss = _from_sklearn("hamming_loss")


def accuracy(truth: Any, predictions: Any) -> float:
    """Return the fraction of rows that are right; a row of labels is if all its labels are."""
    return float((truth == predictions).reshape(len(truth), -1).all(-1).mean())


def average_score(score: str, average: str) -> MetricFunction:
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


def of_errors(summary: Callable[[Array], Any]) -> MetricFunction:
    """Return the metric function that summarizes the errors of predicted numbers."""
    return lambda truth, predictions: float(
        summary(np.asarray(predictions, float) - np.asarray(truth, float))
    )


def r2(truth: Any, predictions: Any) -> float:
    """Return the coefficient of determination; of a constant truth 1 if all is right, else 0."""
    errors, spread = (
        (np.asarray(truth, float) - side) ** 2 for side in (predictions, truth.mean())
    )
    if not spread.sum():
        return nan if np.isnan(errors).any() else float(not errors.sum())
    return float(1 - errors.sum() / spread.sum())


def recall_of(label: int) -> MetricFunction:
    """Return the metric: which fraction of the rows with the class `label` is predicted so."""

    def recall(truth: Any, predictions: Any) -> float | None:
        hits = predictions[truth == label] == label
        return float(hits.mean()) if len(hits) else None

    return recall


def pearson(truth: Any, predictions: Any) -> float:
    """Return Pearson's correlation: 0 if a side is constant, NaN for non-finite predictions."""
    first, second = (np.asarray(side, dtype=float) for side in (truth, predictions))
    if not np.isfinite(second).all():
        return nan
    if np.ptp(first) == 0 or np.ptp(second) == 0:
        return 0.0
    return float(np.corrcoef(first, second)[0, 1])


def auroc(truth: Array, probabilities: Array) -> float | None:
    """Return the area under the ROC curve, of the second class if there are two.

    Else the mean over classes (one against the rest) or labels, without those that all rows or no
    row has; None if no class is left.
    """
    return _mean_over_columns(binary_auroc, truth, probabilities)


def binary_auroc(hits: Array, scores: Array) -> float:
    """Return the area under the ROC curve of scores, from their ranks; `hits` are 0 and 1."""
    # By ranks it takes a hundredth of scikit-learn's time, which matters for bootstrap intervals.
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    positives, ends = hits.sum(), counts.cumsum()
    ranks = (ends - (counts - 1) / 2)[inverse][hits > 0].sum()
    area = (ranks - positives * (positives + 1) / 2) / (positives * (len(hits) - positives))
    return float(area)


def auprc(truth: Array, probabilities: Array) -> float | None:
    """Return the area under the precision-recall curve (average precision), as `auroc` does."""
    from sklearn import metrics

    score = cast("Callable[[Array, Array], float]", cast("Any", metrics).average_precision_score)
    return _mean_over_columns(score, truth, probabilities)


def brier(truth: Array, probabilities: Array) -> float:
    """Return the Brier score: the mean squared error of the probabilities.

    Of the second class if there are two, summed over classes if there are more, and the mean over
    labels in a multi-label task.
    """
    hits, columns = _columns(truth, probabilities)
    errors = (columns - hits) ** 2
    return float(errors.mean() if truth.ndim == 2 else errors.sum(1).mean())


def calibration_error(truth: Array, probabilities: Array) -> float:
    """Return the expected calibration error, over CALIBRATION_BINS bins.

    It is of the predicted class alone, so of three or more classes nothing is said of the others;
    of two it is of the second class, and in a multi-label task of all labels.
    """
    counts, confidence, frequency = calibration_bins(truth, probabilities)
    filled = counts > 0
    gaps = np.abs(confidence - frequency)[filled]
    return float((gaps * counts[filled]).sum() / counts.sum())


def calibration_bins(truth: Array, probabilities: Array) -> tuple[Array, Array, Array]:
    """Return (counts, mean confidence, frequency of right predictions) of each bin.

    Confidence is the probability of the second one of two classes, of the predicted one of more
    classes, or of each label. Means of an empty bin are NaN.
    """
    if truth.ndim == 2:
        confidence, right = probabilities.ravel(), truth.ravel()
    elif probabilities.shape[1] == 2:
        confidence, right = probabilities[:, 1], truth == 1
    else:
        confidence, right = probabilities.max(1), probabilities.argmax(1) == truth
    if not np.isfinite(confidence).all():
        return np.full(1, len(confidence)), np.full(1, nan), np.full(1, nan)
    bins = np.minimum((confidence * CALIBRATION_BINS).astype(int), CALIBRATION_BINS - 1)
    counts, sums, hits = (
        np.bincount(bins, weights, CALIBRATION_BINS) for weights in (None, confidence, right)
    )
    with np.errstate(invalid="ignore"):
        return counts, sums / counts, hits / counts


def class_columns(truth: Array, probabilities: Array) -> Array:
    """Return 0 and 1 for each row and class or label, as the columns of the probabilities."""
    return truth if truth.ndim == 2 else np.eye(probabilities.shape[1])[truth]


def _columns(truth: Array, probabilities: Array) -> tuple[Array, Array]:
    """Return (hits, probabilities) by column; of two classes the second alone."""
    hits = class_columns(truth, probabilities)
    start = 1 if truth.ndim == 1 and hits.shape[1] == 2 else 0
    return hits[:, start:], probabilities[:, start:]


def _mean_over_columns(
    score: Callable[[Array, Array], float], truth: Array, probabilities: Array
) -> float | None:
    if not np.isfinite(probabilities).all():
        return nan
    columns = zip(*(side.T for side in _columns(truth, probabilities)), strict=True)
    scores = [score(hits, column) for hits, column in columns if 0 < hits.sum() < len(hits)]
    return float(np.mean(scores)) if scores else None


def exact_match(truth: Sequence[str], texts: Sequence[str]) -> float:
    """Return the fraction of texts that equal the true ones."""
    return sum(true == text for true, text in zip(truth, texts, strict=True)) / len(truth)


def rouge_l(truth: Sequence[str], texts: Sequence[str]) -> float:
    """Return the mean ROUGE-L (F1, without stemming) of texts, in [0, 1], by rouge-score."""
    return fsum(map(_rouge_l, truth, texts)) / len(truth)


@lru_cache(maxsize=10_000)  # bootstrap samples repeat each text
def _rouge_l(truth: str, text: str) -> float:
    scorer = import_extra("rouge_score.rouge_scorer", "the metric rouge_l").RougeScorer(["rougeL"])
    return float(scorer.score(truth, text)["rougeL"].fmeasure)


def chrf(truth: Sequence[str], texts: Sequence[str]) -> float:
    """Return the chrF2 of all texts together, in [0, 100], by sacrebleu."""
    library = import_extra("sacrebleu", "the metric chrf")
    return float(library.corpus_chrf(list(texts), [list(truth)]).score)
