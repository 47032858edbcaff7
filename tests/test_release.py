# SPDX-License-Identifier: Apache-2.0
"""What a release is held to: versions that agree, a quick import, the same bytes each time, a site."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import os
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from pages import GLOSSARY, anchors

import fedplan
from fedplan.studies.section import SCHEMA_LINE, SITE_ADDRESS

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LARGE = {"cryptography", "flwr", "numpy", "pydantic", "ray", "torch", "transformers"}
"""What takes long to load: nothing of it is there before somebody asks for what needs it."""


def test_the_version_is_the_same_everywhere() -> None:
    cited = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.M)
    assert cited and cited[1] == fedplan.__version__
    changes = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(
        rf"^## {re.escape(fedplan.__version__)}( - \d{{4}}-\d\d-\d\d)?$", changes, re.M
    )


def test_the_site_has_one_address() -> None:
    urls = PROJECT["project"]["urls"]
    assert urls["Documentation"] == SITE_ADDRESS
    assert all(url.startswith(SITE_ADDRESS) for url in urls.values())


def test_links_of_the_readme_lead_to_the_site_on_a_package_index() -> None:
    hook = runpy.run_path(str(ROOT / "docs" / "index_readme.py"))
    text = hook["with_addresses"]((ROOT / "README.md").read_text(), SITE_ADDRESS)
    found = re.findall(r"\]\(([^)\s#]+)", text)
    assert f"{SITE_ADDRESS}/terminal.svg" in found and len(found) > 20
    for link in found:
        name = link.removeprefix(f"{SITE_ADDRESS}/").replace(".html", ".md")
        assert name != link and ((ROOT / "docs" / name).exists() or (ROOT / name).exists()), link


def test_the_citation_is_of_this_version() -> None:
    readme = (ROOT / "README.md").read_text()
    assert f"version = {{{fedplan.__version__}}}" in readme
    title = re.search(r'^title: "(.+)"$', (ROOT / "CITATION.cff").read_text(), re.M)
    assert title and f"title = {{{title[1]}}}" in readme


def test_a_shell_completes_the_commands() -> None:
    env = {**os.environ, "_FEDPLAN_COMPLETE": "complete_bash", "COMP_CWORD": "1"}
    code = "import sys; sys.argv[0] = 'fedplan'; from fedplan.cli import main; main()"
    words = [sys.executable, "-c", code]
    env["COMP_WORDS"] = "fedplan ex"
    done = subprocess.run(words, capture_output=True, text=True, env=env)
    assert {"explain", "export"} <= set(done.stdout.split())


@pytest.mark.parametrize("module", ["fedplan", "fedplan.cli"])
def test_an_import_is_quick_since_it_loads_nothing_large(module: str) -> None:
    """Seconds would be a promise about a machine. To read a plan takes Python's own library."""
    words = (
        f"import sys; before = set(sys.modules); import {module}; print(*set(sys.modules) - before)"
    )
    done = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in done.stdout.split()} - sys.stdlib_module_names
    assert not loaded & LARGE and "fedplan" in loaded
    assert module != "fedplan" or loaded == {"fedplan"}


def test_every_extra_is_tried_alone_and_told_in_the_readme() -> None:
    extras = set(PROJECT["project"]["optional-dependencies"]) - {"dev"}
    script, readme = (ROOT / ".ci" / "extras").read_text(), (ROOT / "README.md").read_text()
    imports = dict(re.findall(r'^  \[(\w+)\]="(.+)"$', script, re.M))
    assert set(imports) == extras | {"plain"}
    for module in re.findall(r"fedplan[\w.]*", " ".join(imports.values())):
        assert importlib.util.find_spec(module), f".ci/extras imports {module}, which is no module"
    listed = readme.partition("Extras: ")[2].partition(". ")[0]
    assert set(re.findall(r"`(\w+)`", listed)) == extras


def test_every_dependency_is_listed_with_its_versions_and_a_licence() -> None:
    page = (ROOT / "docs" / "versions.md").read_text()
    made = runpy.run_path(str(ROOT / "docs" / "versions.py"))["dependencies"]()
    rows = re.findall(r"^\| ([\w-]+) \| (\S[^|]*) \| ([a-z]*) ?\| (\S[^|]*) \|$", page, re.M)
    assert {name: (versions, extra) for name, versions, extra, _ in rows[1:]} == made, (
        "python docs/versions.py writes it anew"
    )


def test_workflows_name_what_is_there() -> None:
    text = "".join(p.read_text() for p in (ROOT / ".github" / "workflows").glob("*.yml"))
    for script in set(re.findall(r"\.ci/(\w+)", text)) - {"constraints"}:
        assert os.access(ROOT / ".ci" / script, os.X_OK), script
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M)
    assert set(re.findall(r"make (\w+)", text)) <= set(targets)


def test_the_site_has_every_page() -> None:
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    listed = set(re.findall(r"([\w/-]+\.md)$", nav, re.M))
    docs = ROOT / "docs"
    pages = {p.relative_to(docs).as_posix() for p in docs.rglob("*.md")}
    assert listed - {"AGENTS.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"} == pages


def test_terms_that_are_linked_stand_in_the_dictionary() -> None:
    source = ast.parse((ROOT / "docs" / "terms.py").read_text())
    terms = next(
        n.value
        for n in source.body
        if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "TERMS"
    )
    assert set(ast.literal_eval(terms).values()) <= anchors(GLOSSARY)


def test_the_site_is_built_without_a_warning_and_asks_nobody(tmp_path: Path) -> None:
    if importlib.util.find_spec("material") is None:
        pytest.skip("mkdocs-material is not installed: pip install 'fedplan[docs]'")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    for link in re.findall(r"\]\((\S+)\)", (tmp_path / "llms.txt").read_text()):
        assert (tmp_path / link).is_file(), link
    for kind in ("study", "site", "policy", "server"):
        address = SCHEMA_LINE.format(kind).partition(f"{SITE_ADDRESS}/")[2]
        assert (tmp_path / address).is_file(), address
    for page in tmp_path.rglob("*.html"):
        loaded = re.findall(
            r"<(?:script|img|link|iframe)\b[^>]*(?:src|href)=\"?(https?:[^\" >]+)", page.read_text()
        )
        assert not loaded, (page.name, loaded)


@pytest.mark.nightly
def test_wheel_and_sdist_have_the_same_bytes_each_time(tmp_path: Path) -> None:
    """Built from two copies, at other paths and other times of their files."""
    if importlib.util.find_spec("build") is None or importlib.util.find_spec("hatchling") is None:
        pytest.skip("build and hatchling are not installed")
    marks = list[dict[str, str]]()
    for name in ("one", "another"):
        place = tmp_path / name / "tree"
        wanted = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
        )
        for file in filter(None, wanted.stdout.split("\0")):
            (place / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / file, place / file)
        out = tmp_path / name / "dist"
        words = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(place)]
        env = {**os.environ, "SOURCE_DATE_EPOCH": "1767225600"}
        subprocess.run(words, env=env, check=True, capture_output=True)
        marks.append({p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in out.iterdir()})
    assert marks[0] == marks[1] and len(marks[0]) == 2
