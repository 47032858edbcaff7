# SPDX-License-Identifier: Apache-2.0
"""Rules of the house, read from the package's own source."""

from __future__ import annotations

import ast
import statistics
from pathlib import Path

import pytest

import fedplan

PACKAGE = Path(fedplan.__file__).parent
MODULES = {p.stem: [p] for p in PACKAGE.glob("*.py") if p.stem != "__init__"}
MODULES |= {p.parent.name: sorted(p.parent.glob("*.py")) for p in PACKAGE.glob("*/**/__init__.py")}
FILES = [file for files in MODULES.values() for file in files]

# Imports flow one way: each module, or folder of them, may use those that stand before it.
ORDER = (
    *("errors", "hub", "names", "codes", "plain", "parcel", "errands", "params", "anatomy"),
    *("teaching", "architectures", "adapters", "description"),
    *("predicates", "parts", "turn", "plan", "horizon", "resolution", "text", "state", "buffers"),
    *("manifest", "catalog", "crowds", "views", "forecast", "explanation", "pictures"),
    *("streams", "failpoints", "message", "codecs", "wire", "sums"),
    *("locks", "files", "identity", "seals", "faults", "generations", "store", "journal"),
    *(
        "serve",
        "drift",
        "phases",
        "fit",
        "attention",
        "hearing",
        "stimulus",
        "behaviour",
        "proposal",
        "probe",
        "tables",
        "content",
        "examples",
        "models",
        "method",
        "methods",
        "privacy",
        "ledger",
        "marks",
        "record",
        "agreement",
        "exchange",
        "claims",
        "mail",
        "account",
        "outgoing",
        "site",
        "desk",
        "rounds",
        "attendance",
        "remains",
        "server",
        "verification",
        "runners",
    ),
    *("data", "evaluation", "tokens", "tasks", "foresight", "config", "loading", "shares"),
    *("testing", "studies", "continuation", "trainer", "flower", "keys", "starter"),
    "attacks",
    *("archive", "audit", "auditor", "export", "progress", "cli"),
)
UNSAFE_NAMES = {"eval", "exec", "compile", "__import__", "hasattr"}
UNSAFE_MODULES = {"pickle", "dill", "cloudpickle", "marshal", "shelve", "random", "yaml"}
UNSAFE_ARGUMENTS = {"trust_remote_code", "allow_pickle", "shell"}
VAGUE = {"utils", "util", "helpers", "common", "misc", "base"}


def imported(module: Path) -> set[str]:
    """The package's own modules that a module imports."""
    found = set[str]()
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "fedplan":
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fedplan."):
            found.add(node.module.split(".")[1])
    return found


def test_every_module_has_its_place() -> None:
    assert sorted(ORDER) == sorted(MODULES)
    assert not VAGUE & set(MODULES)


@pytest.mark.parametrize("name", ORDER)
def test_imports_flow_one_way(name: str) -> None:
    before = set(ORDER[: ORDER.index(name)])
    for file in MODULES[name]:
        assert imported(file) - {name} <= before


def test_flower_stays_in_one_folder() -> None:
    for file in FILES:
        names = {
            n.module or ""
            for n in ast.walk(ast.parse(file.read_text()))
            if isinstance(n, ast.ImportFrom)
        }
        assert "flower" in file.parts or not any(n.split(".")[0] == "flwr" for n in names), file


def test_modules_are_small() -> None:
    lines = {str(file): len(file.read_text().splitlines()) for file in FILES}
    assert statistics.median(lines.values()) < 200, lines
    assert max(lines.values()) < 400, lines


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_nothing_unsafe_is_called(file: Path) -> None:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in UNSAFE_NAMES, node.lineno
        if isinstance(node, ast.Import):
            assert not {alias.name for alias in node.names} & UNSAFE_MODULES, node.lineno
        if isinstance(node, ast.ImportFrom):
            assert node.module not in UNSAFE_MODULES, node.lineno
        if isinstance(node, ast.keyword) and node.arg in UNSAFE_ARGUMENTS:
            assert isinstance(node.value, ast.Constant) and node.value.value is False, node.lineno


def test_every_public_name_is_documented() -> None:
    for name in fedplan.__all__:
        assert getattr(fedplan, name).__doc__, name


def test_every_kind_and_call_of_the_language_has_a_word() -> None:
    from fedplan import parts
    from fedplan.params import Kind

    # What no anatomy explains has a kind, and no word: no plan can mean it.
    assert set(Kind) - {Kind.UNKNOWN} <= set(parts.WORDS)
    assert Kind.UNKNOWN not in parts.WORDS
    for word in parts.WORDS:
        assert getattr(parts, word) == parts.Word(word)
