# SPDX-License-Identifier: Apache-2.0
"""All screens show the same scores of a run, in its task's metric, the one that matters first."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from fedplan.data.metrics import METRICS, metric_spread
from fedplan.data.tasks.kinds import TASK_KINDS
from fedplan.federation.ledger.records import RoundRecord
from fedplan.reports.formats import round_heading, simulation_line, sites_line
from fedplan.reports.pages.test_scores import number, set_title
from fedplan.studies.run_scores import CLIENT_TESTS, COMMON_TEST, ScoreRules

MEASURED = ("loss", "perplexity", "f1", *METRICS)
"""All that any task measures; each has a value of its own in these rows."""
COUNTS = {
    **{"round": 3.0, "loss": 9.0, "upload_bytes": 0.0, "download_bytes": 0.0},
    **{"aggregated": 2.0, "rejected": 0.0},
}


def row_of(primary: str) -> dict[str, float]:
    """A simulated round in which every score is told, none like another."""
    number = MEASURED.index(primary) / 100
    scores = {f"global.{name}": 1 + n / 100 for n, name in enumerate(MEASURED)}
    own = {"a.b": 7.0 + number, "north": 7.5 + number}
    scores |= {f"clients.{client}.{primary}": score for client, score in own.items()}
    spread = metric_spread(primary, own)
    return {**COUNTS, **scores, **{f"personal.{name}": v for name, v in spread.items()}}


def sites_row(**models: dict[str, float]) -> dict[str, float]:
    """A round of sites that measure these models."""
    row = dict(COUNTS)
    for model, scores in models.items():
        row |= {f"sites.by.{site}.{model}.accuracy": score for site, score in scores.items()}
        spread = metric_spread("accuracy", scores)
        row |= {f"sites.spread.{model}.{name}": value for name, value in spread.items()}
        row[f"sites.{model}.accuracy"] = 0.9
    return row


@pytest.mark.parametrize("personal", [True, False])
@pytest.mark.parametrize("kind", TASK_KINDS)
def test_every_line_tells_the_score_that_the_task_is_known_by(kind: str, personal: bool) -> None:
    task = TASK_KINDS[kind]
    rules, row = ScoreRules(task.primary, task.higher_is_better, personal), row_of(task.primary)
    line = simulation_line(row, rules)
    sites = sites_line(RoundRecord(3, "", ("a", "b"), {}, {}, {}, 0, 0), row, rules)
    for score in rules.of_row(row).scores:
        assert f"{score.value:.3f}" in line and f"{score.label} {score.value:.3f}" in sites
    others = {f"{row[f'global.{n}']:.3f}" for n in MEASURED if n != task.primary}
    assert not others & set(re.findall(r"\d\.\d{3}", f"{line} {sites}"))
    heading = re.split(r"  +", round_heading(rules))
    columns = (
        ["personal ± std", "worst client", "global"] if personal else ["global", "worst client"]
    )
    assert heading[2:-2] == columns
    assert len(re.split(r"  +", line.strip())) == len(heading)


def test_a_plan_that_keeps_something_leads_with_the_personal_models() -> None:
    rules, row = ScoreRules("accuracy", True, True), row_of("accuracy")
    personal, worst, overall = rules.of_row(row).scores
    assert [personal.kind, worst.kind, overall.kind] == ["personal", "worst client", "global"]
    assert (personal.clients, personal.examples) == (2, CLIENT_TESTS)
    assert (worst.client, worst.value) == ("a.b", row["clients.a.b.accuracy"])
    assert overall.examples == COMMON_TEST and "on the common test set" in overall.text
    assert rules.of_row({**row, "global.clients": 2.0}).scores[2].examples == CLIENT_TESTS
    assert rules.of_run([row, {**COUNTS, "round": 4.0}]).round == 3
    assert rules.of_run([COUNTS]).leading is None


def test_a_noisy_score_has_its_interval_wherever_it_stands() -> None:
    rules = ScoreRules("auroc", True, False)
    row = {**COUNTS, "sites.global.auroc": 0.7, "sites.global.auroc_low": 0.65}
    assert rules.of_row(row).scores[0].interval is None, "half an interval is none"
    row |= {"sites.global.auroc_high": 0.81}
    record = RoundRecord(3, "", ("a", "b"), {}, {}, {}, 0, 0)
    lines = (simulation_line(row, rules), sites_line(record, row, rules), *rules.of_row(row).texts)
    assert all("0.700 (0.650 to 0.810)" in line for line in lines), lines
    assert rules.of_row(row).json()["scores"][0]["interval"] == (0.65, 0.81)


def test_a_score_says_whether_it_is_pooled_or_a_mean_and_small_ones_have_digits() -> None:
    counted = {**COUNTS, "sites.personal.accuracy": 0.8, "sites.clients": 5.0}
    (score,) = ScoreRules("accuracy", True, True).of_row(counted).scores
    assert score.about == "pooled over 5 clients, each on its own test examples"
    spread = {"sites.spread.global.rmse": 0.0005, "sites.spread.global.clients": 2.0}
    rules, row = ScoreRules("rmse", False, False), {**COUNTS, "sites.global.rmse": 0.0004}
    assert rules.of_row({**row, **spread}).texts == [
        "global rmse 0.0004 (on all clients' test examples, mean of 2 clients weighted by examples)"
    ]
    assert rules.of_row(row).texts == ["global rmse 0.0004 (on all clients' test examples)"]
    assert [number(value) for value in (0.0, 0.00042, 0.5, 12.345)] == [
        *("0.000", "0.00042", "0.500", "12.35")
    ]
    entry = {"model": "global", "on": "clients", "examples": 7, "clients": {"north": {}}}
    assert set_title(entry) == "Global model on the test examples of one client, 7 test examples"


def test_of_a_plan_that_shares_all_the_global_model_leads() -> None:
    rules, row = ScoreRules("accuracy", True, False), row_of("accuracy")
    assert [score.kind for score in rules.of_row(row).scores] == ["global", "worst client"]
    without = {name: value for name, value in row.items() if not name.startswith("global.")}
    assert [s.kind for s in rules.of_row(without).scores] == ["mean of clients", "worst client"]


def test_privacy_hides_the_worst_client() -> None:
    rules = replace(ScoreRules("accuracy", True, True), names_clients=False)
    assert [s.kind for s in rules.of_row(row_of("accuracy")).scores] == ["personal", "global"]


def test_sites_that_measure_the_global_model_alone_lead_with_it() -> None:
    rules = ScoreRules("accuracy", True, True)
    scores = rules.of_row(sites_row(**{"global": {"north": 0.8, "south": 0.6}})).scores
    assert [score.kind for score in scores] == ["global", "worst client"]
    assert scores[1].client == "south" and scores[0].examples == CLIENT_TESTS
    both = {"global": {"north": 0.8}, "personal": {"north": 0.9, "south": float("nan")}}
    scores = rules.of_row(sites_row(**both)).scores
    assert [score.kind for score in scores] == ["personal", "worst client", "global"]
    assert scores[1].client == "south", "a model that diverged is the worst"
