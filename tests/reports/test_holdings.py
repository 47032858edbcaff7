# SPDX-License-Identifier: Apache-2.0
"""Who holds what: the counts are those of the run, and the measure is 0 for alike and 1 for apart."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from commands import run

from fedplan.reports.client_data import ClientData, DataDistribution, data_distribution
from fedplan.studies.federated_data import load_federated_data
from fedplan.studies.schema import read_study


def of(*labels: dict[str, int]) -> DataDistribution:
    held = tuple(ClientData(f"c{n}", sum(each.values()), 0, each) for n, each in enumerate(labels))
    return DataDistribution("made", held, ("a", "b", "c"), 0)


def test_the_counts_are_those_that_a_run_trains_and_tests_on(here: Path) -> None:
    study = read_study(here / "study.toml")
    found, shares = data_distribution(study), load_federated_data(study, None)
    assert {c.client: c.train for c in found.clients} == {
        n: len(r) for n, r in shares.train.items()
    }
    assert {c.client: c.held_out for c in found.clients} == {
        n: len(shares.client_tests.get(n, ())) for n in shares.train
    }
    for each in found.clients:
        assert sum(each.labels.values()) == each.train + each.held_out
    assert shares.common_test is not None and found.test == len(shares.common_test)


@pytest.mark.parametrize(
    ("held", "label_skew", "word"),
    [
        (of({"a": 5, "b": 5}, {"a": 50, "b": 50}), 0.0, "nearly IID"),
        (of({"a": 9}, {"b": 9}, {"c": 9}), 2 / 3, "extreme"),
        (of({"a": 10}, {"a": 5, "b": 5}), 0.25, "mild"),
    ],
)
def test_label_skew_is_the_mean_total_variation(
    held: DataDistribution, label_skew: float, word: str
) -> None:
    assert held.label_skew == pytest.approx(label_skew)
    assert word in " ".join(held.sentences())


def test_without_labels_there_is_no_measure() -> None:
    assert of({}, {}).label_skew is None
    assert "Label skew" not in " ".join(of({}, {}).sentences())


def test_the_command_draws_and_the_figure_is_sound(here: Path) -> None:
    code, out = run("data", "study.toml", "--svg", "who.svg")
    assert code == 0 and "Written: who.svg" in out, out
    said = json.loads(run("data", "study.toml", "--json")[1])
    for each in said["clients"]:
        assert each["client"] in out and str(each["train"]) in out
    root = ElementTree.fromstring(Path("who.svg").read_text())
    drawn = [each for each in root.iter("{http://www.w3.org/2000/svg}title")]
    assert sum(int(each.text.rpartition(": ")[2]) for each in drawn if each.text) == sum(
        c["train"] + c["held_out"] for c in said["clients"]
    )


def test_any_number_of_labels_is_drawn_and_named() -> None:
    labels = {f"a label of some length {number}": number for number in range(1, 31)}
    few = dict(list(labels.items())[:9])
    drawn = replace(of(labels, few), labels=tuple(labels)).figure()
    assert len(drawn.rows) == 39 and all(f"some length {n}" in drawn.svg() for n in range(1, 31))
    assert len(replace(of({}, {}), labels=()).figure().rows) == 2
