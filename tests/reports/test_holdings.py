# SPDX-License-Identifier: Apache-2.0
"""Who holds what: the counts are those of the run, and the measure is 0 for alike and 1 for apart."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from commands import run

from fedplan.reports.holdings import Holding, Holdings, holdings_of
from fedplan.studies.schema import read_study
from fedplan.studies.shares import shares_of


def of(*labels: dict[str, int]) -> Holdings:
    held = tuple(Holding(f"c{n}", sum(each.values()), 0, each) for n, each in enumerate(labels))
    return Holdings("made", held, ("a", "b", "c"), 0)


def test_the_counts_are_those_that_a_run_trains_and_tests_on(here: Path) -> None:
    study = read_study(here / "study.toml")
    found, shares = holdings_of(study), shares_of(study, None)
    assert {c.client: c.train for c in found.clients} == {
        n: len(r) for n, r in shares.train.items()
    }
    assert {c.client: c.own for c in found.clients} == {
        n: len(shares.own.get(n, ())) for n in shares.train
    }
    for each in found.clients:
        assert sum(each.labels.values()) == each.train + each.own
    assert shares.test is not None and found.test == len(shares.test)


@pytest.mark.parametrize(
    ("held", "unlike", "word"),
    [
        (of({"a": 5, "b": 5}, {"a": 50, "b": 50}), 0.0, "nearly alike"),
        (of({"a": 9}, {"b": 9}, {"c": 9}), 2 / 3, "very unlike"),
        (of({"a": 10}, {"a": 5, "b": 5}), 0.25, "somewhat unlike"),
    ],
)
def test_how_unlike_clients_are(held: Holdings, unlike: float, word: str) -> None:
    assert held.unlike == pytest.approx(unlike)
    assert word in " ".join(held.words())


def test_without_labels_there_is_no_measure() -> None:
    assert of({}, {}).unlike is None
    assert "Labels" not in " ".join(of({}, {}).words())


def test_the_command_draws_and_the_figure_is_sound(here: Path) -> None:
    code, out = run("data", "study.toml", "--svg", "who.svg")
    assert code == 0 and "Drawn: who.svg" in out, out
    said = json.loads(run("data", "study.toml", "--json")[1])
    for each in said["clients"]:
        assert each["client"] in out and str(each["train"]) in out
    root = ElementTree.fromstring(Path("who.svg").read_text())
    drawn = [each for each in root.iter("{http://www.w3.org/2000/svg}title")]
    assert sum(int(each.text.rpartition(": ")[2]) for each in drawn if each.text) == sum(
        c["train"] + c["own"] for c in said["clients"]
    )


def test_any_number_of_labels_is_drawn_and_named() -> None:
    labels = {f"a label of some length {number}": number for number in range(1, 31)}
    few = dict(list(labels.items())[:9])
    drawn = replace(of(labels, few), labels=tuple(labels)).drawn()
    assert len(drawn.rows) == 39 and all(f"some length {n}" in drawn.svg() for n in range(1, 31))
    assert len(replace(of({}, {}), labels=()).drawn().rows) == 2
