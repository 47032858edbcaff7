# SPDX-License-Identifier: Apache-2.0
"""A sweep has the bits of its runs, runs none twice, and loses none to another's failure."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import run
from sweeps import ASKED_OF, METHODS, Mortal, bits, small_study

from fedplan.errors import FedplanError
from fedplan.run import run_study
from fedplan.runners.simulation import Simulation
from fedplan.storage.locks import locked_folder
from fedplan.studies.run import read_run
from fedplan.studies.schema import ConfigError, read_study
from fedplan.sweeps import sweeping
from fedplan.sweeps.comparisons import compare
from fedplan.sweeps.records import (
    FAILURES_FILE,
    FINISHED_FILE,
    TrialResult,
    read_trial_results,
)
from fedplan.sweeps.sweeping import Sweep, SweepEvent, SweepProgress, sweep


@pytest.fixture
def mine(swept: Sweep, tmp_path: Path) -> Path:
    """A copy of the sweep, to change."""
    shutil.copytree(swept.folder.parent, tmp_path / "copy")
    return tmp_path / "copy" / "sweep"


def test_a_run_of_a_sweep_has_the_bits_of_the_study_run_alone(swept: Sweep, tmp_path: Path) -> None:
    file = swept.folder.parent / "study.toml"
    alone = run_study(read_study(file, ["method.name=fedper", "seed=1"]), tmp_path / "alone")
    assert bits(swept.folder / "method.name=fedper,seed=1") == bits(alone.folder)
    assert len(swept.folders) == 6 and not swept.failures and not swept.unfinished


def test_what_ended_is_not_run_again(swept: Sweep) -> None:
    before = {file: file.stat().st_mtime_ns for file in swept.folder.rglob("*")}
    told = list[SweepEvent]()
    study = swept.folder.parent / "study.toml"
    again = sweep(study, METHODS, folder=swept.folder, seeds=3, on_trial_end=told.append)
    assert not told and again.folders == swept.folders
    assert {f: f.stat().st_mtime_ns for f in swept.folder.rglob("*") if f.name != "sweep"} == before


def test_what_was_stopped_goes_on_with_the_same_bits(swept: Sweep, mine: Path) -> None:
    """One run lost its last round, and another one all of it."""
    ended = json.loads((mine / FINISHED_FILE).read_text())
    for seed in (0, 1):
        name = f"method.name=fedavg,seed={seed}"
        study = read_run(mine / name).study
        shutil.rmtree(mine / name)
        del ended[name]
        if seed:
            next(iter(Simulation(study, mine / name).rounds()))
            assert read_run(mine / name).round == 1
    (mine / FINISHED_FILE).write_text(json.dumps(ended))
    told = list[SweepEvent]()
    sweep(
        swept.folder.parent / "study.toml", METHODS, folder=mine, seeds=3, on_trial_end=told.append
    )
    assert [news.name for news in told] == [
        "method.name=fedavg,seed=0",
        "method.name=fedavg,seed=1",
    ]
    assert (told[0].ended, told[0].total, told[1].seconds_left) == (5, 6, 0.0) and told[
        0
    ].seconds_left > 0
    for name in swept.names:
        assert bits(mine / name) == bits(swept.folder / name)


def test_more_seeds_and_values_may_be_added_and_none_taken_away(swept: Sweep, mine: Path) -> None:
    study, told = swept.folder.parent / "study.toml", list[SweepEvent]()
    sweep(study, METHODS, folder=mine, seeds=4, on_trial_end=told.append)
    assert len(told) == 2
    lost = r"seed=3.* is not in the present one.*with more if you like.*name another folder"
    with pytest.raises(ConfigError, match=lost):
        sweep(study, METHODS, folder=mine, seeds=3)
    with pytest.raises(ConfigError, match="is not in the present one"):
        sweep(study, {"method.name": ["fedavg"]}, folder=mine, seeds=4)
    changed = mine.parent / "study.toml"
    changed.write_text(study.read_text().replace("batch = 8", "batch = 4"))
    with pytest.raises(ConfigError, match=r"a sweep of another study.*undo the change"):
        sweep(changed, METHODS, folder=mine, seeds=4)


def test_a_second_sweep_that_is_refused_changes_nothing(swept: Sweep, mine: Path) -> None:
    before = {file: file.read_bytes() for file in mine.rglob("*") if file.is_file()}
    study = mine.parent / "study.toml"
    with locked_folder(mine), pytest.raises(FedplanError):
        sweep(study, METHODS, folder=mine, seeds=4)
    assert {file: file.read_bytes() for file in mine.rglob("*") if file in before} == before


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    study = small_study(tmp_path)
    with pytest.raises(ConfigError, match="is not a sweep: name another folder"):
        sweep(study, METHODS, folder=tmp_path)
    with pytest.raises(ConfigError, match=r"train\.rounds"):
        sweep(study, {"train.rounds": [2, 0]}, folder=tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_failure_stands_apart_and_the_others_go_on(tmp_path: Path) -> None:
    study = str(small_study(tmp_path))
    asked = (
        "sweep",
        study,
        "--set",
        "method.name=promptfl,fedavg",
        "--set",
        "train.rounds=1",
        "-o",
        str(tmp_path / "s"),
    )
    code, out = run(*asked)
    assert code == 1 and "1 of 2 runs failed" in out and "2/2  method.name=fedavg" in out
    (name, end), *others = read_trial_results(tmp_path / "s" / FAILURES_FILE).items()
    assert (name, others) == (
        "method.name=promptfl,train.rounds=1,seed=0",
        [],
    ) and "prompt" in end.error
    assert read_run(tmp_path / "s" / "method.name=fedavg,train.rounds=1,seed=0").round == 1
    code, out = run(*asked, "--json")
    lines = [json.loads(line) for line in out.splitlines()]
    assert code == 1 and [line["name"] for line in lines] == [name] and lines[0]["result"]["error"]
    assert FAILURES_FILE in {file.name for file in (tmp_path / "s").iterdir()}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("data.validation_fraction=0", "By global.accuracy, {} the best mean, chosen on the test: optimistic."),
        ("data.validation_fraction=0.3", "By validation.global.accuracy, {} the best mean, chosen on validation."),
    ],
)  # fmt: skip
def test_a_sweep_says_which_setting_is_best_and_on_which_examples(
    change: str, words: str, tmp_path: Path
) -> None:
    study = ("sweep", str(small_study(tmp_path)), "--set", change, "--set", "train.rounds=1")
    code, out = run(*study, "--set", "train.lr=0.001,0.1", "-o", str(tmp_path / "s"))
    found = compare([tmp_path / "s"])
    means = {row.group.label: row.score.mean for row in found.rows}
    best = [label for label, mean in means.items() if mean == max(means.values())]
    said = f"{' and '.join(best)} {'has' if len(best) == 1 else 'have'}"
    assert code == 0 and words.format(said) in out, out
    assert found.choice in words.format(said) and found.json()["choice"] == found.choice


def test_a_run_that_is_asked_to_stop_is_left_to_go_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "evaluate.trackers=sweeps-asks_to_stop,seed=0"
    monkeypatch.setenv(ASKED_OF, str(tmp_path / "s" / name))
    found = sweep(
        small_study(tmp_path),
        {"evaluate.trackers": [["sweeps:asks_to_stop"]]},
        folder=tmp_path / "s",
    )
    assert found.unfinished == [name] and not found.failures and not found.folders
    assert read_run(tmp_path / "s" / name).round == 1
    assert name not in read_trial_results(found.folder / FINISHED_FILE)


def test_the_time_left_is_that_of_what_is_open_and_waits(tmp_path: Path) -> None:
    course = SweepProgress(tmp_path, 2, remaining=4)
    assert course.seconds_left() == 0.0  # nobody knows yet
    course.start_trial("a")
    course.start_trial("b")
    news = course.finish_trial("a", TrialResult(10.0))
    assert (news.ended, news.total, news.seconds_left) == (
        1,
        4,
        15.0,
    )  # two wait, one is open, two at once
    course.start_trial("c")
    assert (
        course.finish_trial("c", TrialResult(1.0, error="no")).seconds_left == 10.0
    )  # what failed says nothing of time


def test_each_process_plays_run_after_run_and_one_that_dies_fails_its_run_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweeping, "TrialHandler", Mortal)
    told = list[SweepEvent]()
    found = sweep(
        small_study(tmp_path),
        METHODS,
        folder=tmp_path / "s",
        seeds=3,
        parallel=2,
        on_trial_end=told.append,
    )
    assert sorted(found.failures) == ["method.name=fedavg,seed=1", "method.name=fedper,seed=1"]
    assert all("ended with exit code -9" in error for error in found.failures.values())
    assert [f.name for f in found.folders] == [
        found.results[f.name].stop_reason for f in found.folders
    ]
    assert len(found.folders) == 4 and sorted(news.ended for news in told) == [1, 2, 3, 4, 5, 6]


@pytest.mark.nightly
def test_many_processes_give_the_same_bits(swept: Sweep, tmp_path: Path) -> None:
    study = swept.folder.parent / "study.toml"
    found = sweep(study, METHODS, folder=tmp_path / "two", seeds=1, parallel=2)
    assert not found.failures and len(found.folders) == 2
    for name in found.names:
        assert bits(found.folder / name) == bits(swept.folder / name)


@pytest.mark.nightly
def test_a_process_that_dies_takes_no_other_run_with_it(tmp_path: Path) -> None:
    """One run kills its own process: it failed, and the others ended."""
    (tmp_path / "deadly.py").write_text(
        "import os\ndef track(closed):\n    os.kill(os.getpid(), 9) if closed.row['round'] == 2 else None\n"
    )
    study = small_study(tmp_path)
    sys.path.insert(0, str(tmp_path))
    try:
        settings = {"evaluate.trackers": [["deadly:track"], []]}
        found = sweep(study, settings, folder=tmp_path / "s", seeds=2, parallel=2)
    finally:
        sys.path.remove(str(tmp_path))
    assert len(found.failures) == 2 and len(found.folders) == 2
    assert all("ended with exit code -9" in error for error in found.failures.values())


@pytest.mark.nightly
@pytest.mark.parametrize("parallel", [1, 2])
def test_ctrl_c_leaves_a_sweep_that_goes_on(tmp_path: Path, parallel: int) -> None:
    study, folder = small_study(tmp_path), tmp_path / "s"
    words = ["sweep", str(study), "--set", "train.rounds=30", "--seeds", "3", "-o", str(folder)]
    command = [sys.executable, "-m", "fedplan.cli", *words, "--parallel", str(parallel)]
    command[1:3] = ["-c", "from fedplan.cli import main; main()"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as going:
        while not list(folder.glob("*/global/*")):
            time.sleep(0.1)
        os.killpg(going.pid, signal.SIGINT)
        out, _ = going.communicate(timeout=60)
    assert going.returncode == 130 and "resumes the sweep" in out
    found = sweep(study, {"train.rounds": [30]}, folder=folder, seeds=3)
    assert len(found.folders) == 3 and not found.failures
