# SPDX-License-Identifier: Apache-2.0
"""Golden runs leave what they left when they were stored, to the bit.

Each is a test of its own: by day only some cases of one test would be tried.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import runs


def require_as_stored(name: str, folder: Path) -> None:
    """Play a run and compare it; where floats differ, only what does not follow from them."""
    folder.mkdir()
    found, probe = runs.played(name, folder)
    expected = runs.stored(runs.SAME.get(name, name))
    if name in runs.SAME:
        found, expected = runs.alike_on_all(found), runs.alike_on_all(expected)
    known = json.loads((runs.STORED / "probe.json").read_text())
    same_floats = known["sha256"] == probe["sha256"]
    if not same_floats:
        found, expected = runs.loosely(found), runs.loosely(expected)
    lines = list(runs.differences(expected, found))
    told = "\n".join(lines[:200])
    assert not lines, f"{name} is not what it was (runs.py --write, if that is meant):\n{told}"
    if not same_floats:
        pytest.skip(
            f"torch {probe['torch']} on this machine rounds otherwise than {known['torch']} where "
            f"the runs were stored: of {name} only words were compared, not numbers or tensors"
        )


def test_local(tmp_path: Path) -> None:
    require_as_stored("local", tmp_path / "run")


def test_pool(tmp_path: Path) -> None:
    require_as_stored("pool", tmp_path / "run")


def test_dp(tmp_path: Path) -> None:
    require_as_stored("dp", tmp_path / "run")


def test_secure(tmp_path: Path) -> None:
    require_as_stored("secure", tmp_path / "run")


def test_flower(tmp_path: Path) -> None:
    require_as_stored("flower", tmp_path / "run")


@pytest.mark.nightly
def test_link(tmp_path: Path) -> None:
    require_as_stored("link", tmp_path / "run")
