# SPDX-License-Identifier: Apache-2.0
"""All methods beside each other: the page is that of its result files, and these of their studies."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fedplan.studies.experiment import make_method
from fedplan.studies.schema import study_from_dict
from research import beside
from research.beside import (
    BASE,
    PAGE,
    SETS,
    Kept,
    asked_for,
    read_kept,
    sent,
    study_digest,
    tables,
    until,
)
from research.decide.places import placed
from research.words import translate_study

RUN = Kept(
    variant=BASE,
    seed=0,
    study="",
    plan="share()",
    whole=True,
    seconds=1.0,
    cpu=1.0,
    up=[1_000_000] * 4,
    rounds=[2, 4],
    world=[0.5, 0.7],
    own=[0.5, 0.9],
    worst=[0.1, 0.2],
    epsilon=[],
    facts={},
)


def test_the_tables_of_the_page_are_those_of_the_result_files() -> None:
    assert PAGE.read_text().endswith(tables()), "make it anew: python -m research.beside --write"


@pytest.mark.parametrize("name", SETS)
def test_every_kept_run_was_played_by_the_words_of_its_study(name: str) -> None:
    asked = {(variant, seed): said for of, variant, seed, said in asked_for() if of == name}
    for key, run in read_kept(name).items():
        assert run.study == study_digest(asked[key]), (
            f"{key} was played by other words: play it again"
        )


def test_every_run_of_the_sets_can_be_asked_for() -> None:
    for _, variant, seed, said in asked_for():
        if not seed:
            assert make_method(study_from_dict(translate_study(placed(said, {}, seed)))), variant


def test_what_is_sent_until_a_score_counts_the_rounds_until_it_and_no_more() -> None:
    early = replace(RUN, variant="early", world=[0.7, 0.6])
    never = replace(RUN, variant="never", world=[0.6, 0.6])
    runs = {(each.variant, 0): each for each in (RUN, early, never)}
    assert until(runs, BASE, sent) == "4"
    assert until(runs, "early", sent) == "2"
    assert until(runs, "never", sent) == "not reached"


def test_a_method_that_keeps_something_is_held_to_the_score_of_the_clients_own_models() -> None:
    kept = replace(RUN, variant="kept", whole=False, world=[0.9, 0.9], own=[0.8, 0.9])
    runs = {(each.variant, 0): each for each in (RUN, kept)}
    assert until(runs, "kept", sent) == "4"


def test_runs_of_other_words_and_of_methods_that_are_gone_are_in_no_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = {name: read_kept(name) for name in SETS}
    strange = {
        (BASE, 0): replace(kept[SETS[0]][(BASE, 0)], study="other words", own=[9.0, 9.0, 9.0]),
        ("gone", 0): replace(RUN, variant="gone"),
    }
    monkeypatch.setattr(beside, "read_kept", lambda name: {**kept[name], **strange})
    found = tables()
    assert found.count("50 of 51 runs were played") == len(SETS) and "gone" not in found
    monkeypatch.setattr(beside, "read_kept", lambda name: {})
    assert "0 of 51 runs" in tables()
