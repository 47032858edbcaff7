# SPDX-License-Identifier: Apache-2.0
"""A run that promises privacy: what it charges, what it hides, and where it stops."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from commands import STUDY, run

from fedplan.config import read_study
from fedplan.ledger import read_lines
from fedplan.plan import Role
from fedplan.privacy.budget import Budget
from fedplan.privacy.guard import CHARGES
from fedplan.resolution import permitted
from fedplan.studies import promise_of, stage_of
from fedplan.turn import Turn

CLIENT = '[privacy]\nunit = "client"\nepsilon = 50.0\n'
EXAMPLE = '[privacy]\nunit = "example"\nepsilon = 8.0\nsize = 20\n'


def study_of(privacy: str, *, plan: str = "", rounds: int = 3) -> str:
    study = STUDY.replace("dropped = 0.1", "share = 0.7" if "client" in privacy else "")
    study = study.replace("rounds = 3", f"rounds = {rounds}\nsteps = 2").replace(
        "attention = 4", ""
    )
    if plan:
        study = re.sub('plan = ".*"', plan, study)
    return study + privacy


def played(here: Path, study: str, name: str) -> Path:
    Path(f"{name}.toml").write_text(study)
    code, told = run("run", f"{name}.toml", "--output", name)
    assert code == 0, told
    return here / name


def spent(folder: Path, unit: str) -> float:
    study = read_study(folder.with_suffix(".toml"))
    files = sorted(folder.rglob(CHARGES))
    assert study.privacy and files
    return max(
        Budget(file, delta=study.privacy.delta, unit=unit).spent()  # type: ignore[arg-type]
        for file in files
    )


@pytest.mark.parametrize(("privacy", "unit"), [(CLIENT, "client"), (EXAMPLE, "example")])
def test_the_forecast_is_the_sum_of_the_charges(here: Path, privacy: str, unit: str) -> None:
    out = played(here, study_of(privacy), unit)
    promise = promise_of(read_study(here / f"{unit}.toml"))
    assert promise is not None
    assert abs(promise.forecast(3) - spent(out, unit)) < 1e-9
    assert spent(out, unit) <= promise.epsilon
    assert run("verify", str(out))[0] == 0
    said = json.loads((out / "privacy.json").read_text())
    assert abs(said["forecast"] - said["epsilon"]) < 1e-9 and len(said) == 15
    code, told = run("privacy", f"{unit}.toml")
    assert code == 0 and f"This run hides each {unit}" in told and "Not covered" in told


@pytest.mark.parametrize("privacy", [CLIENT, EXAMPLE])
def test_neither_rows_nor_losses_nor_drift_are_told(here: Path, privacy: str) -> None:
    out = played(here, study_of(privacy), "run")
    for line in read_lines(out / "ledger.jsonl"):
        if "moved" in line:
            assert line["drift"] == {} if "client" in privacy else True
        else:
            assert line["weight"] == 1 and line["loss"] is None


def test_every_shared_value_moves_whoever_was_drawn(here: Path) -> None:
    out = played(here, study_of(CLIENT), "run")
    study = read_study(here / "run.toml")
    setup = stage_of(study).setup
    for line in read_lines(out / "ledger.jsonl"):
        if "moved" in line:
            roles = permitted(setup.method.plan, setup.params, Turn(line["round"]))
            assert set(line["moved"]) == {p.key for p in setup.params if roles[p] is Role.SHARE}


def test_a_run_stops_before_its_budget_would_be_passed(here: Path) -> None:
    study = study_of(CLIENT.replace("50.0", "6.0") + "noise = 2.0\n", rounds=40)
    Path("run.toml").write_text(study)
    code, told = run("run", "run.toml", "--output", "run")
    assert code == 2 and "was promised: the run ends here" in " ".join(told.split())
    assert spent(here / "run", "client") <= 6.0
    rounds = [line for line in read_lines(here / "run/ledger.jsonl") if "moved" in line]
    assert 1 <= len(rounds) < 40 and run("verify", "run")[0] == 0


@pytest.mark.parametrize("privacy", [CLIENT, EXAMPLE])
def test_a_run_that_is_played_twice_is_hidden_by_another_noise(here: Path, privacy: str) -> None:
    runs = [played(here, study_of(privacy), name) for name in "ab"]
    marks = [
        {
            mark
            for line in read_lines(out / "ledger.jsonl")
            for mark in line.get("moved", {}).values()
        }
        for out in runs
    ]
    assert marks[0] and not marks[0] & marks[1]


@pytest.mark.parametrize(
    ("plan", "privacy", "words"),
    [
        ('name = "safl"\nsettings = { k = 1 }', CLIENT, "a release that nobody pays for"),
        ('name = "scaffold"', CLIENT, "is not clipped"),
        ('name = "fedprox"', EXAMPLE, "only plain steps are known to be hidden"),
    ],
)
def test_what_does_not_hold_together_is_refused(
    here: Path, plan: str, privacy: str, words: str
) -> None:
    Path("run.toml").write_text(study_of(privacy, plan=plan))
    code, told = run("run", "run.toml", "--output", "run")
    assert code == 2 and words in " ".join(told.split()), told


def test_the_ledger_and_the_world_hold_no_count_of_rows(here: Path) -> None:
    out = played(here, study_of(CLIENT), "run")
    counts = {len(rows) for rows in stage_of(read_study(here / "run.toml")).shares.train.values()}
    for line in read_lines(out / "ledger.jsonl"):
        assert not counts & {v for v in line.values() if type(v) is int} - {line["round"]}
    assert json.dumps(sorted(counts))
