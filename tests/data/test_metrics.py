# SPDX-License-Identifier: Apache-2.0
"""Scores of many clients, put together."""

from __future__ import annotations

from math import isclose, isnan, nan
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from often import often

from fedplan.data.metric_functions import calibration_bins
from fedplan.data.metrics import METRICS, Metric, Predictions, metric_direction, score_spread
from fedplan.errors import FedplanError

SCORES = st.dictionaries(st.text(max_size=3), st.floats(-1e6, 1e6), min_size=1, max_size=40)


@settings(max_examples=often(200))
@given(SCORES)
def test_a_spread_is_what_numpy_says(scores: dict[str, float]) -> None:
    found, values = score_spread(scores), np.sort(list(scores.values()))
    assert isclose(found["mean"], values.mean(), rel_tol=1e-9, abs_tol=1e-6)
    assert isclose(found["std"], values.std(), rel_tol=1e-9, abs_tol=1e-6)
    assert (found["worst"], found["best"]) == (values[0], values[-1])
    assert found["worst"] <= found["worst_decile"] + 1e-6 <= found["mean"] + 2e-6
    assert found["count"] == len(scores)


def test_the_worst_decile_is_the_mean_of_the_lowest_tenth_rounded_up() -> None:
    assert score_spread({str(i): float(i) for i in range(11)})["worst_decile"] == 0.5
    assert score_spread({str(i): float(i) for i in range(10)})["worst_decile"] == 0.0


def test_a_client_that_diverged_is_the_worst() -> None:
    for scores in ({"a": nan, "b": 1.0, "c": 0.0}, {"b": 1.0, "c": 0.0, "a": nan}):
        found = score_spread(scores)
        assert isnan(found["worst"]) and isnan(found["mean"]) and found["best"] == 1.0


def answers(kind: str, seed: int) -> np.ndarray:
    """Answers of a kind, as a task gives them."""
    draw = np.random.default_rng(seed)
    if kind == "number":
        return draw.normal(size=9)
    return draw.integers(0, 2, (9, 3)) if kind == "labels" else draw.integers(0, 4, 9)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("metric", METRICS.values(), ids=METRICS)
@given(st.integers(0, 2**31))
def test_no_answer_beats_the_truth_and_the_order_of_rows_does_not_count(
    metric: Metric, seed: int
) -> None:
    sign, order = 1 if metric.higher_is_better else -1, np.arange(9)[::-1]
    for kind in metric.answer_kinds:
        truth, guess = answers(kind, seed), answers(kind, seed + 1)
        if metric.takes == "texts":
            truth, guess = (np.array([f"word {n}" for n in side]) for side in (truth, guess))
        sure = truth
        if metric.takes == "probabilities":
            draw, sure = (
                np.random.default_rng(seed),
                truth if kind == "labels" else np.eye(4)[truth],
            )
            guess = draw.random(sure.shape)
            guess = guess if kind == "labels" else guess / guess.sum(1, keepdims=True)
        score, best = metric.function(truth, guess), metric.function(truth, sure)
        if score is None or best is None:
            assert metric.binary or (truth == truth[0]).all()
            continue
        assert sign * score <= sign * best
        assert metric.bounds[0] <= score <= metric.bounds[1]
        assert metric.function(truth[order], guess[order]) == pytest.approx(score, abs=1e-12)


def predictions(truth: np.ndarray, probabilities: np.ndarray) -> Predictions:
    many = truth.ndim == 2
    guess = (probabilities > 0.5).astype(int) if many else probabilities.argmax(1)
    return Predictions(truth, guess, probabilities, np.zeros(len(truth)), np.ones(len(truth), int))


def test_metrics_of_probabilities_are_those_of_scikit_learn() -> None:
    from sklearn import metrics

    theirs: Any = metrics

    draw = np.random.default_rng(0)
    for classes in (2, 4):
        truth = draw.integers(0, classes, 200)
        p = draw.dirichlet(np.ones(classes), 200)
        mine = [m for m in METRICS.values() if m.takes == "probabilities"]
        ours = {m.name: m(predictions(truth, p)) for m in mine}
        side = p[:, 1] if classes == 2 else p
        one_hot = truth if classes == 2 else np.eye(classes)[truth]
        assert ours["auroc"] == pytest.approx(
            theirs.roc_auc_score(truth, side, multi_class="ovr"), abs=1e-12
        )
        assert ours["auprc"] == pytest.approx(
            theirs.average_precision_score(one_hot, side), abs=1e-12
        )
        assert ours["brier"] == pytest.approx(theirs.brier_score_loss(truth, side), abs=1e-12)
    truth, p = draw.integers(0, 2, (200, 3)), draw.random((200, 3))
    assert METRICS["auroc"](predictions(truth, p)) == pytest.approx(theirs.roc_auc_score(truth, p))


