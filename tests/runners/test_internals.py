# SPDX-License-Identifier: Apache-2.0
"""Names of Flower outside its public API are imported in one module, and this version has them.

`python tests/runners/test_internals.py FOLDER` lists what the flwr unpacked in FOLDER lacks.
"""

from __future__ import annotations

import ast
import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "fedplan" / "runners" / "flower"
INTERNALS = FOLDER / "_internals.py"
PUBLIC = ("flwr.app", "flwr.clientapp", "flwr.serverapp", "flwr.serverapp.strategy")


def imports(file: Path) -> Iterator[tuple[str, str, str]]:
    """The names of Flower that a module imports: from where, and what its line says of it."""
    lines = file.read_text().splitlines()
    for node in ast.walk(ast.parse("\n".join(lines))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "flwr":
            for alias in node.names:
                yield node.module or "", alias.name, lines[alias.lineno - 1].partition("  # ")[2]


def attributes() -> dict[str, str]:
    (table,) = (
        node.value
        for node in ast.parse(INTERNALS.read_text()).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "ATTRIBUTES"
    )
    return ast.literal_eval(table)


def has(owner: Any, name: str) -> bool:
    """Whether there is an attribute, of the class or set by its constructor."""
    made = getattr(getattr(owner, "__init__", None), "__code__", None)
    return name in {*dir(owner), *dir(type(owner))} or (made is not None and name in made.co_names)


def missing() -> list[str]:
    """What the installed Flower lacks of the names and attributes, each with its purpose."""
    found, lacks = dict[str, Any](), list[str]()
    for module, name, purpose in imports(INTERNALS):
        try:
            found[name] = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            lacks.append(f"{module}.{name} ({purpose}): {error}")
    for path, purpose in attributes().items():
        owner, _, name = path.rpartition(".")
        if owner.startswith("flwr."):
            try:
                found[owner] = importlib.import_module(owner)
            except ImportError as error:
                lacks.append(f"{owner} ({purpose}): {error}")
        if owner in found and not has(found[owner], name):
            lacks.append(f"{path} ({purpose})")
    source = "".join(p.read_text() for p in flower_programs())
    for module in ("superlink", "supernode"):
        for option in re.findall(r'"(--[a-z-]+)"', (FOLDER / f"{module}.py").read_text()):
            if f'"{option}"' not in source:
                lacks.append(f"{option} (option of flower-{module})")
    return lacks


def flower_programs() -> list[Path]:
    """The modules of Flower that define the options of its programs."""
    import flwr

    place = Path(flwr.__file__).parent
    return [p for p in place.rglob("*.py") if "add_argument" in p.read_text(encoding="utf-8")]


def test_this_flower_has_all_that_is_used() -> None:
    assert missing() == []


def test_every_internal_name_has_a_purpose() -> None:
    names = list(imports(INTERNALS))
    assert len(names) > 35
    assert [name for _, name, purpose in names if len(purpose) < 8] == []
    known = {name for _, name, _ in names}
    for path in attributes():
        assert path.startswith("flwr.") or path.split(".")[0] in known, path


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.py")), ids=lambda file: file.stem)
def test_other_modules_import_the_public_api_alone(file: Path) -> None:
    if file != INTERNALS:
        assert {module for module, _, _ in imports(file)} <= set(PUBLIC)
        assert not re.search(r'import_module\("flwr', file.read_text())


if __name__ == "__main__":
    sys.path.insert(0, sys.argv[1])
    sys.stdout.write("\n".join(missing() or ["nothing is missing"]) + "\n")
