# SPDX-License-Identifier: Apache-2.0
"""A power cut at any failpoint of a site or the server changes no bit of a federation's result.

Over sites with personal values, private ones, and rounds of secure aggregation.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from random import Random

import pytest
from network import Weather
from setting import Setting
from simulator import MEMORY, Plan, Trial, compare, undisturbed

from fedplan.storage.files import POINTS

SETTINGS = {
    "personal": Setting("fedper", False, "", 2, 2, 1.0),
    "client-level": Setting("fedper", False, "client", 2, 2, 1.0),
    "example-level": Setting("fedper", False, "example", 2, 2, 1.0),
    "secure": Setting("fedper", True, "", 3, 2, 1.0),
}
DARK = Plan(Weather(), False, False, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0)
"""A plan without faults, in which each kill is a power cut."""
SERVER_ONLY, SITE_ONLY = ("round",), ("journal", "secagg")


def deaths() -> list[tuple[str, str]]:
    """Each machine with each point where it may die, the first and a later time."""
    found = list[tuple[str, str]]()
    for point, time in product(POINTS, (1, 3, 6)):
        group = point.split(".")[0]
        found += [("server", f"{point}:kill@{time}")] * (group not in SITE_ONLY)
        found += [("client-0", f"{point}:kill@{time}")] * (group not in SERVER_ONLY)
    return found


def try_death(setting: Setting, machine: str, death: str, root: Path) -> bool:
    """Cut a machine's power at a point; return whether it got there. The result must not change."""
    expected, folder = undisturbed(setting, root), root / "dark"
    shutil.rmtree(folder, ignore_errors=True)
    stops = {machine: death}
    trial = Trial(setting, folder, Random(death), DARK, stops=stops).run()
    compare(trial, expected)
    return not stops


@pytest.fixture
def root() -> Iterator[Path]:
    """Folders of trials: in memory, if there is such a place."""
    folder = Path(tempfile.mkdtemp(dir=MEMORY if MEMORY.is_dir() else None))
    yield folder
    shutil.rmtree(folder)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", SETTINGS)
def test_a_power_cut_at_each_point_changes_nothing(kind: str, root: Path) -> None:
    reached = [try_death(SETTINGS[kind], *death, root) for death in deaths()]
    assert sum(reached) > 40


@pytest.mark.parametrize("kind", SETTINGS)
def test_a_power_cut_at_a_few_points_changes_nothing(kind: str, root: Path) -> None:
    reached = [try_death(SETTINGS[kind], *death, root) for death in deaths()[::12]]
    assert sum(reached) > 3
