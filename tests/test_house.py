# SPDX-License-Identifier: Apache-2.0
"""Rules of the house, read from the package's own source."""

from __future__ import annotations

import ast
import importlib
import statistics
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import fedplan

PACKAGE = Path(fedplan.__file__).parent
FILES = sorted(p for p in PACKAGE.rglob("*.py") if "templates" not in p.parts)
FACES = [f for f in FILES if f.name == "__init__.py" and f.parent != PACKAGE]

# Imports flow one way: each package, or module of the root, may use those that stand before it.
ORDER = (
    *("errors", "seeds", "lazy", "reader", "naming"),
    *("tensors", "storage", "models", "language", "data", "training", "methods", "privacy"),
    *("secagg", "federation", "studies", "runners", "audits", "reports", "sites", "sweeps"),
    *("run", "__init__", "parts", "testing", "cli"),
)
APART = {("privacy", "methods")}
"""Neither of these two imports the other: a method is no promise, and a promise no method."""
UNSAFE_NAMES = {"eval", "exec", "compile", "__import__", "hasattr"}
UNSAFE_MODULES = {"pickle", "dill", "cloudpickle", "marshal", "shelve", "random", "yaml"}
ALLOWED_MODULES = {"training.restoring": {"random"}}
"""It seeds Python's generator around a user's loop, and restores it; nothing of fedplan draws from it."""
UNSAFE_ARGUMENTS = {"trust_remote_code", "allow_pickle", "shell"}
VAGUE = {"utils", "util", "helpers", "common", "misc", "base"}
WITHOUT_TORCH = (
    *("fedplan", "fedplan.parts", "fedplan.cli", "fedplan.tensors.message", "fedplan.models"),
    *("fedplan.models.catalog", "fedplan.models.layer_maps", "fedplan.language.resolution"),
    *(
        "fedplan.language.parser",
        "fedplan.federation.ledger.faults",
        "fedplan.federation.wire_cost",
    ),
    *("fedplan.reports.explanation", "fedplan.reports.status", "fedplan.runners.flower"),
    *("fedplan.runners.site", "fedplan.studies.section", "fedplan.studies.run_scores"),
)


def name_of(file: Path) -> str:
    """A module's name within the house, without `fedplan.`."""
    parts = file.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def room(module: str) -> str:
    """The package of a module, or itself if it stands in the root."""
    return module.split(".")[0]


@cache
def imported(file: Path) -> list[tuple[str, str]]:
    """What a module imports of the house: from which module, and by which name."""
    return list(_imported(file))


def _imported(file: Path) -> Iterator[tuple[str, str]]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "fedplan":
                    yield alias.name.removeprefix("fedplan").lstrip(".") or "__init__", ""
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "fedplan":
            module = (node.module or "").removeprefix("fedplan").lstrip(".")
            for alias in node.names:
                below = f"{module}.{alias.name}".lstrip(".")
                place = PACKAGE.joinpath(*below.split("."))
                if place.is_dir() or place.with_suffix(".py").is_file():
                    yield below, ""  # a module, of which anything may be used
                else:
                    yield module or "__init__", alias.name


def shown(package: str) -> set[str]:
    """The names that the stub of a package lists, for users and for other packages."""
    stub = PACKAGE.joinpath(*package.split("."), "__init__.pyi")
    if not stub.exists():
        return set(importlib.import_module(f"fedplan.{package}").__all__)
    nodes = ast.parse(stub.read_text()).body
    return {a.name for node in nodes if isinstance(node, ast.ImportFrom) for a in node.names}


def test_every_module_has_its_place() -> None:
    assert {room(name_of(file)) for file in FILES} == set(ORDER)
    assert not VAGUE & {part for file in FILES for part in name_of(file).split(".")}


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_imports_flow_one_way(file: Path) -> None:
    own = room(name_of(file))
    before = set(ORDER[: ORDER.index(own)])
    before -= {other for pair in APART if own in pair for other in pair}
    for module, name in imported(file):
        assert room(module) in before | {own}, (module, name)


