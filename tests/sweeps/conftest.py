# SPDX-License-Identifier: Apache-2.0
"""One sweep that all tests of this folder look at, and none changes."""

from __future__ import annotations

import pytest
from sweeps import small_sweep

from fedplan.sweeps.sweeping import Sweep


@pytest.fixture(scope="session")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Sweep:
    return small_sweep(tmp_path_factory.mktemp("swept"))
