# SPDX-License-Identifier: Apache-2.0
"""Every method gives on a device what it gives on the host, and moves each value at most once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from second_device import NAME
from there import DUAL, PACE, STEADY, Moves, federation, played, values_of

from fedplan.methods.registry import METHODS

pytestmark = pytest.mark.device

ARCHITECTURES = ("bert", "gpt2", "vit")
PROMPTED = ("pfeddc", "promptfl", "local-prompts", "pfeddc-held")
# By day each method is tried on one architecture; at night on all. Prompts have two towers.
PAIRS = [
    pytest.param(m, a, marks=[] if i % 3 == j else [pytest.mark.nightly])
    for i, m in enumerate(METHODS)
    for j, a in enumerate(ARCHITECTURES)
    if m not in PROMPTED
] + [(m, DUAL) for m in PROMPTED]


@pytest.mark.parametrize(("method", "architecture"), PAIRS)
def test_a_method_is_the_same_there(
    method: str, architecture: str, tmp_path: Path, device: torch.device
) -> None:
    """The same bits on the second device; on hardware, within what rounding makes of two rounds."""
    exact = device.type == NAME
    train_arguments = PACE if exact else STEADY
    here = played(
        federation(method, architecture, tmp_path / "here", train_arguments=train_arguments)
    )
    there = federation(method, architecture, tmp_path / "there", device, train_arguments)
    for number in range(2):
        moves = Moves(there)
        played(there, 1)
        if exact:
            moves.require_bounded(f"round {number}")
    _require_same(values_of(here), values_of(there), 0.0 if exact else 1e-4)
    assert {each.device.type for each in there.model.parameters()} == {device.type}
    assert {each.device.type for each in values_of(there).values()} == {"cpu"}


def _require_same(
    one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], slack: float
) -> None:
    assert one.keys() == other.keys()
    for key, value in one.items():
        assert torch.allclose(value, other[key], rtol=slack, atol=slack), key
