# SPDX-License-Identifier: Apache-2.0
"""What every test starts from: no network, one thread, and torch only where a test imports it."""

from __future__ import annotations

import os
import sys

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", HF_DATASETS_OFFLINE="1")
os.environ.update(FLWR_TELEMETRY_ENABLED="0", FLWR_DISABLE_UPDATE_CHECK="1")

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from often import AT_NIGHT, DAY, NIGHT, spread

if TYPE_CHECKING:
    import torch
    from second_device import Backend

SECOND = "elsewhere"
settings.register_profile(
    "laws", max_examples=NIGHT if AT_NIGHT else DAY, deadline=None, derandomize=True
)
settings.load_profile("laws")


def pytest_addoption(parser: pytest.Parser) -> None:
    said = "where tests of devices run: cuda, cuda:1, mps, xpu; else on one of pure Python"
    parser.addoption("--device", default=SECOND, help=said)
    parser.addoption("--sample", action="store_true", help="of each parametrized test run a few")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With `--sample`, as the gate has it, keep a few cases of each parametrized test.

    Tests directly in this folder are quick and run whole.
    """
    if not config.getoption("--sample"):
        return
    laws = dict[str, list[pytest.Item]]()
    for item in items:
        if not item.get_closest_marker("nightly") and item.path.parent != Path(__file__).parent:
            laws.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left = {each for cases in laws.values() for each in set(cases) - set(spread(cases))}
    config.hook.pytest_deselected(items=sorted(left, key=lambda each: each.nodeid))
    items[:] = [item for item in items if item not in left]


def pytest_collection_finish() -> None:
    """Give torch one thread, if a collected test imported it."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """The device of `--device`; without one, the second device of the kit."""
    from second_device import second

    from fedplan.tensors.devices import resolve_device

    name = request.config.getoption("--device")
    with second() if name == SECOND else nullcontext():
        yield resolve_device(name)


@pytest.fixture
def counts(device: torch.device) -> Backend:
    """What is moved to the second device and from it."""
    if device.type != SECOND:
        pytest.skip("transfers are counted on the second device alone")
    from second_device import device as backend

    return backend()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a tiny study and its data."""
    from commands import STUDY, some_digits

    monkeypatch.chdir(tmp_path)
    some_digits(tmp_path)
    Path("study.toml").write_text(STUDY)
    return tmp_path
