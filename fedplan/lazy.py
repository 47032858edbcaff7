# SPDX-License-Identifier: Apache-2.0
"""Lazy packages: the names in a package's stub `__init__.pyi`, each imported on first use."""

from __future__ import annotations

import ast
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def attach_stub(
    package: str, file: str
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` for the package with this `__init__.py` file.

    The names are those that the stub beside `file` imports by `from .module import name`. The
    returned `__getattr__` raises AttributeError for any other name.
    """
    module_of = {
        alias.name: f".{node.module}" if node.module else ""
        for node in ast.parse(Path(file).with_suffix(".pyi").read_text(encoding="utf-8")).body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }

    def get_attribute(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if not module_of[name]:
            return import_module(f"{package}.{name}")
        return getattr(import_module(package + module_of[name]), name)

    return get_attribute, lambda: sorted(module_of), sorted(module_of)
