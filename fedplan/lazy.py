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

    The stub beside `file` imports names by `from .module import name`; its `__all__`, by default
    all of these, is for users. The returned `__getattr__` raises AttributeError for other names.
    """
    stub = ast.parse(Path(file).with_suffix(".pyi").read_text(encoding="utf-8"))
    module_of = {
        alias.name: f".{node.module}" if node.module else ""
        for node in stub.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    listed = [ast.literal_eval(node.value) for node in stub.body if isinstance(node, ast.Assign)]
    public: list[str] = listed[0] if listed else sorted(module_of)

    def get_attribute(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if not module_of[name]:
            return import_module(f"{package}.{name}")
        return getattr(import_module(package + module_of[name]), name)

    return get_attribute, lambda: sorted(public), public
