# SPDX-License-Identifier: Apache-2.0
"""A comparison is what follows by hand from the runs, and says where there are too few."""

from __future__ import annotations

import csv
import json
import shutil
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from commands import run
from scipy import stats
from sweeps import small_study

from fedplan.errors import FedplanError
from fedplan.federation.ledger.history import Metrics
from fedplan.federation.ledger.status import ask_to_stop
from fedplan.language.parser import parse
from fedplan.run import run_study
from fedplan.runners.simulation import Simulation
from fedplan.studies.run import read_run
from fedplan.studies.schema import read_study
from fedplan.sweeps.comparisons import compare, compare_groups, group_results
from fedplan.sweeps.results import RunResult, choose_scores, read_run_result
from fedplan.sweeps.sweeping import Sweep


def last(swept: Sweep, method: str, name: str = "global.accuracy") -> list[float]:
    folders = (swept.folder / f"method.name={method},seed={seed}" for seed in range(3))
    return [read_run(folder).metrics[-1][name] for folder in folders]


def test_the_numbers_are_those_of_the_runs(swept: Sweep) -> None:
    found = compare([swept.folder], score="global.loss")
    base, other = found.rows
    ones, others = last(swept, "fedavg", "global.loss"), last(swept, "fedper", "global.loss")
    assert [row.group.label for row in found.rows] == ["fedavg", "fedper"]
    assert base.score.mean == pytest.approx(sum(ones) / 3) and base.difference is None
    assert other.difference is not None and not found.higher_is_better
    assert other.difference.mean == pytest.approx((sum(others) - sum(ones)) / 3)
    by_hand = stats.ttest_rel(others, ones)
    assert other.p == pytest.approx(by_hand.pvalue) == other.p_holm
    low, high = by_hand.confidence_interval(0.95)
    assert (other.difference.low, other.difference.high) == (
        pytest.approx(low),
        pytest.approx(high),
    )
    run_of = read_run(swept.folder / "method.name=fedper,seed=0")
    assert other.group.runs[0].upload_bytes == sum(
        int(row["upload_bytes"]) for row in run_of.metrics
    )
    assert other.group.mean_of("rounds") == 2 and (other.group.mean_of("seconds") or 0) > 0


def test_the_score_of_the_task_is_compared_unless_another_is_named(swept: Sweep) -> None:
    found = compare([swept.folder])
    assert found.score == "personal.accuracy", "fedper keeps its head"
    assert [other.score for other in found.others] == ["global.accuracy"]
    kept = [folder for folder in swept.folders if "fedper" in folder.name]
    assert (compare(kept).score, compare(kept).others) == ("personal.accuracy", ())
    shared = [folder for folder in swept.folders if "fedavg" in folder.name]
    assert (compare(shared).score, compare(shared).others) == ("global.accuracy", ())
    assert compare([swept.folder], score="personal.accuracy_worst").higher_is_better
    with pytest.raises(
        FedplanError, match=r"not all runs have global\.f2.*global\.accuracy.*--score"
    ):
        compare([swept.folder], score="global.f2")


def test_a_score_that_is_the_same_in_every_pair_has_no_p(swept: Sweep) -> None:
    results = [read_run_result(folder) for folder in swept.folders]
    same = [
        replace(each, metrics=Metrics([{**row, "global.accuracy": 0.5} for row in each.metrics]))
        for each in results
    ]
    found = compare_groups(group_results(same), "global.accuracy")
    assert found.rows[1].p is None and found.rows[1].p_holm is None
    assert "fedper: global.accuracy is the same in every pair, so there is no p" in found.notes


def test_runs_are_chosen_on_validation_where_all_have_it_and_it_is_said(swept: Sweep) -> None:
    results = [read_run_result(folder) for folder in swept.folders]
    on_test = compare_groups(group_results(results), choose_scores("", results)[0])
    assert "chosen on the test: optimistic" in on_test.markdown()
    column = f"validation.{on_test.score}"
    held = [
        replace(each, metrics=Metrics([{**row, column: 0.5} for row in each.metrics]))
        for each in results
    ]
    assert choose_scores("", held)[0] == column
    assert choose_scores("", [*held[1:], results[0]])[0] == on_test.score, "one has none"
    found = compare_groups(group_results(held), column)
    assert "chosen on validation" in found.markdown() and "optimistic" not in found.markdown()


def test_what_differs_is_said_in_words(swept: Sweep) -> None:
    words = compare([swept.folder]).rows[1].differences
    assert words[0] == "method.name is 'fedper', not 'fedavg'"
    assert words[1] == "the plan is chain(share(), keep(head)), not share()"
    assert words[2] == "head (51 params): kept, not shared, in all rounds"
    assert len(words) == 3


