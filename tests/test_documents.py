# SPDX-License-Identifier: Apache-2.0
"""Every block of the documents runs, and every command prints what they say it prints."""

from __future__ import annotations

import ast
import doctest
import html
import importlib
import json
import pkgutil
import re
import runpy
import shlex
import shutil
import sys
import tomllib
from pathlib import Path
from typing import Any, get_origin

import pytest
import typer
from pages import (
    DOCUMENTS,
    GENERATED,
    PROJECT,
    RESEARCH,
    SHELL,
    Block,
    anchors,
    commands,
    counted,
    links,
    played,
)
from pages import blocks as block_modules
from pydantic import BaseModel
from typer.core import TyperGroup
from typer.testing import CliRunner

import fedplan
from fedplan.cli import app
from fedplan.methods import METHODS
from fedplan.runners.site import Site
from fedplan.sites.policy import Policy
from fedplan.studies.schema import Study
from fedplan.tensors import parse_codec

ROOT = Path(__file__).parent.parent
LANGUAGES = {*SHELL, "python", "pycon", "py", "toml", "text", "diff"}

FOUND = [
    m for m in pkgutil.walk_packages(fedplan.__path__, "fedplan.") if ".templates" not in m.name
]
section_in = runpy.run_path(str(ROOT / "docs" / "reference.py"))["section_in"]
MODULES = [m.name for m in FOUND]
PACKAGES = [m.name for m in FOUND if m.ispkg]


def blocks(document: str, language: str) -> list[str]:
    return [block.text for block in block_modules(document) if block.language == language]


