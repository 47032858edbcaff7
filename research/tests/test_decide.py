# SPDX-License-Identifier: Apache-2.0
"""Questions that are committed before their runs, and the verdicts on them."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from often import often
from sweeps import small_study
from transformers import AutoModelForImageClassification

from fedplan.studies.experiment import make_method
from fedplan.studies.run import read_run
from fedplan.sweeps.statistics import mean_interval
from research.decide.page import told
from research.decide.places import digest_of_path, placed, places_of
from research.decide.playing import Bench, play_all, todo, told_of
from research.decide.proof import commit_of, time_of
from research.decide.question import (
    Arm,
    Asked,
    Pilot,
    Question,
    QuestionError,
    QuestionFile,
    Score,
    question_of,
    read_question,
)
from research.decide.results import Played, decided, fault_of, key_of, read_results, write_results
from research.decide.verdicts import MET, MISSED, OPEN, UNDECIDED, judged, markdown, power

ROOT = Path(__file__).parents[2]
SEEDS = tuple(range(8))
QUESTION = """
asks = "Does freezing help?"
study = "study.toml"
seeds = [0, 1, 2, 3, 4]
[score]
name = "global.accuracy"
[pilot]
source = "none"
effect = 0.1
spread = 0.05
[arms.warm]
[arms.on]
start = "warm"
[arms.frozen]
start = "warm"
set = { method = { plan = "chain(share(), freeze(query | key))" } }
[[comparisons]]
arm = "frozen"
minus = "on"
least = 0.05
first = true
claim = "it helps"
[[comparisons]]
arm = "warm"
minus = "on"
least = -0.5
claim = "one round is no worse by a half"
"""


def asking(*asked: Asked, seeds: tuple[int, ...] = SEEDS) -> Question:
    arms = {name: Arm() for each in asked for name in (each.arm, each.minus)}
    return Question("?", "s", seeds, Score("a"), arms, asked, Pilot("p", 0.0075, 0.004))


def one(least: float = 0.005, better: str = "higher") -> Asked:
    return Asked("new", "old", least, "it helps", better)


def word(gains: list[float], asked: Asked) -> str:
    base = {seed: 0.5 for seed in SEEDS}
    sign = 1 if asked.better == "higher" else -1
    scores = {"old": base, "new": {s: 0.5 + sign * g for s, g in zip(SEEDS, gains, strict=True)}}
    return judged(asking(asked), scores)[0].word


@pytest.mark.parametrize("better", ["higher", "lower"])
@pytest.mark.parametrize(
    ("middle", "least", "said"),
    [
        (0.010, 0.005, MET),
        (0.001, 0.005, MISSED),  # a gain that is there, and too small to matter
        (-0.010, 0.005, MISSED),
        (0.0045, 0.005, UNDECIDED),  # a gain that may be as large as matters
        (-0.001, -0.005, MET),  # no worse than by so much
        (-0.010, -0.005, MISSED),
        (0.010, 0.0, MET),
        (-0.010, 0.0, MISSED),
        (0.0, 0.0, UNDECIDED),
    ],
)
def test_a_criterion_is_met_missed_or_undecided(
    middle: float, least: float, said: str, better: str
) -> None:
    spread = [0.001, -0.001, 0.0015, -0.0015, 0.0005, -0.0005, 0.002, -0.002]
    assert word([middle + each for each in spread], one(least, better)) == said


@settings(max_examples=often(60))
@given(
    gains=st.lists(st.floats(-0.1, 0.1), min_size=8, max_size=8),
    least=st.floats(-0.05, 0.05),
)
def test_a_verdict_never_contradicts_its_interval(gains: list[float], least: float) -> None:
    said, found = word(gains, one(least)), mean_interval(gains)
    assert found.low is not None and found.high is not None
    assert said != MET or (found.low > min(0.0, least) - 1e-9 and found.mean >= least - 1e-9)
    assert said != MISSED or found.high < least + 1e-9


def test_what_was_asked_and_not_run_counts_in_the_correction() -> None:
    gains = [0.004, 0.010, 0.002, 0.012, 0.006, 0.009, 0.003, 0.011]
    scores = {"old": {s: 0.5 for s in SEEDS}, "new": {s: 0.5 + g for s, g in enumerate(gains)}}
    alone = judged(asking(one()), scores)[0]
    asked = asking(one(), *(Asked(f"other-{n}", "old", 0.005, "too") for n in range(3)))
    among = judged(asked, scores)
    assert alone.p is not None and among[0].p == pytest.approx(4 * alone.p)
    assert [each.word for each in among[1:]] == [OPEN] * 3
    assert "not all run" in markdown(asked, among)


def test_without_all_seeds_there_is_no_verdict() -> None:
    scores = {"old": {s: 0.5 for s in SEEDS}, "new": {s: 0.6 + s / 1000 for s in SEEDS[:-1]}}
    found = judged(asking(one()), scores)[0]
    assert (found.word, found.seeds, found.p) == (OPEN, 7, None)


def test_power_is_that_of_the_t_test_and_grows_with_the_seeds() -> None:
    from scipy.stats import nct, t

    few, many = (
        replace(asking(one(0.0), seeds=tuple(range(n))), pilot=Pilot("p", 0.004, 0.004))
        for n in (5, 12)
    )
    for each in (few, many):
        seeds = len(each.seeds)
        known = nct.sf(t.ppf(0.975, seeds - 1), seeds - 1, seeds**0.5)
        assert power(each, one(0.0)) == pytest.approx(known, abs=0.03)
    assert power(many, one(0.0)) > power(few, one(0.0))
    nothing = replace(few, pilot=Pilot("p", 0.0, 0.004))
    assert power(nothing, one(0.0)) < 0.04


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"seeds": [0, 1, 2]}, "5 or more"),
        ({"seeds": [0, 0, 1, 2, 3]}, "each once"),
        ({"arms": {"warm": {"start": "on"}, "on": {"start": "warm"}}}, "begins with itself"),
        ({"arms": {"on": {}}}, "there is no arm"),
        ({"critirion": 1}, "critirion"),
    ],
)
def test_a_question_that_does_not_fit_is_named(change: dict[str, object], words: str) -> None:
    asked = {"arm": "on", "minus": "warm", "least": 0.1, "claim": "c"}
    said = {
        "asks": "?", "study": "s", "seeds": [0, 1, 2, 3, 4], "score": {"name": "a"},
        "arms": {"on": {"start": "warm"}, "warm": {}}, "comparisons": [asked],
        "pilot": {"source": "p", "effect": 1, "spread": 1},
    }  # fmt: skip
    assert question_of(said).needed() == ["warm", "on"]
    with pytest.raises(QuestionError, match=words):
        question_of(said | change)


def test_what_a_question_tells_is_the_mean_of_what_fits() -> None:
    row = {
        "clients.a-0.f1": 0.5,
        "clients.a-1.f1": 0.75,
        "clients.b.f1": 0.1,
        "clients.a-0.loss": 9.0,
    }
    assert told_of(row, {"a": "clients.a-*.f1"}) == {"a": 0.625}
    with pytest.raises(QuestionError, match=r"tells\.c: no number of the last round fits"):
        told_of(row, {"c": "clients.c*.f1"})


def git(folder: Path, *words: str) -> None:
    names = {
        f"GIT_{who}_{what}": "t" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")
    }
    subprocess.run(
        ["git", "-c", "commit.gpgsign=false", *words], cwd=folder, env=os.environ | names,
        check=True, capture_output=True,
    )  # fmt: skip


def written(folder: Path) -> QuestionFile:
    small_study(folder)
    study = folder / "study.toml"
    study.write_text(study.read_text().replace("rounds = 2", "rounds = 1"))
    (folder / "asked.toml").write_text(QUESTION)
    git(folder, "init", "-q")
    git(folder, "add", "asked.toml", "study.toml")
    return read_question(folder / "asked.toml")


def committed(folder: Path, why: str = "asked") -> QuestionFile:
    git(folder, "commit", "-qam", why)
    return read_question(folder / "asked.toml")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Played]]:
    """A question of which all runs of a seed were played, and a start, in two goes."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("asked")
    written(folder)
    asked = committed(folder)
    kept = list[str]()

    def go(most: int) -> None:
        runs, numbers = read_results("asked", folder / "out"), count(1)

        def keep(found: Played) -> None:
            kept.append(found.name)
            write_results(asked, runs, folder / "out")

        bench = Bench(folder / "runs", {})
        play_all(asked, bench, runs, keep=keep, wait=lambda: next(numbers) <= most)

    go(2)
    go(2)
    assert kept == ["warm-0", "on-0", "frozen-0", "warm-1"]
    return folder, read_results("asked", folder / "out")


