# SPDX-License-Identifier: Apache-2.0
"""How one trains is the same on a device: schedules, steps in parts, groups and checkpoints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from often import first
from second_device import NAME
from there import PACE, federation, played, values_of

from fedplan.training import Pace, Schedule, adamw, sgd

pytestmark = pytest.mark.device

PACES = {
    "schedule": Pace(sgd(), rate=1e-2, batch=1, schedule=Schedule("linear", 1, rounds=2)),
    "accumulate": replace(PACE, batch=1, accumulate=2, clip=0.5),
    "checkpointing": replace(PACE, checkpointing=True),
    "decay": Pace(adamw(decay=0.5), rate=1e-2, batch=2, decay_all=False),
    "workers": replace(PACE, workers=2),
}


@pytest.mark.parametrize("name", first(3, [*PACES]))
def test_a_pace_is_the_same_there(name: str, tmp_path: Path, device: torch.device) -> None:
    """The same bits on the second device; on hardware, within what rounding makes of two rounds."""
    exact = device.type == NAME
    pace = PACES[name] if exact else replace(PACES[name], optimiser=sgd(decay=0.5))
    here = played(federation("fedavg", "bert", tmp_path / "here", pace=pace))
    there = played(federation("fedavg", "bert", tmp_path / "there", device, pace))
    one, other, slack = values_of(here), values_of(there), 0.0 if exact else 1e-4
    for key, value in one.items():
        assert torch.allclose(value, other[key], rtol=slack, atol=slack), key
