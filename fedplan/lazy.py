# SPDX-License-Identifier: Apache-2.0
"""Lazy exports: a package's public names, each imported from its module on first use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_exports(
    package: str, names_by_module: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for a package that imports public names on first use.

    `names_by_module` maps a module, relative to the package, to its public names, separated by
    spaces. Names under "" are subpackages. The returned `__getattr__` imports the module and
    returns its attribute; it raises AttributeError for a name that is in no module's list.
    """
    module_of = {
        name: module for module, names in names_by_module.items() for name in names.split()
    }

    def get_attribute(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if not module_of[name]:
            return import_module(f"{package}.{name}")
        return getattr(import_module(f"{package}.{module_of[name]}"), name)

    def list_attributes() -> list[str]:
        return sorted({*vars(import_module(package)), *module_of})

    return get_attribute, list_attributes
