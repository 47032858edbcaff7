# SPDX-License-Identifier: Apache-2.0
"""A damaged file of a run is refused before training, or repaired: never passed over in silence."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import run
from damage import KINDS, Workshop
from damage_sites import SETTINGS, STUDIES, FederationWorkshop, SiteWorkshop

from fedplan.audits.repair import repair_run
from fedplan.audits.run import audit_run
from fedplan.errors import FedplanError
from fedplan.storage.append_log import head_file

NOTICED = ("same", "repaired", "refused", "harmless")
"""Outcomes that are allowed."""


BUILD: dict[str, Callable[[str, Path], Any]] = {
    **dict.fromkeys(KINDS, Workshop.build),
    **dict.fromkeys(SETTINGS, FederationWorkshop.build),
    **dict.fromkeys(STUDIES, SiteWorkshop.build),
}
"""The maker of a folder of each kind."""


@pytest.mark.parametrize("kind", [pytest.param(k, marks=pytest.mark.nightly) for k in BUILD])
def test_each_file_deleted_or_flipped_ends_with_the_same_bytes_or_is_refused(
    kind: str, tmp_path: Path
) -> None:
    workshop, rng, outcomes = BUILD[kind](kind, tmp_path / "place"), random.Random(kind), set[str]()
    files = workshop.files()
    for name in files:
        both = ["deleted with its head"] if head_file(name) in files else []
        for how in ("deleted", "flipped", *both):
            outcome = workshop.damage(name, how, rng)
            assert outcome.startswith(NOTICED), (str(name), how, outcome)
            outcomes.add(outcome.split(":")[0])
    assert outcomes >= {"same", "repaired" if kind in KINDS else "refused"}


def by_command(folder: Path) -> None:
    """Repair as an operator does, and hear what was restored."""
    code, screen = run("verify", "--repair", str(folder))
    assert code == 0 and "Restored: clients/" in screen and "bytes were uploaded" in screen


def test_a_lost_and_a_damaged_state_are_repaired_with_the_same_bytes(tmp_path: Path) -> None:
    workshop = Workshop.build("personal", tmp_path / "run")
    newest = next(name for name in workshop.files() if name.match("clients/*/*/*/3.json"))
    tensors = next(name for name in workshop.files() if name.match("clients/*/*/*/3.*.safetensors"))
    for name, how in ((newest, "deleted"), (tensors, "flipped")):
        outcome = workshop.damage(name, how, random.Random(0), repair=by_command)
        assert outcome.startswith("repaired: the server has a reply of"), outcome


def test_a_lost_newest_checkpoint_does_not_shorten_the_run(tmp_path: Path) -> None:
    workshop = Workshop.build("personal", tmp_path / "run")
    whole = workshop.folder.with_name("whole")
    (whole / "global" / "5.json").unlink()
    assert repair_run(whole) == ["global/5.json"]
    assert not workshop.differences(whole)
    key = next(whole.glob("clients/*/*/*/key"))
    key.unlink()
    with pytest.raises(FedplanError, match=f"cannot be repaired: {key} is lost"):
        repair_run(whole)


def test_a_second_repair_is_refused_and_leaves_the_copy_of_the_first(tmp_path: Path) -> None:
    whole = Workshop.build("personal", tmp_path / "run").folder.with_name("whole")
    (whole / "global" / "5.json").unlink()
    copy = whole.with_name(f".{whole.name}.repair")
    copy.mkdir()
    hold = "import sys; from pathlib import Path; from fedplan.storage.locks import *; "
    hold += "lock = acquire_folder_lock(Path(sys.argv[1])); print('held', flush=True); input()"
    first = subprocess.Popen(
        [sys.executable, "-c", hold, str(whole)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert first.stdout is not None and first.stdout.readline() == "held\n"
    with pytest.raises(FedplanError):
        repair_run(whole)
    assert copy.is_dir()
    first.communicate("\n")
    assert repair_run(whole) == ["global/5.json"] and not copy.exists()


def test_a_lost_best_round_is_a_fault_that_a_repair_mends(tmp_path: Path) -> None:
    workshop = Workshop.build("best", tmp_path / "run")
    whole = workshop.folder.with_name("whole")
    shutil.rmtree(whole / "best")
    assert audit_run(whole).faults
    assert all(name.startswith("best/") for name in repair_run(whole))
    assert not workshop.differences(whole)


def test_a_site_misses_records_that_are_lost_with_their_heads(tmp_path: Path) -> None:
    workshop = SiteWorkshop.build("site", tmp_path / "site")
    for log in ("replies.jsonl", "egress.jsonl"):
        name = next(name for name in workshop.files() if name.name == log)
        outcome = workshop.damage(name, "deleted with its head", random.Random(0))
        assert outcome == "refused: hello: disk"
    federation = FederationWorkshop.build("sites, secure", tmp_path / "secure")
    name = next(name for name in federation.files() if name.name == "reveals.jsonl")
    outcome = federation.damage(name, "deleted with its head", random.Random(0))
    assert outcome == "refused: disk"


def test_each_deleted_file_of_a_site_and_its_server_is_missed(tmp_path: Path) -> None:
    workshop = FederationWorkshop.build("sites, personal", tmp_path / "sites")
    outcomes = {str(n): workshop.damage(n, "deleted", random.Random(0)) for n in workshop.files()}
    assert all(outcome.startswith(NOTICED) for outcome in outcomes.values()), outcomes
