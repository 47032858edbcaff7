# SPDX-License-Identifier: Apache-2.0
"""Scores of many clients, put together."""

from __future__ import annotations

from math import isclose, isnan, nan

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from often import often

from fedplan.data.metrics import METRICS, Metric, metric_direction, score_spread
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
        score = metric.function(truth, guess)
        assert sign * score <= sign * metric.function(truth, truth)
        assert metric.bounds[0] <= score <= metric.bounds[1]
        assert isclose(score, metric.function(truth[order], guess[order]), abs_tol=1e-12)


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
