# SPDX-License-Identifier: Apache-2.0
"""The record of a run: its data, and the environment of each session."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import STUDY, run, some_digits

from fedplan.federation.ledger.status import read_status
from fedplan.studies import record

PRIVATE = """
[privacy]
unit = "client"
epsilon = 200.0
noise_multiplier = 0.8
clipping_norm = 0.5
"""
QUICK = STUDY.replace("rounds = 3", "rounds = 1").replace("dropout_fraction = 0.1", "")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    some_digits(tmp_path)
    Path("study.toml").write_text(QUICK)
    return tmp_path


def content(name: str) -> dict[str, Any]:
    return json.loads(Path("run", name).read_text())


def test_data_record() -> None:
    assert run("run", "study.toml", "--output", "run")[0] == 0
    data, rows = content("data.json"), np.load("digits.npz")
    test = {str(n): int((rows["digit_test"] == n).sum()) for n in range(3)}
    assert data["common_test"]["labels"] == test
    assert (data["columns"], data["label"], data["labels"]) == (["image"], "digit", ["0", "1", "2"])
    counts = [0, 0, 0]
    for split in ("train", "test"):
        for each in data[split].values():
            assert each["examples"] == sum(each["labels"].values())
            for label, count in each["labels"].items():
                counts[int(label)] += count
    overlap = 60 - sum(counts)  # examples that are in the common test, too
    assert overlap == 0 or str(overlap) in " ".join(data["notes"])
    digests = {name: each["digest"] for name, each in data["train"].items()}
    assert digests == content("run.json")["examples"]
    assert Path("run/data.json").stat().st_mode & 0o777 == 0o600


def test_private_data_record() -> None:
    Path("study.toml").write_text(QUICK + PRIVATE)
    assert run("run", "study.toml", "--output", "run")[0] == 0
    data = content("data.json")
    assert data["private"] and not data["train"] and not data["test"] and not data["notes"]
    assert "client-0" not in Path("run/data.json").read_text()


def test_sessions(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    more = ("run", "run", "--resume", "--set")
    assert run("run", "study.toml", "--output", "run")[0] == 0
    assert run(*more, "train.rounds=2", "--same-environment")[0] == 0
    assert not caplog.records
    monkeypatch.setattr(record, "version", lambda name: "0.0.1")
    code, out = run(*more, "train.rounds=3", "--same-environment")
    out = " ".join(out.split())
    assert code == 2 and "another environment" in out and "torch 0.0.1, before" in out
    assert run(*more, "train.rounds=3")[0] == 0
    assert "torch 0.0.1, before" in caplog.text and "--same-environment" in caplog.text
    # all rounds are done: nothing runs, so there is no session
    assert run("run", "run", "--resume")[0] == 0
    status = read_status(Path("run"))
    assert status is not None and status.round_seconds is not None
    sessions = record.read_sessions(Path("run"))
    assert [each["after_round"] for each in sessions] == [0, 1, 2]
    assert [each["versions"]["torch"] == "0.0.1" for each in sessions] == [False, False, True]
    assert {(each["device"], each["threads"], each["runner"]) for each in sessions} == {
        ("cpu", 1, "local")
    }
    assert run("report", "run", "-o", "report.html")[0] == 0
    page = Path("report.html").read_text()
    section = page[page.index("<h2>Record") : page.index("<h2>Audit")]
    data = content("data.json")
    for text in (
        *(
            "lr = 0.001",
            "batch_size = 8",
            "optimizer = adamw",
            "rounds = 3",
            "partition = dirichlet",
        ),
        *("seed = 0", "fraction = 1.0", "lr_scheduler = ", "epochs = 1", "alpha = 0.5"),
        *(data["common_test"]["digest"][:16], "client-02", "0.0.1", "upload MB"),
    ):
        assert text in section, text
    assert section.count(" UTC</td>") == 3
    for file in Path("run").glob("environment.*"):
        file.unlink()
    code, out = run("run", "run", "--resume", "--same-environment")
    assert code == 2 and "no environment.jsonl" in out
    code, out = run("run", "study.toml", "--output", "new", "--same-environment")
    assert code == 2 and "--resume" in out