def test_a_question_goes_on_where_it_was_left(place: tuple[Path, dict[str, Played]]) -> None:
    folder, runs = place
    asked = read_question(folder / "asked.toml")
    left = todo(asked, runs)
    assert left[:3] == [("on", 1), ("frozen", 1), ("warm", 2)] and len(left) == 11
    said = json.loads((folder / "out" / "asked.json").read_text())
    assert said["question"] == asked.digest and said["told"] == []
    assert [each["verdict"] for each in said["verdicts"]] == [OPEN, OPEN]
    assert [each["seeds"] for each in said["verdicts"]] == [1, 1]


def test_arms_begin_with_the_bits_of_their_start(place: tuple[Path, dict[str, Played]]) -> None:
    folder, _ = place
    asked, bench = read_question(folder / "asked.toml"), Bench(folder / "runs", {})
    world = read_run(bench.home(asked) / "warm-0").global_state.values
    start = bench.exported(asked, "warm", 0)
    held = dict(AutoModelForImageClassification.from_pretrained(start).named_parameters())
    assert all(torch.equal(held[name], each) for name, each in world.items())
    frozen = read_run(bench.home(asked) / "frozen-0")
    moved = {p.name: not torch.equal(frozen.global_state.values.get(p.name, world[p.name]), world[p.name])
             for p in frozen.params}  # fmt: skip
    still = {p.name for p in frozen.params if p.kind in ("query", "key")}
    assert still and {name for name, each in moved.items() if not each} == still


