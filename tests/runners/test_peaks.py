# SPDX-License-Identifier: Apache-2.0
"""Peak memory: what each end of a federation holds at most, as multiples of its model."""

from __future__ import annotations

from typing import Any

import pytest
from peaks import CASES, peaks

SLACK = 0.65
"""In models: what Python and torch take on the way, and the second gradient of a table that is tied
to the head. A copy too many is more than that."""
SUMS = 2.0
"""What sums of two-byte numbers take beyond the limit: eight bytes a number, exactly added."""


def limit(name: str, found: dict[str, Any]) -> float:
    """The model once and a tenth, and four times what is trained."""
    part = found["trained_bytes"] / found["model_bytes"]
    return found["limit"] + SLACK + (SUMS * part if CASES[name].dtype == "bfloat16" else 0.0)


@pytest.mark.nightly
@pytest.mark.parametrize("name", CASES)
def test_a_local_run_holds_no_more_than_the_limit(name: str) -> None:
    found = peaks("local", name)
    assert found["peak"] <= limit(name, found), found


@pytest.mark.nightly
@pytest.mark.parametrize("name", CASES)
def test_a_server_and_its_sites_hold_no_more_than_the_limit(name: str) -> None:
    found = peaks("server", name)
    for each in (found, *found["sites"]):
        assert each["peak"] <= limit(name, each), found
