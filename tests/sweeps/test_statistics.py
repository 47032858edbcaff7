# SPDX-License-Identifier: Apache-2.0
"""Intervals and p values are those of scipy, and Holm's correction is his."""

from __future__ import annotations

from math import isclose, sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from fedplan.sweeps.statistics import holm, mean_interval, p_value, t_quantile

NUMBERS = st.lists(st.floats(-1e3, 1e3).map(lambda x: round(x, 3)), min_size=2, max_size=12)
CHANCES = st.lists(st.one_of(st.none(), st.floats(0, 1)), max_size=12)


@given(NUMBERS.filter(lambda each: len(set(each)) > 1))
def test_an_interval_and_a_p_value_are_those_of_scipy(numbers: list[float]) -> None:
    found = mean_interval(numbers)
    low, high = stats.t.interval(0.95, len(numbers) - 1, found.mean, stats.sem(numbers))
    assert found.low == pytest.approx(low) and found.high == pytest.approx(high)
    assert p_value(numbers) == pytest.approx(stats.ttest_rel(numbers, [0.0] * len(numbers)).pvalue)


def test_worked_by_hand() -> None:
    found = mean_interval([0.1, 0.2, 0.3])
    assert found.mean == pytest.approx(0.2)
    assert found.half_width == pytest.approx(4.302653 * 0.1 / sqrt(3), rel=1e-6)
    assert [round(t_quantile(n), 3) for n in (1, 2, 3, 4)] == [12.706, 4.303, 3.182, 2.776]


def test_one_seed_has_no_interval_and_no_p_value() -> None:
    assert mean_interval([0.5]).half_width is None and mean_interval([0.5]).text() == "0.500"
    assert p_value([0.5]) is None and p_value([]) is None


def test_where_all_seeds_agree_there_is_no_spread() -> None:
    assert p_value([0.0, 0.0]) is None and p_value([0.5, 0.5]) is None
    # The same gains, but for how floats are written.
    assert p_value([0.82 - 0.80, 0.72 - 0.70]) is None
    assert mean_interval([0.5, 0.5]).half_width == 0.0


def test_holm_by_hand() -> None:
    """Four p values: times 4, 3, 2, 1 from the smallest on, and never below the one before."""
    found = holm([0.04, 0.005, 0.03, 0.02])
    assert [round(p, 3) for p in found if p is not None] == [0.06, 0.02, 0.06, 0.06]


@given(CHANCES)
def test_holm_lies_between_none_and_bonferroni_and_keeps_the_order(
    values: list[float | None],
) -> None:
    found, count = holm(values), sum(p is not None for p in values)
    pairs = sorted(
        (p, q) for p, q in zip(values, found, strict=True) if p is not None and q is not None
    )
    assert [p is None for p in values] == [p is None for p in found]
    assert all(p <= q or isclose(p, q) for p, q in pairs)
    assert all(q <= min(1.0, count * p) or isclose(q, count * p) for p, q in pairs[:1])
    assert all(
        q <= min(1.0, count * p) + 1e-12 or q == pairs[i - 1][1] for i, (p, q) in enumerate(pairs)
    )
    assert [q for _, q in pairs] == sorted(q for _, q in pairs)
