# SPDX-License-Identifier: Apache-2.0
"""Score counts: predictions as a vector of integers, and metrics of a sum of such vectors.

Sites whose single metrics may not leave send counts instead: their sum over sites has the metrics
of all sites' examples together. The length of a vector depends on the task alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedplan.data.metric_functions import CALIBRATION_BINS
from fedplan.data.metrics import Predictions

Counts = NDArray[np.int64]
"""A vector of counts, or a sum of such vectors."""
Floats = NDArray[np.float64]
BINS, NOISY_BINS = 100, 20
"""Bins of probabilities, of exact counts and of counts with noise: noise adds up over bins."""
DRAWS, CONFIDENCE = 1000, 0.95
"""Draws of noise from which an interval is computed, and how often it contains the metric."""
MAX_CLASSES = 100
"""Largest number of classes or labels that can be counted."""


@dataclass(frozen=True)
class ScoreCounts:
    """What is counted for a task, and in which order.

    First, for a task of classes, the confusion counts, with a row for each true class; if
    `multi_label`, the examples with a wrong label and those with none. Then a histogram over `bins`
    of the predicted probability for each question, of examples where the answer is no, and where it
    is yes. A question is "is it this class?", or "does it have this label?"; two classes are one
    question, of the second class. Of three or more classes a last question is "is the predicted
    class right?", with its probability.
    """

    classes: int
    multi_label: bool = False
    bins: int = BINS

    @property
    def _binary(self) -> bool:
        return self.classes == 2 and not self.multi_label

    @property
    def _columns(self) -> int:
        return 1 if self._binary else self.classes

    @property
    def questions(self) -> int:
        """Number of histograms."""
        return self._columns if self._binary or self.multi_label else self.classes + 1

    @property
    def _outcomes(self) -> tuple[int, ...]:
        return (2,) if self.multi_label else (self.classes, self.classes)

    @property
    def size(self) -> int:
        """Length of the vector."""
        return int(np.prod(self._outcomes)) + self.questions * 2 * self.bins

    @property
    def sensitivity(self) -> float:
        """L2 norm of the vector of one example: it adds 1 to one outcome and to each histogram."""
        return sqrt(1 + self.questions)

    def count(self, predictions: Predictions) -> Counts:
        """Return the counts of predictions with one label, or row of labels, for each example.

        An example whose probabilities are not finite is counted in no histogram.
        """
        truth, predicted = predictions.truth.astype(int), predictions.predicted.astype(int)
        probabilities = predictions.probabilities
        assert probabilities is not None
        outcomes = np.zeros(self._outcomes, np.int64)
        if self.multi_label:
            np.add.at(outcomes, (truth == predicted).all(-1).astype(int), 1)
            answers = truth
        else:
            np.add.at(outcomes, (truth, predicted), 1)
            answers = np.eye(self.classes, dtype=int)[truth]
        finite, columns = np.isfinite(probabilities).all(-1), self._columns
        answers, probabilities = answers[:, -columns:], probabilities[:, -columns:]
        if self.questions > columns:
            answers = np.column_stack([answers, truth == predicted])
            probabilities = np.column_stack([probabilities, probabilities.max(-1)])
        # The upper edge belongs to a bin: a probability of 0.5 is predicted as no.
        bins = np.ceil(probabilities[finite] * self.bins).astype(int) - 1
        histograms = np.zeros((self.questions, 2, self.bins), np.int64)
        question = np.arange(self.questions)
        np.add.at(histograms, (question, answers[finite], bins.clip(0, self.bins - 1)), 1)
        return np.concatenate([outcomes.ravel(), histograms.ravel()])

    def metrics(self, counts: Counts, stddev: float = 0.0) -> dict[str, float]:
        """Return the metrics of a sum of counts by name, and `examples`.

        A metric `m` that bins or noise make inexact has an interval `m_low`, `m_high`: it contains
        the metric of the same predictions without bins, and if the counts have noise of `stddev`,
        does so in 95 of 100 cases. Of examples that were not drawn it says nothing. A metric that
        cannot be computed, as without examples of a class, is left out.
        """
        total, noise = counts.astype(float), np.zeros((0, self.size))
        if stddev:
            # The draws do not depend on the counts, and anybody can repeat them.
            noise = np.random.default_rng(0).normal(0.0, stddev, (DRAWS, self.size))
        outcomes, no, yes = self._tables(total)
        noisy_outcomes, noisy_no, noisy_yes = self._tables(total - noise)
        values = dict[str, float]()
        draws = self._rates(noisy_outcomes, noisy_no, noisy_yes)
        for name, value in self._rates(outcomes, no, yes).items():
            values |= _with_interval(name, value, 0.0, draws[name])
        for name, measure in (("auroc", self._auroc), ("brier", self._brier)):
            value, error = measure(no, yes)
            values |= _with_interval(name, value, error, measure(noisy_no, noisy_yes)[0])
        _, noise_no, noise_yes = self._tables(noise)
        others, only_noise = (noisy_no, noisy_yes), (noise_no, noise_yes)
        values |= self._calibration((no, yes), others, only_noise)
        return {**values, "examples": float(max(0.0, outcomes.sum()))}

    def _tables(self, counts: Floats) -> tuple[Floats, Floats, Floats]:
        shape, first = counts.shape[:-1], int(np.prod(self._outcomes))
        histograms = counts[..., first:].reshape(*shape, self.questions, 2, self.bins)
        outcomes = counts[..., :first].reshape(*shape, *self._outcomes)
        return outcomes, histograms[..., 0, :], histograms[..., 1, :]

    def _auroc(self, no: Floats, yes: Floats) -> tuple[Floats, Floats]:
        """Return the area under the ROC curve, a mean over classes or labels, and its error by
        ties."""
        no, yes = no[..., : self._columns, :], yes[..., : self._columns, :]
        some = (no.sum(-1) > 0) & (yes.sum(-1) > 0)
        pairs = np.where(some, no.sum(-1) * yes.sum(-1), 0.0)
        tied = (yes * no).sum(-1) / 2
        area = _ratio((yes * (no.cumsum(-1) - no)).sum(-1) + tied, pairs)
        return _mean(area), np.abs(_mean(_ratio(tied, pairs)))

    def _brier(self, no: Floats, yes: Floats) -> tuple[Floats, Floats]:
        no, yes = no[..., : self._columns, :], yes[..., : self._columns, :]
        centres, half = _centres(self.bins), 0.5 / self.bins
        squares = (no * centres**2 + yes * (1 - centres) ** 2).sum(-1)
        # |(p - y)**2 - (c - y)**2| is at most half * (2 |c - y| + half) for a centre c.
        distances = (no * centres + yes * (1 - centres)).sum(-1)
        examples = (no + yes).sum(-1)
        error = half * (2 * _ratio(distances, examples) + half)
        times = 1 if self.multi_label else self._columns
        return times * _mean(_ratio(squares, examples)), times * np.abs(_mean(error))

    def _gaps(self, no: Floats, yes: Floats) -> tuple[Floats, Floats]:
        """Return by calibration bin right answers minus their probabilities, and all answers."""
        last = slice(None) if self.multi_label else slice(-1, None)
        right, wrong = yes[..., last, :].sum(-2), no[..., last, :].sum(-2)
        gaps = right - (right + wrong) * _centres(self.bins)
        gaps = gaps.reshape(*gaps.shape[:-1], CALIBRATION_BINS, self.bins // CALIBRATION_BINS)
        return gaps.sum(-1), (right + wrong).sum(-1)

    def _calibration(
        self,
        counts: tuple[Floats, Floats],
        others: tuple[Floats, Floats],
        noise: tuple[Floats, Floats],
    ) -> dict[str, float]:
        """Return the calibration error with its interval, from histograms of no and yes.

        `others`: the counts with other noise; `noise`: the difference. The error is a sum of
        magnitudes, which noise makes larger: so the mean effect of noise is subtracted, and the
        interval has the largest effect on both sides.
        """
        gaps, answers = self._gaps(*counts)
        value = _ratio(np.abs(gaps).sum(-1), answers)
        if np.isnan(value):
            return {}
        low = high = estimate = float(value)
        error = 0.5 / self.bins
        if len(others[0]):
            other_gaps, other_answers = self._gaps(*others)
            draws = _ratio(np.abs(other_gaps).sum(-1), other_answers)
            effect = np.quantile(np.abs(self._gaps(*noise)[0]).sum(-1), CONFIDENCE) / answers
            low, high = low - effect, min(high + effect, np.nanquantile(draws, 0.975))
            estimate = float(2 * value - np.nanmean(draws))
        low, high, name = _within(low - error), _within(high + error), "calibration_error"
        return {name: min(max(estimate, low), high), f"{name}_low": low, f"{name}_high": high}

    def _rates(self, outcomes: Floats, no: Floats, yes: Floats) -> dict[str, Floats]:
        if self.multi_label:
            half, accuracy = self.bins // 2, _ratio(outcomes[..., 1], outcomes.sum(-1))
            right, wrong = yes[..., half:].sum(-1), no[..., half:].sum(-1)
            missed = yes[..., :half].sum(-1)
            micro = 2 * right.sum(-1), (2 * right + wrong + missed).sum(-1)
            # As scikit-learn has it, a label that nobody has and nothing predicts counts as 0.
            macro = np.nan_to_num(_ratio(2 * right, 2 * right + wrong + missed)).mean(-1)
            f1_micro = np.where(np.isnan(accuracy), np.nan, np.nan_to_num(_ratio(*micro)))
            return {"accuracy": accuracy, "f1_micro": f1_micro, "f1_macro": macro}
        right = np.diagonal(outcomes, axis1=-2, axis2=-1)
        true, predicted = outcomes.sum(-1), outcomes.sum(-2)
        rates = {
            "accuracy": _ratio(right.sum(-1), true.sum(-1)),
            "f1": _mean(_ratio(2 * right, true + predicted)),
        }
        if self._binary:
            recall = _ratio(right, true)
            rates |= {"sensitivity": recall[..., 1], "specificity": recall[..., 0]}
        return rates


def _ratio(part: Floats, whole: Floats) -> Floats:
    """Return part / whole; nan where there is no whole, or noise has made it negative."""
    return np.divide(part, whole, out=np.full(np.shape(whole), np.nan), where=whole > 0)


def _mean(values: Floats) -> Floats:
    """Return the mean over the last axis of the values that are not nan; nan without any."""
    defined = ~np.isnan(values)
    return _ratio(np.where(defined, values, 0.0).sum(-1), defined.sum(-1).astype(float))


def _centres(bins: int) -> Floats:
    return (np.arange(bins) + 0.5) / bins


def _within(value: float, highest: float = 1.0) -> float:
    return float(min(max(value, 0.0), highest))


def _with_interval(name: str, value: Any, error: Any, draws: Floats) -> dict[str, float]:
    """Return a metric with its interval; nothing if it is nan, no interval if it is exact."""
    if np.isnan(value):
        return {}
    low = high = float(value)
    if len(draws):
        low, high = (float(each) for each in np.nanquantile(draws, (0.025, 0.975)))
    elif not error:
        return {name: float(value)}
    highest = 2.0 if name == "brier" else 1.0
    low, high = _within(low - error, highest), _within(high + error, highest)
    return {name: _within(value, highest), f"{name}_low": low, f"{name}_high": high}
