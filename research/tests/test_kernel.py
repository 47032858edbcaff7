# SPDX-License-Identifier: Apache-2.0
"""Linear attention: what is said in closed form is what comes out when it is played."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from research.kernel.courses import Course, course
from research.kernel.frozen import split, stage
from research.kernel.problem import Array, Problem, Setting, Weights, draw, start
from research.kernel.profile import envelope, gradients, lowest, restricted
from research.kernel.rounds import Pace, path, play, play_frozen

SMALL = Setting(0.5, clients=4, rows=8)


@pytest.fixture(scope="module")
def problem() -> Problem:
    return draw(SMALL, seed=7)


@pytest.fixture(scope="module")
def weights(problem: Problem) -> Weights:
    """Some weights on the way, none of them 0."""
    return path(problem, start(problem, 7), Pace(5, rounds=6))[-1].weights


def slope_of(loss: Callable[[Array], float], at: Array, width: float = 1e-3) -> Array:
    """The gradient by central differences of fourth order."""
    found = np.zeros_like(at)
    for place in np.ndindex(at.shape):
        step = np.zeros_like(at)
        step[place] = width
        near = loss(at + step) - loss(at - step)
        far = loss(at + 2 * step) - loss(at - 2 * step)
        found[place] = (8 * near - far) / (12 * width)
    return found


def off(found: Array, expected: Array) -> float:
    """How far two arrays lie apart, over the length of what is expected."""
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("part", Weights._fields)
def test_the_gradient_is_that_of_differences(part: str, problem: Problem, weights: Weights) -> None:
    def loss(at: Array) -> float:
        there = weights._replace(**{part: at})
        return restricted(problem, there.query, there.key).loss(there.value)

    found = getattr(gradients(problem, weights.apart(problem.clients)).mean(), part)
    assert off(found, slope_of(loss, getattr(weights, part))) < 1e-8


def test_the_envelope_gradient_is_that_of_the_profile(problem: Problem, weights: Weights) -> None:
    query, key = envelope(problem, weights.query, weights.key)
    by_query = slope_of(lambda at: restricted(problem, at, weights.key).profile, weights.query)
    by_key = slope_of(lambda at: restricted(problem, weights.query, at).profile, weights.key)
    assert max(off(query, by_query), off(key, by_key)) < 1e-8


def test_each_clients_loss_is_the_mean_square_of_its_rows(
    problem: Problem, weights: Weights
) -> None:
    from research.kernel.problem import features

    made = features(problem.tokens, weights.query[None], weights.key[None]) @ weights.value
    plain = 0.5 * np.sum((made - problem.targets) ** 2) / (problem.clients * problem.rows)
    plain += 0.5 * problem.ridge * np.sum(weights.value**2)
    found = restricted(problem, weights.query, weights.key).loss(weights.value)
    assert found == pytest.approx(plain, rel=1e-12)


def test_no_value_is_better_than_that_of_the_ridge(problem: Problem, weights: Weights) -> None:
    left = restricted(problem, weights.query, weights.key)
    assert left.loss(left.best) == pytest.approx(left.profile, rel=1e-12)
    rng = np.random.default_rng(0)
    for _ in range(20):
        near = left.best + 0.1 * rng.normal(size=left.best.shape)
        assert left.loss(near) - left.profile == pytest.approx(left.above(near), rel=1e-9)
        assert left.above(near) > 0


@pytest.mark.parametrize("steps", [1, 5, 20])
def test_the_frozen_stage_is_its_closed_form(
    steps: int, problem: Problem, weights: Weights
) -> None:
    pace = Pace(steps)
    made = stage(restricted(problem, weights.query, weights.key), steps, pace.rate)
    played = play_frozen(problem, weights, pace, rounds=12)
    assert np.abs(made.after(weights.value, 12) - played.value).max() < 1e-12
    assert played.query is weights.query


def test_the_limit_is_where_the_rounds_end(problem: Problem, weights: Weights) -> None:
    steep, pace = replace(problem, ridge=0.5), Pace(10, rate=0.1)
    made = stage(restricted(steep, weights.query, weights.key), pace.steps, pace.rate)
    played = play_frozen(steep, weights, pace, rounds=80)
    assert np.abs(made.limit - played.value).max() < 1e-12


def test_the_limit_is_the_best_value_only_where_nothing_drifts(
    problem: Problem, weights: Weights
) -> None:
    left = restricted(problem, weights.query, weights.key)
    far = [float(np.linalg.norm(stage(left, k, 0.02).limit - left.best)) for k in (1, 5, 20, 80)]
    assert far[0] < 1e-12
    assert far == sorted(far)
    assert far[1] > 1e-4
    alike = replace(left, curvatures=np.repeat(left.curvature[None], problem.clients, 0))
    assert np.abs(stage(alike, 20, 0.02).limit - alike.best).max() < 1e-12
    agreed = replace(left, pulls=left.curvatures @ np.ones((problem.width, 3)))
    assert np.abs(stage(agreed, 20, 0.02).limit - agreed.best).max() < 1e-12


def test_the_split_of_the_error_leaves_nothing_over(problem: Problem, weights: Weights) -> None:
    pace, left = Pace(5), restricted(problem, weights.query, weights.key)
    reference = lowest(problem, weights.query, weights.key)
    found = split(left, weights.value, steps=5, rate=pace.rate, rounds=9, reference=reference)
    played = play_frozen(problem, weights, pace, rounds=9)
    assert found.error == pytest.approx(left.loss(played.value) - reference, abs=1e-12)
    assert found.bias > 0
    assert found.drift > 0


def test_drift_is_made_of_sums(problem: Problem, weights: Weights) -> None:
    """The two numbers of a round add up to the mean square of what clients changed."""
    pace = Pace(3)
    alone = [
        play(
            Problem(problem.tokens[m : m + 1], problem.targets[m : m + 1], problem.ridge),
            weights,
            pace,
        )
        for m in range(problem.clients)
    ]
    found = play(problem, weights, pace)
    squares = np.mean([each.kernel.step for each in alone])
    assert found.kernel.apart + found.kernel.step == pytest.approx(squares, rel=1e-12)
    assert found.kernel.size == pytest.approx(np.sum(weights.query**2) + np.sum(weights.key**2))


@pytest.fixture(scope="module")
def courses() -> dict[tuple[float, int], Course]:
    """One seed at five and at twenty steps, for clients that agree and that do not."""
    asked = ((0.0, 5, 60), (0.25, 20, 50), (0.5, 5, 90), (0.5, 20, 50))
    return {(h, k): course(Setting(h), Pace(k, rounds=r), seed=0) for h, k, r in asked}


def best(one: Course) -> int:
    return one.errors.index(min(one.errors))


def test_the_best_warm_up_is_earlier_with_more_steps_or_heterogeneity(
    courses: dict[tuple[float, int], Course],
) -> None:
    assert best(courses[0.5, 20]) < best(courses[0.5, 5]) < 90
    assert best(courses[0.5, 20]) < best(courses[0.25, 20]) < 50


def test_never_freezing_wins_where_clients_agree(
    courses: dict[tuple[float, int], Course],
) -> None:
    assert best(courses[0.0, 5]) == 60
    assert courses[0.0, 5].profile == tuple(sorted(courses[0.0, 5].profile, reverse=True))


def test_under_heterogeneity_the_profile_turns_up_again(
    courses: dict[tuple[float, int], Course],
) -> None:
    profile = courses[0.5, 20].profile
    assert 1.1 * min(profile) < profile[-1]