def test_a_question_must_be_committed_before_it_is_run(tmp_path: Path) -> None:
    asked = written(tmp_path)
    with pytest.raises(QuestionError, match="not committed"):
        commit_of(asked)
    asked = committed(tmp_path)
    assert commit_of(asked)
    study = tmp_path / "study.toml"
    study.write_text(study.read_text() + "\n# one more line\n")
    changed = read_question(tmp_path / "asked.toml")
    assert changed.digest != asked.digest
    with pytest.raises(QuestionError, match="not committed"):
        play_all(changed, Bench(tmp_path / "runs", {}), {}, keep=print, wait=lambda: True)
    assert not (tmp_path / "runs").exists()


def test_a_question_that_changes_after_its_runs_is_told(
    place: tuple[Path, dict[str, Played]], tmp_path: Path
) -> None:
    folder, runs = place
    asked = read_question(folder / "asked.toml")
    assert decided(asked, runs)[1] == []
    run = runs[key_of(asked.digest, "on", 0)]
    early = replace(run, began=run.began - 10**6)
    assert "began before" in fault_of(asked, early)
    assert "does not show" in fault_of(asked, replace(run, commit="0" * 40))
    try:
        file = folder / "asked.toml"
        file.write_text(QUESTION.replace("least = 0.05", "least = 0.01"))
        changed = committed(folder, "an easier criterion")
        verdicts, notes = decided(changed, runs)
        assert [each.seeds for each in verdicts] == [0, 0]
        assert len(notes) == 1 and "was changed after runs" in notes[0]
        assert len(todo(changed, runs)) == 15  # all are to be played again
        # Who writes the new digest into old results is told by the log.
        forged = replace(run, question=changed.digest)
        assert "does not show" in fault_of(changed, forged)
        assert "Note: the question was changed" in write_results(changed, runs, tmp_path)
        # What lies in the folder counts for no other form, and old runs stay beside new ones.
        here, before = Bench(folder / "runs", {}), dict(runs)
        assert not here.home(changed).exists()
        numbers = count(1)
        play_all(changed, here, before, keep=lambda _: None, wait=lambda: next(numbers) <= 1)
        assert len(before) == len(runs) + 1 and runs.items() <= before.items()
        assert "was changed after runs" in decided(changed, before)[1][0]
        assert before[key_of(changed.digest, "warm", 0)].began > run.began
    finally:
        (folder / "asked.toml").write_text(QUESTION)
        committed(folder, "as it was")


