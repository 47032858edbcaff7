# SPDX-License-Identifier: Apache-2.0
"""What is lost or changed beside a run is told: nothing more is thrown away, nothing is made up."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import transformers as hf
from commands import STUDY, run
from safetensors.torch import load_file, save_file
from zoo import VISION

from fedplan.audits import run as audit
from fedplan.audits.run import verify_run
from fedplan.federation.server import Server
from fedplan.runners.simulation import Simulation
from fedplan.storage.journal import client_state_folder
from fedplan.studies.schema import read_study


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def text(out: str) -> str:
    return " ".join(out.split())


@pytest.mark.parametrize("words", [("study.toml", "--output", "a"), ("--resume", "a")])
def test_a_run_whose_world_is_lost_is_left_as_it_is_until_a_copy_is_back(
    here: Path, words: tuple[str, ...]
) -> None:
    assert run("run", "study.toml", "--output", "a")[0] == 0
    (here / "a/global").rename(here / "copy")
    left = files(here / "a")
    code, out = run("run", *words)
    assert code == 2 and (
        "lost its newest global model" in text(out) or "holds a run" in text(out)
    ), out
    assert files(here / "a") == left
    code, out = run("export", "a", "model", "--global")
    assert code == 2 and "no committed round" in text(out)
    shutil.rmtree(here / "a/global", ignore_errors=True)
    (here / "copy").rename(here / "a/global")
    assert run("verify", "a")[0] == 0
    assert run("run", "--resume", "a", "--set", "train.rounds=4")[0] == 0


def test_a_world_of_an_older_round_cuts_no_ledger(here: Path) -> None:
    assert run("run", "study.toml", "--output", "a", "--set", "train.rounds=1")[0] == 0
    shutil.copytree("a/global", "old")
    assert run("run", "--resume", "a", "--set", "train.rounds=3")[0] == 0
    shutil.rmtree("a/global")
    shutil.copytree("old", "a/global")
    ledger = Path("a/ledger.jsonl").read_bytes()
    code, out = run("run", "--resume", "a")
    assert code == 2 and "records round 3" in text(out) and "is of round 1" in text(out)
    assert Path("a/ledger.jsonl").read_bytes() == ledger


def test_a_start_that_is_refused_changes_no_run(here: Path) -> None:
    assert run("run", "study.toml", "--output", "a", "--set", "train.rounds=1")[0] == 0
    held = dict(np.load("digits.npz"))
    np.savez("other.npz", **(held | {"image_train": 255 - held["image_train"]}))
    left = files(here / "a")
    other = ["--set", f"data.path={here}/other.npz", "--set", "train.rounds=2"]
    code, out = run("run", "--resume", "a", *other)
    assert code == 2 and "on other examples" in text(out)
    assert files(here / "a") == left
    assert run("verify", "a")[0] == 0
    assert run("run", "--resume", "a", "--set", "train.rounds=2")[0] == 0


def test_a_run_goes_on_where_it_is_and_nowhere_else(here: Path) -> None:
    assert run("run", "study.toml", "--output", "a", "--set", "train.rounds=1")[0] == 0
    left = files(here / "a")
    more = ["--set", "train.rounds=2"]
    code, out = run("run", "--resume", "a", "--output", "b", *more)
    assert code == 2 and "--output is b" in text(out)
    assert files(here / "a") == left and not (here / "b").exists()
    assert run("run", "--resume", "a", "--output", "./a", *more)[0] == 0


def test_an_export_is_not_made_without_the_clients_home(here: Path) -> None:
    assert run("run", "study.toml", "--output", "a")[0] == 0
    shutil.rmtree(client_state_folder(Path("a"), "client-01"))
    code, out = run("export", "a", "own", "--client", "client-01")
    assert code == 1 and "reply of client-01" in text(out) and "ends with round 0" in text(out)
    assert run("export", "a", "other", "--client", "client-00")[0] == 0


def test_an_export_is_not_made_on_other_weights(here: Path) -> None:
    hf.ViTModel(hf.ViTConfig(**{**VISION, "image_size": 8})).save_pretrained("weights")
    kind = STUDY[STUDY.index("type =") : STUDY.index("[task]")]
    Path("study.toml").write_text(STUDY.replace(kind, 'path = "weights"\n'))
    assert run("run", "study.toml", "--output", "a", "--set", "train.rounds=1")[0] == 0
    file = "weights/model.safetensors"
    save_file({k: v + 1 for k, v in load_file(file).items()}, file, metadata={"format": "pt"})
    code, out = run("export", "a", "model", "--global")
    assert code == 2 and "restore the initial weights" in text(out)


def test_an_export_of_a_run_that_was_stopped_is_of_its_last_round(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Homes may be a turn ahead of the world: a model is of one round."""
    assert run("run", "study.toml", "--output", "a", "--set", "train.rounds=2")[0] == 0
    export = ("--client", "client-01")
    assert run("export", "a", "before", *export)[0] == 0

    def stopped(self: Server, round_state: object) -> None:
        del self, round_state
        raise KeyboardInterrupt

    home = files(client_state_folder(here / "a", "client-01"))
    monkeypatch.setattr(Server, "close_round", stopped)
    assert run("run", "--resume", "a", "--set", "train.rounds=3")[0] == 130
    assert files(client_state_folder(here / "a", "client-01")) != home
    assert run("export", "a", "after", *export)[0] == 0
    assert files(here / "before") == files(here / "after")


def test_a_run_that_goes_on_while_it_is_verified_has_no_faults(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulation = Simulation(read_study(here / "study.toml", ["train.rounds=5"]), here / "a")
    federation, lines = simulation.federation, audit.verify_ledger

    def more() -> None:
        federation.commit(federation.run_round())

    def meanwhile(*args: object) -> list[str]:
        if federation.global_state.round < 4:
            more()
            more()
        return lines(*args)  # type: ignore[arg-type]

    more()
    more()
    monkeypatch.setattr(audit, "verify_ledger", meanwhile)
    faults, said = verify_run(here / "a")
    assert not faults and said.startswith("4 rounds"), faults


PRIVATE = '\n[privacy]\nunit = "client"\nepsilon = 900.0\nnoise_multiplier = 1.0\n'


@pytest.fixture
def private(here: Path) -> Path:
    """A run of one round that hides its clients."""
    Path("study.toml").write_text(STUDY.replace("dropout_fraction = 0.1", "") + PRIVATE)
    assert run("run", "study.toml", "--output", "a", "--set", "train.rounds=1")[0] == 0
    return here / "a"


@pytest.mark.parametrize("left", [None, 0, 1])
def test_what_was_spent_is_not_told_by_fewer_charges(private: Path, left: int | None) -> None:
    file = private / "privacy/charges.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.unlink() if left is None else file.write_bytes(b"".join(lines[:left]))
    code, out = run("privacy", "a")
    assert code == 2 and "charges.jsonl " in text(out) and "is unknown" in text(out), out
    file.write_bytes(b"".join(lines))
    assert run("privacy", "a")[0] == 0


@pytest.mark.parametrize("content", [None, bytes(32)])
def test_noise_is_not_drawn_by_another_secret(private: Path, content: bytes | None) -> None:
    """A round that was released, and is played again, must be the same: its secret is the run's."""
    file = private / "privacy/secret"
    file.unlink() if content is None else file.write_bytes(content)
    left = files(private)
    code, out = run("run", "--resume", "a", "--set", "train.rounds=2")
    assert code == 2 and "secret is missing or changed" in text(out), out
    assert files(private) == left
