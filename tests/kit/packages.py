# SPDX-License-Identifier: Apache-2.0
"""Packages for tests: written into a folder as an installer would, found by import and by name."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

METHOD = """
from fedplan.language.plan import share
from fedplan.methods.method import Method
from fedplan.methods.server_optimizer import mean


def mine(strength: float = 0.5) -> Method:
    '''Mine: all share, and the server goes a part of the way.'''
    return Method(share(), server_optimizer=mean(_rate(strength)))


def _rate(strength: float) -> float:
    return strength
"""


def install(
    folder: Path,
    name: str,
    code: str,
    points: Mapping[str, Mapping[str, str]] | None = None,
    version: str = "1.2",
) -> None:
    """Lay a package out in a folder of `sys.path`: a module `mine`, and what it offers."""
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").touch()
    (folder / name / "mine.py").write_text(code)
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = [
        line
        for group, offered in (points or {}).items()
        for line in (f"[{group}]", *(f"{word} = {place}" for word, place in offered.items()))
    ]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    importlib.invalidate_caches()


def forget(*names: str) -> None:
    """Have packages be imported anew, as in another process."""
    for module in [m for m in sys.modules if m.partition(".")[0] in names]:
        del sys.modules[module]
    importlib.invalidate_caches()


def on_path(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Path:
    """A folder that modules and packages are found in until the test ends."""
    folder.mkdir(exist_ok=True)
    monkeypatch.syspath_prepend(str(folder))
    return folder