@pytest.mark.parametrize(
    ("seeds", "note", "interval"),
    [
        (1, "one seed: there is no interval", False),
        (2, "two seeds", True),
        (3, "fewer than 5", True),
    ],
)
def test_too_few_seeds_are_said(swept: Sweep, seeds: int, note: str, interval: bool) -> None:
    places = [swept.folder / n for n in swept.names if int(n[-1]) < seeds]
    found = compare(places, score="global.loss")
    assert any(note in each for each in found.notes)
    assert (found.rows[0].score.half_width is not None) == interval
    assert (found.rows[1].p_holm is not None) == interval
    assert note in found.markdown()


def test_only_seeds_of_both_groups_are_paired(swept: Sweep) -> None:
    found = compare([p for p in swept.folders if p.name != "method.name=fedavg,seed=1"])
    difference = found.rows[1].difference
    assert difference is not None and difference.count == 2
    assert any(note.startswith("two seeds") for note in found.notes), "an interval is of the pairs"
    assert any("2 of 3 seeds are in the first group too" in note for note in found.notes)


def test_a_run_that_goes_on_is_left_out_and_one_study_is_not_counted_twice(
    swept: Sweep, tmp_path: Path
) -> None:
    first = swept.folders[0]
    study = read_run(first).study.model_copy(update={"seed": 9})
    next(iter(Simulation(study, tmp_path / "open").rounds()))
    found = compare([first, tmp_path / "open"])
    assert any("is at round 1 of 2: left out" in note for note in found.notes)
    with pytest.raises(FedplanError, match="there is no finished run"):
        compare([tmp_path / "open"])
    shutil.copytree(first, tmp_path / "copy")
    with pytest.raises(FedplanError, match="have the same study and seed: name one of them"):
        compare([first, tmp_path / "copy"])


def test_a_run_that_a_rule_ended_counts_and_one_that_a_person_stopped_does_not(
    tmp_path: Path,
) -> None:
    study = read_study(small_study(tmp_path), ["train.rounds=3"])
    run_study(study, tmp_path / "ruled", callbacks=[lambda _: "good enough"])
    found = compare([tmp_path / "ruled"])
    assert (
        not any("left out" in note for note in found.notes)
        and found.baseline.mean_of("rounds") == 1
    )
    run_study(study, tmp_path / "asked", callbacks=[lambda _: ask_to_stop(tmp_path / "asked")])
    with pytest.raises(FedplanError, match="is at round 1 of 3: left out"):
        compare([tmp_path / "asked"])


def test_a_folder_that_cannot_be_read_is_noted_and_the_others_are_compared(
    swept: Sweep, tmp_path: Path
) -> None:
    shutil.copytree(swept.folder, tmp_path / "sweep")
    broken = tmp_path / "sweep" / "method.name=fedper,seed=2"
    (broken / "study.json").write_text("{")
    found = compare([tmp_path / "sweep"])
    assert [row.score.count for row in found.rows] == [3, 2]
    assert any(str(broken) in note and "left out" in note for note in found.notes)


def test_of_hidden_clients_no_bytes_are_told(tmp_path: Path) -> None:
    file = small_study(tmp_path)
    file.write_text(file.read_text() + '[privacy]\nunit = "client"\nepsilon = 8.0\n')
    run_study(read_study(file), tmp_path / "run")
    found = compare([tmp_path / "run"])
    (group,) = found.json()["groups"]
    assert group["upload_bytes"] is None and group["download_bytes"] is None
    assert next(csv.DictReader(StringIO(found.csv())))["upload_bytes"] == ""
    assert "Upload of all clients" not in found.html()
    for hidden in (
        "upload_bytes",
        "aggregated",
        "personal.accuracy_worst",
        "clients.client-00.accuracy",
    ):
        with pytest.raises(FedplanError, match="not all runs have") as told:
            compare([tmp_path / "run"], score=hidden)
        assert "client-00" not in str(told.value).partition(" has ")[2]


@pytest.mark.parametrize(
    "said",
    [
        {"primary_metric": ["x"]},
        {"round_seconds": "ab"},
        {"round_seconds": -5},
        {"stopped_early": 1},
    ],
)
def test_a_status_that_no_run_writes_is_noted(
    said: dict[str, object], swept: Sweep, tmp_path: Path
) -> None:
    shutil.copytree(swept.folders[0], tmp_path / "run")
    file = tmp_path / "run" / "status.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | said))
    found = compare([swept.folders[0], tmp_path / "run"])
    assert any("another type" in note for note in found.notes)


