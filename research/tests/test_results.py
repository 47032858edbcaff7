# SPDX-License-Identifier: Apache-2.0
"""The results of the kernel lab: what was expected of them, and the page that tells of them."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from research.kernel.courses import course
from research.kernel.figures import drawn
from research.kernel.grid import HETEROGENEITIES, STEPS
from research.kernel.page import tables, written
from research.kernel.problem import Setting
from research.kernel.rounds import Drift, Pace
from research.kernel.rules import Balance, Bend, Chance, Rule, warm_up
from research.kernel.table import ROWS, SEEDS, WARM_UPS
from research.words import translate_figure

ROOT = Path(__file__).parents[2]
OUT = ROOT / "research" / "results" / "kernel"
KEPT = {
    each: json.loads((OUT / f"{each}.json").read_text()) for each in ("table", "curves", "rules")
}

EXPECTED = {
    (0.0, 5, True): (0.816, 0.657, 0.449, 0.214, 0.060, 0.010, 0.0022, 0.0011),
    (0.0, 20, True): (0.816, 0.220, 0.063, 0.011, 0.0011, 0.0002, 0.0001, 0.0000),
    (0.25, 5, True): (0.824, 0.671, 0.454, 0.211, 0.049, 0.019, 0.0061, 0.0063),
    (0.25, 20, True): (0.824, 0.202, 0.051, 0.013, 0.0059, 0.0064, 0.0066, 0.0103),
    (0.5, 1, True): (0.855, 0.849, 0.832, 0.767, 0.578, 0.326, 0.208, 0.141),
    (0.5, 5, True): (0.847, 0.685, 0.448, 0.224, 0.048, 0.041, 0.050, 0.066),
    (0.5, 20, True): (0.847, 0.203, 0.063, 0.056, 0.059, 0.061, 0.061, 0.096),
    (0.5, 5, False): (0.825, 0.637, 0.415, 0.179, 0.047, 0.016, 0.0032, 0.0025),
    (1.0, 5, False): (0.831, 0.509, 0.335, 0.228, 0.047, 0.019, 0.0173, 0.0231),
    (0.5, 20, False): (0.825, 0.186, 0.053, 0.017, 0.0064, 0.0051, 0.0051, 0.0054),
    (1.0, 20, False): (0.833, 0.192, 0.070, 0.061, 0.061, 0.062, 0.063, 0.067),
}
"""Final errors of another program of the same model, by heterogeneity, steps and who differs."""


def test_the_first_table_is_that_of_another_program() -> None:
    """Within the deviation of the seeds; below heterogeneity 1 to the digits that are told.

    There its reference, 1500 rounds of one step, had not yet come to the bottom that ours has.
    """
    assert set(EXPECTED) == set(ROWS)
    for row in KEPT["table"]["rows"]:
        expected = EXPECTED[row["heterogeneity"], row["steps"], row["kernels differ"]]
        assert len(expected) == len(WARM_UPS)
        for one, other, deviation in zip(row["mean"], expected, row["deviation"], strict=True):
            assert abs(one - other) <= deviation + 1e-4, row
            assert row["heterogeneity"] == 1 or abs(one - other) < 0.0006, row


def test_a_row_of_the_table_comes_out_again() -> None:
    made = [course(Setting(0.5), Pace(1), seed).errors for seed in SEEDS]
    kept = next(r for r in KEPT["table"]["rows"] if (r["heterogeneity"], r["steps"]) == (0.5, 1))
    for done, mean in zip(WARM_UPS, kept["mean"], strict=True):
        assert sum(errors[done] for errors in made) / len(made) == pytest.approx(mean, rel=1e-4)


def cell(heterogeneity: float, steps: int) -> dict[str, Any]:
    asked = (heterogeneity, steps)
    return next(c for c in KEPT["curves"]["cells"] if (c["heterogeneity"], c["steps"]) == asked)


def best(heterogeneity: float, steps: int) -> float:
    """The median over seeds: one seed that learns late moves the best of the mean error far."""
    return median(cell(heterogeneity, steps)["best by seed"])


def test_the_best_warm_up_comes_earlier_with_more_local_steps() -> None:
    for heterogeneity in HETEROGENEITIES[1:]:
        for few, many in pairwise((5, 10, 20)):
            assert best(heterogeneity, many) < best(heterogeneity, few)


def test_the_best_warm_up_comes_earlier_with_more_heterogeneity() -> None:
    for steps in (5, 10, 20):
        for less, more in pairwise((0.125, 0.25, 0.5)):
            assert best(more, steps) < best(less, steps)


def test_never_freezing_is_best_where_clients_agree_or_do_not_drift() -> None:
    agreed = [cell(0.0, steps) for steps in STEPS]
    alone = [cell(heterogeneity, 1) for heterogeneity in HETEROGENEITIES]
    for each in (*agreed, *alone):
        assert each["errors"][-1] - min(each["errors"]) < 1e-6, each["steps"]


def test_the_parts_of_the_error_are_the_error() -> None:
    for each in KEPT["curves"]["cells"]:
        parts = sum(each["split at best"].values())
        assert parts == pytest.approx(each["errors"][each["best"]], rel=1e-4, abs=1e-9)


def judged(name: str) -> dict[str, Any]:
    return next(rule for rule in KEPT["rules"]["rules"] if rule["rule"] == name)


@pytest.mark.parametrize("name", ["bend", "balance"])
def test_a_rule_is_near_the_best_in_most_cells_and_never_freezes_the_agreed(name: str) -> None:
    """On five seeds that its constant was not chosen on. In the mean it is not: the page says so."""
    rule, said = judged(name), KEPT["rules"]
    assert len(said["seeds"]) >= 5
    assert not set(said["seeds"]) & set(said["seeds of the constants"])
    assert rule["never where clients agree"]
    assert rule["median excess"] < 0.01
    assert rule["cells within 10 %"] >= 0.75 * rule["cells"]
    by_seed = zip(rule["mean excess by seed"], judged("late")["mean excess by seed"], strict=True)
    assert sum(one < other for one, other in by_seed) == len(said["seeds"]) - 1


def test_the_page_says_that_the_criterion_was_missed() -> None:
    means = [judged(name)["mean excess"] for name in ("bend", "balance")]
    assert min(means) > 0.1
    assert "**Missed.**" in (ROOT / "research" / "pages" / "kernel.md").read_text()


RULES: tuple[Rule, ...] = (Bend(0.02), Balance(0.001), Chance(10))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_rule_looks_at_the_past_alone_and_has_no_unit(rule: Rule) -> None:
    pace = Pace(20, rounds=30)
    past = [Drift(1.0, 0.5**n, 4.0) for n in range(30)]
    done = warm_up(rule, past, pace)
    assert 10 <= done < 30
    changed = [*past[:done], *(Drift(9.0, 9.0, 9.0) for _ in past[done:])]
    assert warm_up(rule, changed, pace) == done
    other = [Drift(7 * each.apart, 7 * each.step, 7 * each.size) for each in past]
    assert warm_up(rule, other, pace) == done


@pytest.mark.parametrize("rule", [Bend(0.02), Balance(0.001)], ids=lambda rule: rule.name)
def test_one_local_step_is_never_frozen(rule: Rule) -> None:
    past = [Drift(1.0, 1e-12, 4.0) for _ in range(30)]
    assert warm_up(rule, past, Pace(1, rounds=30)) == 30


def test_the_page_has_the_tables_of_the_results() -> None:
    page = (ROOT / "research" / "pages" / "kernel.md").read_text()
    assert written(page, tables()) == page, "make it anew: python -m research.kernel.page"
    assert all(table in page for table in tables().values())


def test_the_figures_are_those_of_the_results() -> None:
    for name, drawing in drawn(OUT).items():
        kept = translate_figure((OUT / f"{name}.svg").read_text())
        assert kept == drawing.svg(alone=True) + "\n", "draw anew: python -m research.kernel draw"
