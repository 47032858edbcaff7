# SPDX-License-Identifier: Apache-2.0
"""What updates tell: the tables of the page are those of the result file, which has all methods."""

from __future__ import annotations

from pathlib import Path

from research.leaks import ADAMW, METHODS, ONE, PRIVATE, read_lines, tables

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "privacy.md"


def test_the_tables_of_the_page_are_those_of_the_result_file() -> None:
    page = PAGE.read_text()
    assert all(table in page for table in tables()), "make anew: python -m research.leaks --table"


def test_every_method_was_attacked_in_every_way_and_none_beyond_its_bound() -> None:
    facts, *lines = read_lines()
    done = {(line["method"], line["training"]) for line in lines}
    assert {(name, setup) for name in METHODS for setup in (ONE, ADAMW, PRIVATE)} <= done
    assert facts["first_stage_is_fedavg"]
    for line in lines:
        for view, parts in line["views"].items():
            for part in parts.values() if "noisy" in view or line["training"] == PRIVATE else ():
                assert part["membership"]["auc"][1] <= facts["bounds"]["auc"]
                assert part["membership"]["true_positives"][1] <= facts["bounds"]["true_positives"]