@given(st.integers(0, 2**31))
def test_averages_and_errors_are_those_of_scikit_learn(seed: int) -> None:
    from sklearn import metrics

    theirs: Any = metrics

    draw = np.random.default_rng(seed)
    for kind in ("class", "labels"):
        truth, guess = answers(kind, seed), answers(kind, seed + 1)
        for score in ("f1", "precision", "recall"):
            for average in ("macro", "micro", "weighted"):
                if metric := METRICS.get(f"{score}_{average}"):
                    function = getattr(theirs, f"{score}_score")
                    expected = function(truth, guess, average=average, zero_division=0)
                    assert metric.function(truth, guess) == pytest.approx(expected, abs=1e-12)
    numbers, guess = draw.normal(size=9).astype(np.float32), draw.normal(size=9).astype(np.float32)
    for name, function in {
        "mae": theirs.mean_absolute_error,
        "rmse": theirs.root_mean_squared_error,
        "max_error": theirs.max_error,
        "r2": theirs.r2_score,
    }.items():
        assert METRICS[name].function(numbers, guess) == pytest.approx(
            function(numbers, guess), 1e-5
        )
    assert METRICS["r2"].function(np.ones(3), np.ones(3)) == 1.0
    assert METRICS["r2"].function(np.ones(3), np.zeros(3)) == 0.0


def test_sensitivity_and_specificity_are_recalls_of_the_two_labels() -> None:
    truth, p = np.array([0, 0, 0, 1, 1]), np.array([0.1, 0.2, 0.9, 0.8, 0.3])
    made = predictions(truth, np.stack([1 - p, p], 1))
    assert METRICS["sensitivity"](made) == 1 / 2 and METRICS["specificity"](made) == 2 / 3
    assert METRICS["sensitivity"](made.select(np.array([0, 1]))) is None


def test_a_class_that_all_rows_or_no_row_has_is_left_out_of_the_area() -> None:
    from sklearn import metrics

    theirs: Any = metrics

    truth, p = np.array([0, 1, 0, 1]), np.random.default_rng(1).dirichlet(np.ones(3), 4)
    area = METRICS["auroc"](predictions(truth, p))
    assert area == pytest.approx(
        np.mean([theirs.roc_auc_score(truth == c, p[:, c]) for c in (0, 1)])
    )
    assert METRICS["auroc"](predictions(np.zeros(4, int), p)) is None
    assert isnan(METRICS["auroc"](predictions(truth, p * nan)) or 0)
    assert isnan(METRICS["calibration_error"](predictions(truth, p * nan)) or 0)


def test_calibration_compares_confidence_with_frequency() -> None:
    # Ten probabilities of one value, of which half are right: of the second one of two classes,
    # and of the predicted one of three.
    truth = np.array([0, 1] * 5)
    for row, value in (([0.85, 0.15], 0.15), ([0.75, 0.2, 0.05], 0.75)):
        p, size = np.tile(row, (10, 1)), int(value * 10)
        error = METRICS["calibration_error"](predictions(truth, p))
        assert error == pytest.approx(abs(value - 0.5))
        counts, confidence, frequency = calibration_bins(truth, p)
        assert confidence[size] == pytest.approx(value) and frequency[size] == 0.5
        assert counts[size] == counts.sum() == 10


def test_predictions_of_examples_with_several_labels_are_selected_and_joined() -> None:
    rows = np.arange(6)
    made = Predictions(rows, rows, np.stack([rows, rows], 1), rows * 1.0, np.array([2, 0, 3, 1]))
    some = made.select(np.array([2, 0, 2, 1]))
    assert some.truth.tolist() == [2, 3, 4, 0, 1, 2, 3, 4] and some.sizes.tolist() == [3, 2, 3, 0]
    joined = Predictions.join([made.select(np.arange(2)), made.select(np.arange(2, 4))])
    assert joined.truth.tolist() == rows.tolist() and joined.probabilities is not None


def test_a_direction_is_that_of_the_metric_and_never_follows_from_a_name() -> None:
    for metric in METRICS.values():
        for name in (metric.name, f"global.{metric.name}", f"personal.{metric.name}_worst"):
            assert metric_direction(name) is metric.higher_is_better
    assert metric_direction("hamming_loss") is False is metric_direction("sites.global.perplexity")
    assert metric_direction("personal.accuracy_std") is False
    assert metric_direction("global.mean_error") is None is metric_direction("auc_of_mine")
    assert metric_direction("global.mean_error", {"mean_error": True}) is True


def test_nothing_to_put_together_is_said() -> None:
    with pytest.raises(FedplanError, match="at least one client"):
        score_spread({})
