# SPDX-License-Identifier: Apache-2.0
"""What masked sums cost: the page's table is that of its result file, and of all that was asked."""

from __future__ import annotations

from pathlib import Path

from research.masking import CASES, held, tables

PAGE = Path(__file__).parents[2] / "research" / "pages" / "masking.md"


def test_the_table_of_costs_is_that_of_its_result_file() -> None:
    assert tables() in PAGE.read_text(), "make it anew: python -m research.masking --table"


def test_every_size_was_measured_with_all_sites_and_with_a_tenth_of_them_lost() -> None:
    asked = {(c, n, lost) for c, n in CASES for lost in (0, max(1, c // 10))}
    assert {(row["sites"], row["numbers"], row["lost"]) for row in held()} == asked