def test_less_is_better_of_a_loss_and_of_clients_of_a_task_that_is_scored_by_one(
    swept: Sweep,
) -> None:
    first = read_run_result(swept.folders[0])
    assert first.higher_is_better("personal.accuracy_worst") and not first.higher_is_better(
        "global.loss"
    )
    own = replace(first, directions={"accuracy": False, "mine": False})
    assert not own.higher_is_better("personal.accuracy_worst")
    assert not own.higher_is_better("global.mine") and own.higher_is_better("global.unknown")


def test_the_command_prints_markdown_csv_and_json(swept: Sweep, tmp_path: Path) -> None:
    place = str(swept.folder)
    code, told = run("compare", place)
    table = [line for line in told.splitlines() if line.startswith("|")]
    assert code == 0 and len(table) == 8
    assert table[0] == (
        "| runs | seeds | personal.accuracy | minus fedavg | p (Holm) | worst client | "
        "global accuracy | upload MB, all rounds | download MB, all rounds | rounds | time |"
    )
    assert table[4] == "| runs | seeds | global.accuracy | minus fedavg | p (Holm) |"
    assert "global.accuracy is of a model whose head was never trained" in told
    rows = list(csv.DictReader(StringIO(run("compare", place, "--csv")[1])))
    found = json.loads(run("compare", place, "--json")[1])
    groups = [*found["groups"], *found["others"][0]["groups"]]
    for row, group in zip(rows, groups, strict=True):
        assert float(row["score"]) == group["score"]["mean"] and row["label"] == group["label"]
        assert int(float(row["upload_bytes"])) == group["upload_bytes"] and len(group["runs"]) == 3
    code, told = run("compare", place, "--csv", "--json")
    assert code == 2 and "give one of them" in told
    code, told = run("compare", str(tmp_path))
    assert code == 2 and "not the folder of a run" in told


def test_the_page_needs_nothing_beside_it(swept: Sweep, tmp_path: Path) -> None:
    code, _ = run("compare", str(swept.folder), "--html", str(tmp_path / "c.html"))
    page = (tmp_path / "c.html").read_text()
    assert code == 0 and page.count("<svg") >= 4 and "fedper" in page
    assert "src=" not in page and "<script" not in page and "href=" not in page


def test_a_run_that_diverged_is_said_and_makes_no_mean(swept: Sweep) -> None:
    results = [read_run_result(folder) for folder in swept.folders]
    lost = Metrics([{**results[1].metrics[-1], "global.loss": float("nan")}])
    results[1] = replace(results[1], metrics=lost)
    found = compare_groups(group_results(results), "global.loss")
    assert "fedper: a run diverged, so that its score is not a number" in found.notes
    told = json.loads(json.dumps(found.json(), allow_nan=False))
    assert told["groups"][1]["score"]["mean"] is None and told["groups"][1]["p_holm"] is None
    assert "nan" in found.markdown() and "<svg" in found.html()


def test_groups_are_named_by_what_tells_them_apart(swept: Sweep) -> None:
    first = read_run_result(swept.folders[0])

    def changed(**said: object) -> RunResult:
        train = first.study.train.model_copy(update=said)
        return replace(first, study=first.study.model_copy(update={"train": train}))

    labels = [
        g.label
        for g in group_results([first, changed(lr=0.5), changed(lr=0.5, cache_activations=True)])
    ]
    rate = first.study.train.lr
    assert labels == [
        f"lr {rate}, cache_activations False",
        "lr 0.5, cache_activations False",
        "lr 0.5, cache_activations True",
    ]
    assert [g.label for g in group_results([first, changed(lr=0.5)])] == [f"lr {rate}", "lr 0.5"]
    assert [g.label for g in group_results([first])] == ["tiny"]
    again = replace(
        first, study=first.study.model_copy(update={"seed": 5, "threads": 2, "name": "x"})
    )
    assert len(group_results([first, again])) == 1
    plans = ["chain(share(),\n  keep(head))", "share()"]
    told = [
        replace(
            first,
            plan=parse(plan).text,
            study=first.study.model_copy(
                update={"method": first.study.method.model_copy(update={"name": "", "plan": plan})}
            ),
        )
        for plan in plans
    ]
    assert [g.label for g in group_results(told)] == ["chain(share(), keep(head))", "share()"]
    long = parse("chain(share(), when(after(3), freeze(query | key)), keep(head))").text
    told[0] = replace(told[0], plan=long, folder=Path("runs/mine"))
    assert [g.label for g in group_results(told)] == ["mine", told[1].folder.name]
