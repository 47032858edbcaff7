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

from fedplan.training import LRSchedule, TrainArguments, adamw, sgd

pytestmark = pytest.mark.device

PACES = {
    "schedule": TrainArguments(
        sgd(), lr=1e-2, batch_size=1, lr_scheduler=LRSchedule("linear", 1, rounds=2)
    ),
    "accumulate": replace(PACE, batch_size=1, gradient_accumulation_steps=2, max_grad_norm=0.5),
    "checkpointing": replace(PACE, gradient_checkpointing=True),
    "decay": TrainArguments(
        adamw(weight_decay=0.5), lr=1e-2, batch_size=2, decay_norm_and_bias=False
    ),
    "workers": replace(PACE, num_workers=2),
}


@pytest.mark.parametrize("name", first(3, [*PACES]))
def test_a_pace_is_the_same_there(name: str, tmp_path: Path, device: torch.device) -> None:
    """The same bits on the second device; on hardware, within what rounding makes of two rounds."""
    exact = device.type == NAME
    train_arguments = (
        PACES[name] if exact else replace(PACES[name], optimizer=sgd(weight_decay=0.5))
    )
    here = played(federation("fedavg", "bert", tmp_path / "here", train_arguments=train_arguments))
    there = played(federation("fedavg", "bert", tmp_path / "there", device, train_arguments))
    one, other, slack = values_of(here), values_of(there), 0.0 if exact else 1e-4
    for key, value in one.items():
        assert torch.allclose(value, other[key], rtol=slack, atol=slack), key
