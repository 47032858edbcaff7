# SPDX-License-Identifier: Apache-2.0
"""Names say the thing: no vague bindings, one name for one thing, one meaning for one name."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import fedplan

PACKAGE = Path(fedplan.__file__).parent
FILES = sorted(p for p in PACKAGE.rglob("*.py") if "templates" not in p.parts)
VAGUE = set(
    [
        "said",
        "found",
        "told",
        "held",
        "made",
        "asked",
        "known",
        "kept",
        "came",
        "stood",
        "meant",
        "heard",
        "wanted",
    ]
)
"""Participles that name what happened to a value and not the value."""
DIALECT = set(
    [
        "world",
        "worlds",
        "home",
        "homes",
        "hand",
        "hands",
        "crew",
        "crews",
        "rider",
        "riders",
        "errand",
        "seat",
        "parcel",
        "anew",
        "vain",
        "pace",
        "fare",
        "docket",
        "remains",
        "acquaintance",
        "carriage",
        "desk",
        "crowd",
        "crowds",
    ]
)
"""Words that had several meanings here, or none that a newcomer could guess."""
FIELD_WORDS = {"personal_home"}
"""Names with a dialect word that another project defines."""


def bindings(tree: ast.AST) -> Iterator[str]:
    """Every name that a module binds: definitions, arguments, variables and attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def words_in(name: str) -> list[str]:
    """The words of an identifier: `read_Ledger` and `readLedger` are read and ledger."""
    return re.findall(r"[a-z]+", re.sub(r"([A-Z])", r"_\1", name).lower())


TREES = {file: ast.parse(file.read_text()) for file in FILES}


def test_fewer_than_one_binding_in_two_hundred_is_vague() -> None:
    names = [name for tree in TREES.values() for name in bindings(tree)]
    vague = Counter(name for name in names if name.strip("_") in VAGUE)
    assert vague.total() < len(names) / 200, vague.most_common(20)


def test_no_public_name_is_defined_in_two_modules() -> None:
    modules = defaultdict[str, list[str]](list)
    for file, tree in TREES.items():
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                modules[node.name].append(str(file.relative_to(PACKAGE)))
    assert {name: files for name, files in modules.items() if len(files) > 1} == {}


def test_no_name_uses_a_word_of_several_meanings() -> None:
    used = {
        (str(file.relative_to(PACKAGE)), name)
        for file, tree in TREES.items()
        for name in bindings(tree)
        if DIALECT & set(words_in(name)) and name not in FIELD_WORDS
    }
    modules = {str(f) for f in FILES if DIALECT & set(words_in(f.stem))}
    assert not used and not modules, (sorted(used)[:40], modules)
