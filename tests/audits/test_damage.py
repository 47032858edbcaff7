# SPDX-License-Identifier: Apache-2.0
"""A damaged file of a run is refused before training, or repaired: never passed over in silence."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
from commands import run
from damage import KINDS, Workshop
from often import AT_NIGHT

from fedplan.audits.repair import repair_run
from fedplan.audits.run import audit_run


@pytest.mark.parametrize("kind", [pytest.param(k, marks=pytest.mark.nightly) for k in KINDS])
def test_each_file_deleted_or_flipped_ends_with_the_same_bytes_or_is_refused(
    kind: str, tmp_path: Path
) -> None:
    workshop, rng, outcomes = Workshop.build(kind, tmp_path / kind), random.Random(kind), set[str]()
    for name in workshop.files():
        for how in ("deleted", *["flipped"] * (4 if AT_NIGHT else 1)):
            outcome = workshop.damage(name, how, rng)
            assert "SILENT" not in outcome, (str(name), how, outcome)
            outcomes.add(outcome.split(":")[0])
    assert outcomes >= {"same", "repaired"}


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


def test_a_lost_best_round_is_a_fault_that_a_repair_mends(tmp_path: Path) -> None:
    workshop = Workshop.build("best", tmp_path / "run")
    whole = workshop.folder.with_name("whole")
    shutil.rmtree(whole / "best")
    assert audit_run(whole).faults
    assert all(name.startswith("best/") for name in repair_run(whole))
    assert not workshop.differences(whole)
