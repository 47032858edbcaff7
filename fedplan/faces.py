# SPDX-License-Identifier: Apache-2.0
"""Faces: what a package shows of its modules, each imported when it is first asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def face(
    package: str, shown: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """A package's `__getattr__` and `__dir__`: of each module, the names that it shows.

    Under no module's name stand subpackages that are shown themselves.
    To read a plan takes no torch, so no face may import all that stands behind it.
    """
    places = {name: module for module, names in shown.items() for name in names.split()}

    def find(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if not places[name]:
            return import_module(f"{package}.{name}")
        return getattr(import_module(f"{package}.{places[name]}"), name)

    def names() -> list[str]:
        return sorted({*vars(import_module(package)), *places})

    return find, names