def test_a_date_before_its_parents_is_theirs(tmp_path: Path) -> None:
    asked = written(tmp_path)
    asked = committed(tmp_path)
    first = time_of(tmp_path, commit_of(asked))
    (tmp_path / "asked.toml").write_text(QUESTION + "\n# bent\n")
    os.environ["GIT_COMMITTER_DATE"] = "2001-01-01T00:00:00"
    try:
        bent = committed(tmp_path, "as if of old")
    finally:
        del os.environ["GIT_COMMITTER_DATE"]
    assert time_of(tmp_path, commit_of(bent)) >= first


def test_a_place_is_the_first_word_of_a_path_and_nothing_else() -> None:
    said = {"path": "DATA/a/SEED.npz", "plan": "freeze(DATA)", "own": ["DATA", "x/DATA", 3]}
    found = {"path": "/d/a/7.npz", "plan": "freeze(DATA)", "own": ["/d", "x/DATA", 3]}
    assert placed(said, {"DATA": "/d"}, 7) == found
    assert places_of(["DATA=/d", "MORE=a=b"]) == {"DATA": "/d", "MORE": "a=b"}
    for wrong in ("DATA", "DATA=", "freeze(query | key)=share()", '"rate": 0.1=2', "data=/d"):
        with pytest.raises(QuestionError, match="say a word and a folder"):
            places_of([wrong])


def test_what_was_behind_a_place_is_kept_and_told(tmp_path: Path) -> None:
    written(tmp_path)
    data = tmp_path / "data"
    data.mkdir()
    (data / "rows.npz").write_bytes(b"one")
    said = replace(committed(tmp_path), said={"data": {"path": "DATA/rows.npz"}})
    bench = Bench(tmp_path / "runs", {"DATA": str(data)})
    one = bench.sources(said, "warm", 0)
    assert one.keys() == {"DATA/rows.npz"}
    folder = digest_of_path(data)
    (data / "rows.npz").write_bytes(b"two")
    other = bench.sources(said, "warm", 0)
    assert one != other and digest_of_path(data) != folder
    asked = read_question(tmp_path / "asked.toml")
    commit = commit_of(asked)
    runs = [
        Played("on", seed, asked.digest, commit, 2**40, 1.0, 1, 1, [(1, 0.5)], {"commit": code},
               sources=sources)
        for seed, code, sources in ((0, "a", one), (1, "b", other))
    ]  # fmt: skip
    told = decided(asked, {each.key: each for each in runs})[1]
    assert len(told) == 2 and "2 commits of the code" in told[0]
    assert "2 different things behind DATA/rows.npz" in told[1]


def test_arms_that_are_the_same_leave_no_doubt() -> None:
    same = [0.0] * len(SEEDS)
    assert word(same, one(-0.005)) == MET
    assert word(same, one(0.005)) == MISSED
    assert word(same, one(0.0)) == UNDECIDED


QUESTIONS = sorted((ROOT / "research" / "questions").glob("*.toml"))


@pytest.mark.parametrize("file", QUESTIONS, ids=lambda file: file.stem)
def test_every_question_of_the_lab_can_be_asked(file: Path) -> None:
    asked = read_question(file)
    for arm in asked.question.needed():
        study = Bench(Path("runs"), {}).study(asked, arm, asked.question.seeds[0])
        alone = asked.question.arms[arm].start == ""
        assert alone or study.model.path
        make_method(study)
    assert any(each.first for each in asked.question.comparisons)
    named = {name for c in asked.question.comparisons for name in (c.arm, c.minus)}
    for arm in named:
        study = Bench(Path("runs"), {}).study(asked, arm, asked.question.seeds[0])
        assert -(-study.train.rounds // study.evaluate.every) >= asked.question.score.last


def test_the_page_of_verdicts_is_made_of_its_result_files() -> None:
    page = (ROOT / "research" / "pages" / "decided.md").read_text()
    assert page.endswith(told()), "make it anew: python -m research.decide.page --write"


def test_verdicts_follow_from_the_runs_that_are_kept(tmp_path: Path) -> None:
    """Of every committed result: the file is what its runs and the log give, byte by byte."""
    for file in sorted((ROOT / "research" / "results" / "decisions").glob("*.json")):
        asked = read_question(ROOT / "research" / "questions" / f"{file.stem}.toml")
        runs = read_results(file.stem)
        assert any(each.question == asked.digest for each in runs.values()), file.stem
        write_results(asked, runs, tmp_path)
        assert (tmp_path / file.name).read_bytes() == file.read_bytes(), file.stem