def test_flower_and_the_worker_import_no_runner_above_them() -> None:
    """Subpackages stand by themselves: nothing of a runner but its own folder imports Flower's."""
    for file in FILES:
        if name_of(file).startswith("runners.") and not name_of(file).startswith("runners.flower"):
            assert not any(m.startswith("runners.flower") for m, _ in imported(file)), file


@pytest.mark.parametrize("package", [p for p in ORDER if (PACKAGE / p).is_dir()])
def test_others_import_what_the_face_of_a_package_lists(package: str) -> None:
    used = {
        name
        for file in FILES
        if room(name_of(file)) != package
        for module, name in imported(file)
        if room(module) == package and name != "*"
    }
    assert used - {""} <= shown(package), "list the name in the package's __init__.pyi"
    assert not any(name.startswith("_") for name in used)


@pytest.mark.parametrize("file", FACES, ids=name_of)
def test_a_face_is_one_sentence_and_names_that_exist(file: Path) -> None:
    doc = ast.get_docstring(ast.parse(file.read_text())) or ""
    assert len(doc.splitlines()) == 1 and doc.endswith("."), doc
    package = importlib.import_module(f"fedplan.{name_of(file)}")
    assert set(getattr(package, "__all__", ())) <= set(dir(package))
    for name in shown(name_of(file)) if file.with_suffix(".pyi").exists() else ():
        assert getattr(package, name) is not None, name
        place = file.parent / name
        is_module = isinstance(getattr(package, name), type(fedplan))
        hidden = place.is_dir() or place.with_suffix(".py").exists()
        assert is_module == hidden, f"a module hides {name}, once it is imported"


def test_no_two_public_classes_have_one_name() -> None:
    seen = dict[str, Path]()
    for file in FILES:
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                assert node.name not in seen, (node.name, file, seen[node.name])
                seen[node.name] = file


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_these_import_no_torch(module: str) -> None:
    said = f"import {module}, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", said], check=True)


@pytest.mark.parametrize(("package", "place"), [("flwr", "flower"), ("ray", "ray_actors.py")])
def test_flower_stays_in_one_folder_and_ray_in_one_module(package: str, place: str) -> None:
    for file in FILES:
        names = {
            name.split(".")[0]
            for node in ast.walk(ast.parse(file.read_text()))
            for name in (
                [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else []
            )
        }
        assert place in file.parts or package not in names, file


def test_modules_are_small() -> None:
    lines = {str(file): len(file.read_text().splitlines()) for file in FILES}
    assert statistics.median(lines.values()) < 250, lines
    assert max(lines.values()) < 500, lines


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_nothing_unsafe_is_called(file: Path) -> None:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in UNSAFE_NAMES, node.lineno
        if isinstance(node, ast.Import):
            unsafe = UNSAFE_MODULES - ALLOWED_MODULES.get(name_of(file), set())
            assert not {alias.name for alias in node.names} & unsafe, node.lineno
        if isinstance(node, ast.ImportFrom):
            assert node.module not in UNSAFE_MODULES, node.lineno
        if isinstance(node, ast.keyword) and node.arg in UNSAFE_ARGUMENTS:
            assert isinstance(node.value, ast.Constant) and node.value.value is False, node.lineno


def test_weights_and_tokenizers_are_loaded_in_one_place() -> None:
    """What may be looked up, and that no code beside weights is run, is said there."""
    calls = {
        (name_of(file), ast.unparse(node.func.value))
        for file in FILES
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if node.func.attr == "from_pretrained"
    }
    # peft's configuration is a file of JSON in a folder that is there.
    assert calls == {("models.catalog", "loader"), ("models.adapters", "peft.PeftConfig")}


def test_every_public_name_is_documented() -> None:
    for name in fedplan.__all__:
        assert getattr(fedplan, name).__doc__, name


def test_every_kind_and_call_of_the_language_has_a_word() -> None:
    from fedplan.language import parts
    from fedplan.models import Kind

    # What no anatomy explains has a kind, and no word: no plan can mean it.
    assert set(Kind) - {Kind.UNKNOWN} <= set(parts.WORDS)
    assert Kind.UNKNOWN not in parts.WORDS
    for word in parts.WORDS:
        assert getattr(parts, word) == parts.Word(word)
