# SPDX-License-Identifier: Apache-2.0
"""The table of what fedplan can and cannot do: its pages are up to date, its tests exist."""

from __future__ import annotations

import ast
import re
import runpy
from pathlib import Path

import pytest
from commands import STUDY

from fedplan.errors import FedplanError
from fedplan.studies.schema import read_study

ROOT = Path(__file__).parents[1]
TABLE = runpy.run_path(str(ROOT / "docs" / "capabilities.py"))
ROWS = TABLE["CAPABILITIES"]


def test_the_pages_are_those_of_the_table() -> None:
    for file, text in TABLE["pages"]().items():
        assert file.read_text() == text, f"{file}: run python docs/capabilities.py"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.need[:40])
def test_every_supported_row_has_a_test_and_every_other_a_limit(row: object) -> None:
    row = next(each for each in ROWS if each is row)
    assert row.answer in ("yes", "partly", "no") and row.how
    assert row.answer != "yes" or row.tests, "a promise needs a test"
    for place in row.tests:
        file, name = place.split("::")
        files = sorted((ROOT / "tests").glob(f"{file}/*.py" if "." not in file else file))
        assert files, place
        functions = {
            node.name
            for each in files
            for node in ast.walk(ast.parse(each.read_text()))
            if isinstance(node, ast.FunctionDef)
        }
        assert any(re.fullmatch(name.replace("*", "test_.*"), each) for each in functions), place


@pytest.mark.parametrize("row", [r for r in ROWS if r.refused], ids=lambda row: row.refused)
def test_what_is_not_supported_is_rejected_by_name(row: object, here: Path) -> None:
    override = next(each for each in ROWS if each is row).refused
    Path("study.toml").write_text(STUDY)
    with pytest.raises(FedplanError) as caught:
        read_study(Path("study.toml"), [override])
    word = override.partition("=")[2].strip('"[]') or override
    assert word in str(caught.value) or override.partition("=")[0].split(".")[-1] in str(
        caught.value
    )
