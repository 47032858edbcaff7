# SPDX-License-Identifier: Apache-2.0
"""How often a law is tried: fifty examples by day, all that it asks for at night."""

from __future__ import annotations

import os
from typing import Any

import pytest

DAY, NIGHT = 50, 2000
AT_NIGHT = os.environ.get("FEDPLAN_LAWS", "day") == "night"


def often(count: int) -> int:
    """The examples of a law that asks for so many: by day a twentieth, and fifty at least."""
    return count if AT_NIGHT else min(count, max(DAY, count // 20))


def first(count: int, cases: list[Any]) -> list[Any]:
    """Cases of which the first few are tried by day, and all at night."""
    return [*cases[:count], *(pytest.param(c, marks=pytest.mark.nightly) for c in cases[count:])]