@pytest.mark.parametrize("document", [page for page in DOCUMENTS if not played(page)])
def test_the_python_blocks_run_one_after_the_other(
    document: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    names: dict[str, object] = {}
    monkeypatch.chdir(tmp_path)
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


@pytest.mark.parametrize("document", [page for page in DOCUMENTS if played(page)])
def test_a_played_page_works_from_top_to_bottom(
    document: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As a reader does it: in an empty folder, saving what is to be saved, typing the rest."""
    monkeypatch.chdir(tmp_path)
    for block in block_modules(document):
        if block.excuse:
            continue
        if block.file:
            Path(block.file).write_text(block.text)
        elif block.language == "sh":
            for line in block.text.splitlines():
                typed(line)


def typed(line: str) -> None:
    """Do what a line of a shell does, in this process."""
    words = shlex.split(line, comments=True)
    if words[0] == "python":
        runpy.run_path(words[1], run_name="__main__")
        return
    assert words[0] == "fedplan", line
    done = CliRunner().invoke(app, words[1:])
    assert done.exit_code == 0, (line, done.output)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_block_is_run_or_says_why_not(document: str) -> None:
    for block in block_modules(document):
        assert block.language in LANGUAGES, f"say the language of {block.text[:60]!r}"
        runs = block.done in ("run", "checked") or block.language not in SHELL
        assert runs or block.excuse, f"say before it why it is not run: {block.text[:60]!r}"
        assert not (block.excuse == "run by" and not elsewhere(block)), block.why


def elsewhere(block: Block) -> list[Path]:
    """The files that are said to run a block."""
    found = [ROOT / name for name in re.findall(r"[\w./]+\.py|Makefile|\.ci/\w+", block.why)]
    return found if all(file.exists() for file in found) else []


def test_every_command_that_is_named_is_there_with_its_options() -> None:
    top = typer.main.get_command(app)
    for words in (
        w for page in (*DOCUMENTS, "CONTRIBUTING.md", "SECURITY.md") for w in commands(page)
    ):
        command, said = top, list(words)
        while isinstance(command, TyperGroup) and said and re.fullmatch("[a-z]+", said[0]):
            assert said[0] in command.commands, f"there is no fedplan {' '.join(words)}"
            command = command.commands[said.pop(0)]
        known = {o for p in command.params for o in (*p.opts, *p.secondary_opts)} | {"--help"}
        assert {w.partition("=")[0] for w in said if re.match("--?[a-z]", w)} <= known, words


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_block_of_toml_says_fields_that_there_are(document: str) -> None:
    for block in blocks(document, "toml"):
        said = tomllib.loads(block)
        if "project" in said:  # of a package that offers something
            continue
        assert any(fits(schema, said) for schema in (Study, Site, Policy)), block
        method = said.get("method", {})
        fedplan.parse(method.get("plan", "share()"))
        parse_codec(method.get("compression", "plain()"))
        assert method.get("name", "fedavg") in METHODS or ":" in method["name"], block


def fits(schema: type[BaseModel], said: dict[str, Any]) -> bool:
    """Whether all names in plain values are fields; those of tables and adapters are free."""
    if schema.model_config.get("extra") == "allow":
        return True
    for name, value in said.items():
        if name not in schema.model_fields:
            return False
        field = schema.model_fields[name]
        inner, is_table = section_in(field), get_origin(field.annotation) is dict
        if inner and not all(
            fits(inner, each) for each in (value.values() if is_table else [value])
        ):
            return False
    return True


@pytest.mark.parametrize("document", [*DOCUMENTS, *GENERATED, *PROJECT, *RESEARCH])
def test_links_lead_somewhere(document: str) -> None:
    for link in links(document):
        target, _, anchor = link.partition("#")
        if target.startswith("http"):
            continue
        place = (ROOT / document).parent / target if target else ROOT / document
        assert place.exists(), link
        page = place.resolve().relative_to(ROOT).as_posix()
        assert not anchor or anchor in anchors(page), link


def test_the_messages_of_the_remedies_stand_in_the_sources() -> None:
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    quoted = re.findall(r"^\| `([^`]+)` \|", text, flags=re.M)
    assert len(quoted) > 20
    told = "\n".join(said_in_sources())
    for message in quoted:
        pieces = [piece.strip() for piece in message.split("...") if piece.strip()]
        assert all(piece in told for piece in pieces), message


def said_in_sources() -> list[str]:
    """All texts of fedplan's sources, with three dots for what is filled in."""
    found = list[str]()
    for file in Path(fedplan.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = (
                    str(v.value) if isinstance(v, ast.Constant) else "..." for v in node.values
                )
                found.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def test_most_of_what_the_documents_show_is_run() -> None:
    count = counted()
    done = ("run", "run by", "checked", "checked by")
    ran = sum(count.get(f"blocks {each}", 0) for each in done)
    assert ran > 10 * count.get("blocks not run", 0), count


def test_the_tests_of_the_threat_model_are_there_and_have_one_command() -> None:
    page = (ROOT / "docs" / "explanation" / "threat-model.md").read_text()
    named = set(re.findall(r"`tests/([\w/]+\.py)`", page))
    listed = re.search(r"^HOSTILE = ((?:.*\\\n)*.*)$", (ROOT / "Makefile").read_text(), re.M)
    assert listed is not None and named <= set(listed[1].replace("\\", "").split())
    assert all((ROOT / "tests" / file).is_file() for file in listed[1].replace("\\", "").split())


def test_every_command_has_a_function_with_a_documented_name() -> None:
    named = runpy.run_path(str(ROOT / "docs" / "commands.py"))["FUNCTIONS"]
    commands = {str(c.name) for c in app.registered_commands}
    for group in app.registered_groups:
        under = group.typer_instance.registered_commands if group.typer_instance else []
        commands |= {f"{group.name} {c.name}" for c in under}
    assert commands == named.keys()
    for name in named.values():
        module, _, attribute = name.rpartition(".")
        assert getattr(importlib.import_module(module), attribute) is not None


def test_the_scripts_of_the_tutorial_are_run_and_have_at_most_forty_lines() -> None:
    listed = re.search(r"for script in ([\w ]+);", (ROOT / "Makefile").read_text())
    page = (ROOT / "docs" / "tutorials" / "python.md").read_text()
    scripts = set(re.findall(r"\]\(\.\./\.\./examples/(\w+)\.py\)", page))
    assert listed is not None and scripts <= set(listed[1].split()) and len(scripts) > 4
    for name in scripts:
        assert len((ROOT / "examples" / f"{name}.py").read_text().splitlines()) <= 40, name


def test_the_readmes_picture_shows_what_explain_prints(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its other panes are of a run, whose last digits depend on the machine."""
    terminal = runpy.run_path(str(ROOT / "docs" / "terminal.py"))
    for name in ("digits.py", "digits.toml"):
        shutil.copy(ROOT / "examples" / name, tmp_path)
    runpy.run_path(str(tmp_path / "digits.py"), run_name="__main__")
    monkeypatch.chdir(tmp_path)
    env = {"COLUMNS": str(terminal["EXPLAIN_COLUMNS"])}
    done = CliRunner(env=env).invoke(app, shlex.split(terminal["EXPLAIN"])[1:])
    picture = re.sub("<[^>]+>", "", (ROOT / "docs" / "terminal.svg").read_text())
    shown = [html.unescape(line).rstrip() for line in picture.splitlines()]
    lines = terminal["explain_lines"](tidy(done.output))
    assert len(lines) > 15 and not set(lines) - set(shown), "draw it anew: make picture"


def test_every_cell_beside_other_tools_leads_to_a_source() -> None:
    page = (ROOT / "docs" / "other-tools.md").read_text()
    sources = dict(re.findall(r"^\[([\w-]+)\]: (https://github\.com/\S+)$", page, re.M))
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| ")]
    rows = [row for row in rows if row[0] != "| need"]
    assert len(rows) > 15 and {len(row) for row in rows} == {7}
    for cell in (cell.strip(" |") for row in rows for cell in row[1:]):
        named = re.findall(r"\]\[([\w-]+)\]", cell)
        assert named or re.search(r"\]\([^)]+\)", cell) or cell == "-", cell
        assert set(named) <= sources.keys(), cell
    lacking = {
        row[0].strip("| ").split()[0].strip(",") for row in rows if "_capabilities" in row[1]
    }
    table = runpy.run_path(str(ROOT / "docs" / "capabilities.py"))["CAPABILITIES"]
    assert lacking == lacking & {
        row.need.split()[0].strip(",") for row in table if row.answer == "no"
    }
    used = set(re.findall(r"\]\[([\w-]+)\]", page))
    assert used == sources.keys(), used ^ sources.keys()
    commits = re.compile("/blob/[0-9a-f]{40}/|/issues/")
    assert all(commits.search(address) for address in sources.values())


def test_the_gallery_is_of_its_results_and_its_scripts_are_run() -> None:
    gallery = runpy.run_path(str(ROOT / "docs" / "gallery.py"))
    results = json.loads(gallery["RESULTS"].read_text())
    page = (ROOT / "docs" / "gallery.md").read_text()
    assert page == gallery["page"](results), "run python docs/gallery.py"
    listed = re.search(r"for script in ([\w ]+);", (ROOT / "Makefile").read_text())
    assert listed is not None and len(results) > 3 and set(results) <= set(listed[1].split())
    for name, result in results.items():
        picture = (ROOT / "docs" / "gallery" / f"{name}.svg").read_text()
        assert picture == gallery["curve_picture"](result["curve"]), name
