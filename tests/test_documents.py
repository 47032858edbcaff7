# SPDX-License-Identifier: Apache-2.0
"""Every block of the documents runs, and every command prints what they say it prints."""

from __future__ import annotations

import ast
import doctest
import importlib
import pkgutil
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import fedplan
from fedplan.cli import app, new
from fedplan.server_commands import server_commands
from fedplan.site_commands import site_commands

ROOT = Path(__file__).parent.parent
DOCUMENTS = ["README.md", *(f"docs/{p.name}" for p in sorted((ROOT / "docs").glob("*.md")))]

FOUND = [
    m for m in pkgutil.walk_packages(fedplan.__path__, "fedplan.") if ".templates" not in m.name
]
MODULES = [m.name for m in FOUND]
PACKAGES = [m.name for m in FOUND if m.ispkg]


def blocks(document: str, language: str) -> list[str]:
    text = (ROOT / document).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.M | re.S)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_the_python_blocks_run_one_after_the_other(
    document: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: dict[str, object] = {}
    monkeypatch.setattr(sys, "path", list(sys.path))
    try:
        for block in blocks(document, "python"):
            exec(compile(block, document, "exec"), names)
    finally:
        sys.modules.pop("mypackage", None)  # what a document wrote and imported


def test_the_map_of_the_packages_is_that_of_their_imports() -> None:
    drawn = runpy.run_path(str(ROOT / "docs" / "architecture.py"))["drawn"]
    kept = (ROOT / "docs" / "architecture.svg").read_text()
    assert drawn() == kept, "draw it anew: make architecture"


def test_the_map_imports_all_that_every_face_shows() -> None:
    imported = {
        node.module: sorted(alias.name for alias in node.names)
        for block in blocks("docs/architecture.md", "python")
        for node in ast.parse(block).body
        if isinstance(node, ast.ImportFrom)
    }
    assert imported == {name: sorted(importlib.import_module(name).__all__) for name in PACKAGES}


def test_the_map_names_what_stands_in_the_files() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    named = re.findall(r"`(?:fedplan/)?([a-z_/]+\.py): ([\w.]+)`", text)
    assert len(named) > 20
    for file, name in named:
        found = importlib.import_module(f"fedplan.{file[:-3].replace('/', '.')}")
        for part in name.split("."):
            found = getattr(found, part)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_the_commands_print_what_is_printed(document: str) -> None:
    for block in blocks(document, "console"):
        for command, printed in re.findall(r"^\$ (fedplan .*)\n((?:(?!\$ ).*\n)*)", block, re.M):
            done = CliRunner(env={"COLUMNS": "80"}).invoke(app, shlex.split(command)[1:])
            assert tidy(done.output) == tidy(printed), command


@pytest.mark.parametrize("module", MODULES)
def test_the_examples_in_docstrings_run(module: str) -> None:
    found = doctest.testmod(importlib.import_module(module))
    assert found.failed == 0


def tidy(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


@pytest.mark.parametrize("document", [*DOCUMENTS, "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_lead_somewhere(document: str) -> None:
    text = (ROOT / document).read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        if not target.startswith("http"):
            assert ((ROOT / document).parent / target).exists(), target


def test_the_tables_of_the_studies_are_those_of_their_result_files() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "lab" / "table.py")], capture_output=True, text=True, check=True
    )
    told = "".join((ROOT / "docs" / f"{name}.md").read_text() for name in ("studies", "defence"))
    for table in done.stdout.split("### ")[1:]:
        assert f"### {table.strip()}" in told, table


def test_every_command_has_a_function_with_a_documented_name() -> None:
    text = (ROOT / "docs" / "python.md").read_text()
    named = dict(re.findall(r"^\| `([a-z ]+)` \| `([\w.]+)` \|$", text, flags=re.M))
    commands = {typer.main.get_command_name(c.callback.__name__) for c in app.registered_commands}  # type: ignore[union-attr]
    commands |= {f"new {c.callback.__name__}" for c in new.registered_commands}  # type: ignore[union-attr]
    for group, under in (("site", site_commands), ("server", server_commands)):
        commands |= {f"{group} {c.callback.__name__}" for c in under.registered_commands}  # type: ignore[union-attr]
    assert commands == named.keys()
    for name in named.values():
        module, _, attribute = name.rpartition(".")
        assert getattr(importlib.import_module(module), attribute) is not None


def test_the_tables_of_scale_are_those_of_the_unit_costs() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "lab" / "scale.py")], capture_output=True, text=True, check=True
    )
    told = (ROOT / "docs" / "scale.md").read_text()
    for table in done.stdout.split("### ")[1:]:
        assert f"### {table.strip()}" in told, "make it anew: python lab/scale.py --write"


def test_the_table_of_the_bench_is_that_of_its_result_files() -> None:
    told = "import sys; from lab.bench.table import own; sys.stdout.write(own())"
    words = [sys.executable, "-c", told]
    done = subprocess.run(words, capture_output=True, text=True, check=True, cwd=ROOT)
    kept = (ROOT / "lab" / "results" / "bench" / "table.md").read_text()
    assert kept.startswith(done.stdout), "make it anew: python -m lab.bench.table"
