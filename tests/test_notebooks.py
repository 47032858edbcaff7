# SPDX-License-Identifier: Apache-2.0
"""Every notebook runs from top to bottom, is small, says how to install, and has its outputs."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
from pages import canonical_text, links

ROOT = Path(__file__).parents[1]
NOTEBOOKS = runpy.run_path(str(ROOT / "docs" / "notebooks.py"))
FILES = sorted((ROOT / "notebooks").glob("*.ipynb"))
QUICK = "own-csv"


def read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "file",
    [
        pytest.param(file, id=file.stem, marks=() if file.stem == QUICK else pytest.mark.nightly)
        for file in FILES
    ],
)
def test_a_notebook_runs_and_gives_outputs_of_the_stored_kinds(
    file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    notebook = read(file)
    stored = [cell["outputs"] for cell in NOTEBOOKS["code_cells"](notebook)]
    made = list(NOTEBOOKS["run_cells"](notebook, file.stem))
    kinds = [
        [[output["output_type"] for output in cell] for cell in all_] for all_ in (stored, made)
    ]
    assert kinds[0] == kinds[1]


def test_there_are_notebooks_and_the_readme_links_them() -> None:
    linked = {link for link in links("README.md") if link.endswith(".ipynb")}
    assert linked == {f"notebooks/{file.name}" for file in FILES} and len(linked) > 2


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_notebook_is_small_explains_itself_and_has_its_outputs(file: Path) -> None:
    notebook = read(file)
    assert file.stat().st_size < 150_000 and notebook["nbformat"] == 4
    cells = notebook["cells"]
    assert len({cell["id"] for cell in cells}) == len(cells)
    assert cells[0]["cell_type"] == "markdown" and cells[0]["source"][0].startswith("# ")
    code = NOTEBOOKS["code_cells"](notebook)
    assert "".join(code[0]["source"]).startswith("# %pip install ")
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert all("outputs" in cell for cell in code) and sum(bool(c["outputs"]) for c in code) > 3
    assert len(code) < 2 * (len(cells) - len(code)), "text around each cell"
    for output in (output for cell in code for output in cell["outputs"]):
        assert output["output_type"] in ("stream", "execute_result", "display_data")


def test_the_extras_that_notebooks_install_exist() -> None:
    extras = re.search(r"Extras: (.*?)\. fedplan", canonical_text("README.md"), re.S)
    assert extras is not None
    for file in FILES:
        first = "".join(NOTEBOOKS["code_cells"](read(file))[0]["source"])
        for name in re.findall(r"fedplan\[(\w+)\]", first):
            assert f"`{name}`" in extras[1], (file.name, name)
