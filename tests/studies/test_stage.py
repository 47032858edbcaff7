# SPDX-License-Identifier: Apache-2.0
"""Studies as a user runs them: from a file to a verified run, stopped and resumed on the way."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from commands import STUDY, run

from fedplan.runners.local import Federation

TIMES = ("status.json", "log.jsonl", "environment.jsonl", "environment.jsonl.head")


def files(folder: Path) -> dict[str, bytes]:
    """All files of a run, but for those that tell of times and processes."""
    held = [p for p in folder.rglob("*") if p.is_file() and p.name not in TIMES]
    return {str(p.relative_to(folder)): p.read_bytes() for p in held}


def test_a_study_runs_and_is_verified(here: Path) -> None:
    code, out = run("run", "study.toml")
    assert code == 0, out
    for word in ("tiny", "3 clients with", "worst", "fedplan verify runs/tiny"):
        assert word in out
    written = (here / "runs/tiny/metrics.jsonl").read_text()
    metrics = [json.loads(line) for line in written.splitlines()]
    assert [m["round"] for m in metrics] == [1, 2, 3]
    assert set(metrics[-1]) == {"round", "global", "clients", "personal"}
    ledger = (here / "runs/tiny/ledger.jsonl").read_text().splitlines()
    rounds = [line for line in map(json.loads, ledger) if "changed" in line]
    for line in rounds:
        far = {(stack, number): far for stack, number, far in line["attention"]}
        assert far.keys() == {("vision", 0), ("vision", 1)}
        assert all(0 < each < 1 for each in far.values())
        assert line["drift"]["value"][0] > 0 and "head" not in line["drift"]
    assert "query" in rounds[0]["drift"] and "query" not in rounds[1]["drift"]
    code, out = run("verify", "runs/tiny")
    assert code == 0 and "none changed" in out


def test_a_study_is_explained_with_its_phases(here: Path) -> None:
    plan = 'plan = "chain(share(), when(after(1), freeze(query | key)), keep(head))"'
    for method, held in (
        ('name = "fedavg"', ["SHARE"]),
        ('name = "fedfrozen"\nsettings = { warmup = 1 }', ["SHARE", "FREEZE"]),
    ):
        (here / "study.toml").write_text(STUDY.replace(plan, method))
        code, out = run("explain", "study.toml")
        query = next(line for line in out.splitlines() if line.startswith("query"))
        assert code == 0 and [word for word in query.split() if word.isupper()] == held


def test_a_stopped_study_resumes_to_the_same_files(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("run", "study.toml", "--output", "whole")[0] == 0
    # Its id and its clients' keys are drawn once, and are all that differs between two runs.
    for drawn in (here / "whole/run.json", *(here / "whole/clients").rglob("key")):
        there = here / "parts" / drawn.relative_to(here / "whole")
        there.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(drawn, there)
    calm = Federation.run_round

    def interrupted(self: Federation) -> object:
        if self.global_state.round == 1:
            raise KeyboardInterrupt
        return calm(self)

    monkeypatch.setattr(Federation, "run_round", interrupted)
    code, out = run("run", "study.toml", "--output", "parts")
    assert code == 130 and "fedplan run --resume parts" in out
    monkeypatch.undo()
    monkeypatch.chdir(here)
    assert run("run", "--resume", "parts")[0] == 0
    assert files(here / "whole") == files(here / "parts")


def test_a_damaged_run_is_not_verified(here: Path) -> None:
    assert run("run", "study.toml")[0] == 0
    ledger = here / "runs/tiny/ledger.jsonl"
    ledger.write_text(ledger.read_text().replace('"roles": "S', '"roles": "K', 1))
    code, out = run("verify", "runs/tiny")
    assert code == 1 and "ledger.jsonl" in out and "round 1" in out


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "fedrep", "fedit"])
def test_methods_run_by_name(here: Path, name: str) -> None:
    changes = ["--set", "method.plan=", "--set", f"method.name={name}", "--set", "train.rounds=1"]
    code, out = run("run", "study.toml", *changes)
    assert code == 0, out
    assert run("verify", "runs/tiny")[0] == 0


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["nothing.toml"], ["nothing.toml cannot be read"]),
        (["study.toml", "--set", "train.rounds=0"], ["train.rounds", "greater than or equal to 1"]),
        (["study.toml", "--set", "data.label=x"], ["data.label", "no field 'label'"]),
        (["study.toml", "--set", "task.label=x"], ["'x'", "digit"]),
        (["study.toml", "--set", "model.type=vitt"], ["model.type", "vitt"]),
        (["study.toml", "--set", "method.plan=shre()"], ["did you mean share"]),
        (["study.toml", "--set", "data.path=gone.npz"], ["gone.npz"]),
        (["study.toml", "--set", "data.alpha=0.0"], ["alpha"]),
        (["study.toml", "--set", "method.compression=zip()"], ["zip"]),
    ],
)
def test_a_wrong_study_is_one_message_that_names_it(
    here: Path, args: list[str], words: list[str]
) -> None:
    code, out = run("run", *args)
    assert code == 2, out
    for word in words:
        assert word in out.replace("\n", " ")


def test_a_run_is_not_run_over(here: Path) -> None:
    assert run("run", "study.toml", "--set", "train.rounds=1")[0] == 0
    assert "--resume" in run("run", "study.toml", "--set", "train.rounds=1")[1]
    code, out = run("run", "study.toml", "--resume", "--set", "train.lr=0.5")
    assert code == 2 and "another study" in out and "train.lr" in out


def test_methods_are_listed() -> None:
    code, out = run("methods")
    assert code == 0
    for word in ("fedavg", "SCAFFOLD", "chain(share(), keep(head))", "fedsa-lora"):
        assert word in out
