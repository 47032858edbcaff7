# SPDX-License-Identifier: Apache-2.0
"""What the pages say of claims follows from files that are there."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from fedplan.models.prompts import make_fusion
from research.decide.page import PAGES, drawn, filled, word_of
from research.decide.question import QuestionError
from research.decide.results import RESULTS

ROOT = Path(__file__).parents[2]
PAGES_OF_LAB = ROOT / "research" / "pages"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_verdicts_on_other_pages_are_those_of_their_result_files(page: Path) -> None:
    text = page.read_text()
    assert filled(text) == text, "make it anew: python -m research.decide.page --write"


def test_figures_are_those_of_their_result_files() -> None:
    for name, drawing in drawn().items():
        assert (RESULTS / f"{name}.svg").read_text() == drawing, (
            "make it anew: research.decide.page"
        )


def test_what_claims_point_to_is_there() -> None:
    text = (PAGES_OF_LAB / "claims.md").read_text()
    named = set(re.findall(r"`((?:fedplan|tests|research)/[\w/.-]+)`", text))
    assert len(named) > 15
    assert [each for each in sorted(named) if not (ROOT / each).exists()] == []


def test_every_claim_has_a_verdict() -> None:
    rows = [
        line
        for line in (PAGES_OF_LAB / "claims.md").read_text().splitlines()
        if line.startswith("|")
    ]
    said = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    papers = [cells for cells in said if len(cells) == 4 and set(cells[0]) != {"-"}]
    assert len(papers) > 40 and all(cells[0] and cells[3] for cells in papers)
    assert {len(cells) for cells in said} == {2, 4}


def test_a_comparison_that_nobody_asks_is_refused() -> None:
    with pytest.raises(QuestionError, match="has no comparison"):
        word_of("prompts-mixed", "attention minus luck")


def test_the_cost_of_prompts_is_that_of_its_result_file() -> None:
    rows = json.loads((RESULTS.parent / "prompts-cost.json").read_text())["rows"]
    text = (PAGES_OF_LAB / "prompts.md").read_text()
    for row in rows:
        cells = [row["what"], str(row["ms_usual"]), str(row["ms_kept"]), f"{row['ratio']:.2f}"]
        cells.append(str(row["ms_first"]))
        assert f"| {' | '.join(cells)} |" in text, row


def test_the_numbers_that_a_client_keeps_are_counted() -> None:
    fusion = make_fusion("attention", 384, query="own", heads=1, width=64)
    assert fusion is not None
    kept = sum(param.numel() for param in fusion.parameters())
    text = (PAGES_OF_LAB / "prompts.md").read_text()
    assert f"{kept:,} numbers" in text and f"{4 * 384:,} of own prompts" in text
    assert f"{2 * 4 * 384 * 4 / 1e3:.0f} kB here" in text
