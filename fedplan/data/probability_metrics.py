# SPDX-License-Identifier: Apache-2.0
"""Metrics of probabilities: areas under curves, Brier score and calibration.

`truth` are class indices, or rows of 0 and 1 in a multi-label task; `probabilities` have a column
for each class or label. A metric that is not defined for the rows is None, and NaN for
probabilities that are not finite.
"""

from __future__ import annotations

from collections.abc import Callable
from math import nan
from typing import Any, cast

import numpy as np

from fedplan.data.predictions import Array

CALIBRATION_BINS = 10
"""Bins of equal width in which confidence and frequency are compared."""


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
    """Return the expected calibration error, over CALIBRATION_BINS bins."""
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
