# SPDX-License-Identifier: Apache-2.0
"""Score counts: sums have the metrics of the pooled predictions, within stated errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sklearn import metrics

from fedplan.data.metrics import Predictions
from fedplan.data.score_counts import NOISY_BINS, ScoreCounts

LAYOUTS = {
    "two classes": ScoreCounts(2),
    "five classes": ScoreCounts(5),
    "labels": ScoreCounts(3, multi_label=True),
    "two labels": ScoreCounts(2, multi_label=True, bins=NOISY_BINS),
}


def drawn(layout: ScoreCounts, count: int, seed: int) -> Predictions:
    """Predictions of a fair model."""
    draw = np.random.default_rng(seed)
    shape = (count, layout.classes)
    if layout.multi_label:
        truth = draw.integers(0, 2, shape)
        probabilities = 1 / (1 + np.exp(-2 * draw.normal(2 * truth - 1, 1.5)))
        predicted = (probabilities > 0.5).astype(int)
    else:
        truth = draw.integers(0, layout.classes, count)
        logits = draw.normal(1.2 * np.eye(layout.classes)[truth], 1.0)
        probabilities = np.exp(1.5 * logits) / np.exp(1.5 * logits).sum(1, keepdims=True)
        predicted = probabilities.argmax(1)
    return Predictions(truth, predicted, probabilities, np.zeros(count), np.ones(count, int))


def calibration_error(right: Any, confidence: Any) -> float:
    bins = (confidence * 10).astype(int).clip(0, 9)
    gaps = [np.sum((right - confidence)[bins == b]) for b in range(10)]
    return float(np.abs(gaps).sum() / len(right))


def pooled(layout: ScoreCounts, found: Predictions) -> dict[str, float]:
    """The metrics as scikit-learn has them."""
    truth, guess, p = found.truth, found.predicted, found.probabilities
    assert p is not None
    answers = truth if layout.multi_label else np.eye(layout.classes, dtype=int)[truth]
    scores = {"accuracy": metrics.accuracy_score(truth, guess), "examples": len(truth)}
    if layout.multi_label:
        for average in ("micro", "macro"):
            scores[f"f1_{average}"] = metrics.f1_score(truth, guess, average=average)
        calibration = answers.ravel(), p.ravel()
    else:
        scores["f1"] = metrics.f1_score(truth, guess, average="macro")
        calibration = truth == guess, p.max(1)
    if layout.questions == 1:
        scores["sensitivity"] = metrics.recall_score(truth, guess)
        scores["specificity"] = metrics.recall_score(truth, guess, pos_label=0)
        answers, p = answers[:, 1:], p[:, 1:]
        calibration = answers[:, 0], p[:, 0]
    squares = (answers - p) ** 2
    return scores | {
        "auroc": metrics.roc_auc_score(answers, p, average="macro"),
        "brier": squares.mean() if layout.multi_label else squares.sum(1).mean(),
        "calibration_error": calibration_error(*calibration),
    }


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_sum_over_sites_has_the_metrics_of_all_examples(name: str) -> None:
    layout = LAYOUTS[name]
    sites = [drawn(layout, count, seed) for seed, count in enumerate((0, 1, 40, 300))]
    total = sum(layout.count(site) for site in sites)
    together = Predictions.join(sites)
    assert (total == layout.count(together)).all() and total.shape == (layout.size,)
    found, right = layout.metrics(total), pooled(layout, together)
    binned = {"auroc", "brier", "calibration_error"}
    assert found.keys() == right.keys() | {f"{n}_{end}" for n in binned for end in ("low", "high")}
    for metric in right.keys() - binned:
        assert found[metric] == pytest.approx(right[metric], abs=1e-12), metric
    for metric in binned:
        assert found[f"{metric}_low"] <= right[metric] <= found[f"{metric}_high"], metric
        assert found[f"{metric}_high"] - found[f"{metric}_low"] < 9 / layout.bins, metric


@pytest.mark.parametrize("name", LAYOUTS)
def test_one_example_changes_the_counts_by_the_sensitivity(name: str) -> None:
    layout = LAYOUTS[name]
    for seed in range(20):
        one = drawn(layout, 1, seed)
        assert np.linalg.norm(layout.count(one)) == pytest.approx(layout.sensitivity)
        assert one.probabilities is not None
        one.probabilities[:] = (np.nan, 0.0, 1.0, 0.5)[seed % 4]
        assert np.linalg.norm(layout.count(one)) <= layout.sensitivity + 1e-12


def test_nothing_is_said_of_what_nobody_has() -> None:
    layout = ScoreCounts(2)
    assert layout.metrics(np.zeros(layout.size, np.int64)) == {"examples": 0.0}
    found = drawn(layout, 30, 0).select(np.arange(0))
    assert layout.metrics(layout.count(found)) == {"examples": 0.0}


def test_an_interval_contains_the_pooled_value_despite_noise() -> None:
    layout, draw = ScoreCounts(2, bins=NOISY_BINS), np.random.default_rng(1)
    stddev, hits = 2.0 * layout.sensitivity, dict[str, list[bool]]()
    for seed in range(200):
        found = drawn(layout, 300, seed)
        noisy = layout.count(found) + np.rint(draw.normal(0, stddev, layout.size)).astype(int)
        told = layout.metrics(noisy, stddev)
        for metric, right in pooled(layout, found).items():
            if metric != "examples":
                low, high = told[f"{metric}_low"], told[f"{metric}_high"]
                assert 0 <= low <= told[metric] <= high <= 1
                hits.setdefault(metric, []).append(low <= right <= high)
    # 95 of 100 are promised; of 200 draws fewer than 180 would be by chance in 1 of 300 trials.
    assert {metric: sum(each) for metric, each in hits.items() if sum(each) < 180} == {}
