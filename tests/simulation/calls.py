# SPDX-License-Identifier: Apache-2.0
"""Storage calls of product code: each is a failpoint, where a process may die or a disk may fail.

A failpoint is named by its function and call, as `storage/files.py:write_atomic fsync`. Named are
also calls of the functions in WRITERS, so that each user of them is a failpoint of its own.
"""

from __future__ import annotations

import ast
import builtins
import errno
import io
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from power import PowerDisk

import fedplan
from fedplan.storage import store

PACKAGE = f"{Path(fedplan.__file__).parent}/"
TESTS, OUTSIDE = str(Path(__file__).parents[1]), "tests"
"""Code of tests calls for itself, whichever product code waits for it."""
WRITERS = {
    *("write_atomic", "write_if_changed", "write_folder", "make_folder", "sync_folder"),
    *("open_exclusively", "load_or_create_secret", "_write_from"),
}
"""Functions that write for their callers."""
SCOPE = ("storage", "federation", "secagg", "privacy", "sites/gateway.py", "sites/approvals.py")
"""Files of the package whose storage calls are failpoints."""
ERRORS = {"EIO": errno.EIO, "ENOSPC": errno.ENOSPC}
READ = "read"
"""The call that opens a file for reading: a disk that is full does not fail there."""


class Killed(BaseException):
    """The process that is running dies now."""


@dataclass
class Process:
    """The storage calls of a simulated process, and the one that fails.

    `act`: "kill", or a key of ERRORS. It happens at the storage call with the number `at`, or at
    the call of this number among those of the failpoint `point`. `happened`: the failpoint of it.
    `lasting`: a disk that stays full, so that every call fails but those that read.
    """

    act: str = ""
    at: int = 0
    point: str = ""
    count: int = 0
    happened: str = ""
    lasting: bool = False
    dead: bool = False

    def call(self, point: str, name: object) -> None:
        """Count a storage call; raise Killed or OSError if it is the chosen one."""
        if self.dead:
            raise Killed  # nothing of a dead process reaches the disk
        if not self.act or self.point not in ("", point):
            return
        self.count += 1
        if (self.happened or self.count < self.at) and not self.lasting:
            return
        if self.act == "ENOSPC" and point.rpartition(" ")[2] in (READ, "unlink", "rmtree"):
            return
        self.happened = point
        if self.act == "kill":
            self.die(point)
        raise OSError(ERRORS[self.act], os.strerror(ERRORS[self.act]), str(name))

    def die(self, point: str) -> None:
        """Let the process die at a failpoint."""
        self.happened, self.dead = point, True
        raise Killed


@dataclass
class Calls:
    """All storage calls while `patched`: `reached` has their failpoints, `process` who calls."""

    disk: PowerDisk
    reached: set[str] = field(default_factory=set[str])
    process: Process = field(default_factory=Process)

    @contextmanager
    def running(self, process: Process) -> Iterator[None]:
        """Let a process make the calls of the body."""
        outer, self.process = self.process, process
        try:
            yield
        finally:
            self.process = outer

    def note(self, call: str, name: object) -> None:
        """Take up a storage call, unless it is not one of product code."""
        frame, point, places = sys._getframe(2), "", _places
        while frame is not None:
            code = frame.f_code
            if (place := places.get(id(code))) is None:
                place = places[id(code)] = _place(code)
            if place == OUTSIDE:
                break
            if place:
                if point and call not in WRITERS:
                    break
                here = f"{place} {call}"
                self.reached.add(here)
                point, call = point or here, code.co_name
            frame = frame.f_back
        if point:
            self.process.call(point, name)

    @contextmanager
    def patched(self) -> Iterator[None]:
        """Let the calls of the body be seen."""

        def seen(call: str, function: Callable[..., Any], place: int = 0) -> Callable[..., Any]:
            def made(*arguments: Any, **options: Any) -> Any:
                self.note(call, arguments[place])
                return function(*arguments, **options)

            return made

        def opened(file: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
            if not isinstance(file, int):
                self.note("open" if set(mode) & set("wax+") else READ, file)
            return plain_open(file, mode, *arguments, **options)

        plain_open = open
        with pytest.MonkeyPatch.context() as patch:
            for name in (
                "rename",
                "replace",
                "unlink",
                "mkdir",
                "truncate",
                "link",
                "write",
                "open",
            ):
                patch.setattr(os, name, seen(name, getattr(os, name)))
            patch.setattr(os, "fsync", seen("fsync", self.disk.sync))
            patch.setattr(store, "save_file", seen("save_file", store.save_file, 1))
            patch.setattr(shutil, "rmtree", seen("rmtree", partial(_remove, shutil.rmtree)))
            patch.setattr(io, "open", opened)
            patch.setattr(builtins, "open", opened)
            yield


def _remove(function: Callable[..., None], *arguments: Any, **options: Any) -> None:
    """Remove a folder as one call: those in it have this function between them and the product."""
    function(*arguments, **options)


_places = dict[int, str]()


def _place(code: Any) -> str:
    """Return `folder/file.py:function` of code of the package, OUTSIDE for tests, else ""."""
    file = code.co_filename
    if file.startswith(PACKAGE):
        name = re.sub(r"\.<\w+>", "", code.co_qualname)
        return f"{file.removeprefix(PACKAGE)}:{name}"
    return OUTSIDE if file.startswith(TESTS) else ""


DIRECT = {
    **dict.fromkeys(("touch", "mkstemp", "write_bytes", "write_text"), "open"),
    **dict.fromkeys(("read_bytes", "read_text"), READ),
    **{name: name for name in ("fsync", "rename", "unlink", "mkdir", "truncate", "link", "rmtree")},
    "save_file": "save_file",
}
"""Names of functions and methods that call the storage, with their calls."""


@cache
def failpoints() -> tuple[str, ...]:
    """Return all failpoints of the package's files in SCOPE, found in their source."""
    found = set[str]()
    for part in SCOPE:
        place = Path(PACKAGE, part)
        for file in [place] if place.is_file() else sorted(place.rglob("*.py")):
            tree, name = ast.parse(file.read_text()), str(file).removeprefix(PACKAGE)
            found.update(f"{name}:{point}" for point in _points(tree, ""))
    return tuple(sorted(found))


def _points(node: ast.AST, function: str) -> Iterator[str]:
    """Yield `function call` for each storage call below a node of a source's tree."""
    for child in ast.iter_child_nodes(node):
        inner = function
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            inner = f"{function}.{child.name}".removeprefix(".")
        elif isinstance(child, ast.Call) and (call := _call(child)) and function:
            yield f"{function} {call}"
        yield from _points(child, inner)


def _call(node: ast.Call) -> str:
    """Return the storage call that a call in a source makes; "" if none."""
    function, arguments = node.func, node.args
    if isinstance(function, ast.Name):
        if function.id == "open":
            return _opening(arguments[1:])
        return function.id if function.id in WRITERS else DIRECT.get(function.id, "")
    if not isinstance(function, ast.Attribute):
        return ""
    of_os = isinstance(function.value, ast.Name) and function.value.id == "os"
    if function.attr == "open":
        return "open" if of_os else _opening(arguments)
    if function.attr == "replace":  # that of texts has two arguments
        return "replace" if len(arguments) == 1 + of_os and not node.keywords else ""
    if function.attr in ("truncate", "write"):
        return function.attr if of_os else ""
    return DIRECT.get(function.attr, "")


def _opening(arguments: list[ast.expr]) -> str:
    mode = arguments[0] if arguments else None
    text = str(mode.value) if isinstance(mode, ast.Constant) else "r"
    return "open" if set(text) & set("wax+") else READ
