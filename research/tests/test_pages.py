# SPDX-License-Identifier: Apache-2.0
"""The tables of pages are those of their result files."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_tables_of_the_studies_are_those_of_their_result_files() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "research" / "table.py")],
        capture_output=True,
        text=True,
        check=True,
    )
    page = (ROOT / "research" / "pages" / "studies.md").read_text()
    for table in done.stdout.split("### ")[1:]:
        assert f"### {table.strip()}" in page, table


def test_the_errors_of_forecasts_are_those_of_their_result_file() -> None:
    words = [sys.executable, str(ROOT / "research" / "forecasts.py"), "--told"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout in (ROOT / "research" / "pages" / "forecasts.md").read_text()


def test_the_tables_of_scale_are_those_of_the_unit_costs() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "research" / "scale.py")],
        capture_output=True,
        text=True,
        check=True,
    )
    page = (ROOT / "research" / "pages" / "scale.md").read_text()
    for table in done.stdout.split("### ")[1:]:
        assert f"### {table.strip()}" in page, "write it again: python research/scale.py --write"


GIVEN = """
    0.6 1 1.41 1.6 1.7 10 10,000 1000 1,024 1024 12.5 16 1902.01046 1b 2 20 2019 2022 2111.04877 3 3.2
    32 35.2 4 8 8.4
"""
"""Numbers of the page of scale that are settings, names, formulas, or measured by other tests."""


def test_the_numbers_of_the_page_of_scale_are_those_of_the_result_files() -> None:
    words = [sys.executable, str(ROOT / "research" / "scale.py"), "--sentences"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    page = " ".join((ROOT / "docs" / "explanation" / "scale.md").read_text().split())
    sentences = [" ".join(line.split()) for line in done.stdout.splitlines()]
    for sentence in sorted(sentences, key=len, reverse=True):
        assert sentence in page, sentence
        page = page.replace(sentence, "")
    number = r"\d[\d,.]*\d|\d"
    known = set(re.findall(number, GIVEN))
    assert not set(re.findall(number, page)) - known, "a number that no file has"


def test_the_table_of_the_bench_is_that_of_its_result_files() -> None:
    told = "import sys; from research.bench.table import own; sys.stdout.write(own())"
    words = [sys.executable, "-c", told]
    done = subprocess.run(words, capture_output=True, text=True, check=True, cwd=ROOT)
    kept = (ROOT / "research" / "results" / "bench" / "table.md").read_text()
    assert kept.startswith(done.stdout), "make it anew: python -m research.bench.table"


def test_the_curve_of_diloco_is_that_of_its_result_file() -> None:
    words = [sys.executable, str(ROOT / "research" / "diloco.py"), "--told"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout in (ROOT / "research" / "pages" / "diloco.md").read_text()
