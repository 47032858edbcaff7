# SPDX-License-Identifier: Apache-2.0
"""How often a law is tried: some examples and some cases by day, all that there are at night."""

from __future__ import annotations

import os
from typing import Any

import pytest

DAY, MOST_BY_DAY, NIGHT, CASES = 30, 300, 300, 3
AT_NIGHT = os.environ.get("FEDPLAN_LAWS", "day") == "night"


def often(count: int) -> int:
    """Examples of a law that asks for `count`: by day a twentieth, from 30 to 300."""
    return count if AT_NIGHT else min(count, max(DAY, min(count // 20, MOST_BY_DAY)))


def first(count: int, cases: list[Any]) -> list[Any]:
    """Cases of which the first few are tried by day, and all at night."""
    return [*cases[:count], *(pytest.param(c, marks=pytest.mark.nightly) for c in cases[count:])]


def spread(cases: list[pytest.Item]) -> list[pytest.Item]:
    """Of a law's cases, those of the day: a few, evenly from the first to the last."""
    if AT_NIGHT or len(cases) <= CASES:
        return cases
    return [cases[place * (len(cases) - 1) // (CASES - 1)] for place in range(CASES)]
