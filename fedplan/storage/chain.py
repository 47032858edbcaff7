# SPDX-License-Identifier: Apache-2.0
"""Chains: files of JSON lines that only grow, each line with its time and the digest of the one
before.

A line that was edited, removed, inserted or put elsewhere breaks the chain. A chain that ends too
early is whole in itself: a head beside the file says how far it went. Who can write both files can
write another chain. What tells then is a head that somebody else has heard.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, cast

from fedplan.errors import FedplanError, StoreError
from fedplan.storage.errors import explained
from fedplan.storage.files import put_file
from fedplan.storage.locks import sole

NOTHING = "0" * 64
"""What the first line has for the digest of the one before."""
WAIT = 60.0
"""Seconds that a writer waits for another."""


class BrokenChain(FedplanError):
    """Lines that do not follow from each other, or a file that is shorter than it once was."""

    code = "disk"
    exit = 1


@dataclass(frozen=True)
class Head:
    """How far a chain goes: its lines, their bytes, and the size and digest of the last."""

    lines: int = 0
    length: int = 0
    last: int = 0
    sha256: str = NOTHING

    def after(self, line: bytes) -> Head:
        """The head with one more line."""
        size = len(line)
        return Head(self.lines + 1, self.length + size, size, hashlib.sha256(line).hexdigest())

    @property
    def text(self) -> str:
        """It as its file has it."""
        return json.dumps(asdict(self), sort_keys=True) + "\n"


class ChainFile:
    """A chain of a file. Several processes may append to it."""

    def __init__(self, file: Path) -> None:
        self.file = file

    @property
    def head(self) -> Head:
        """How far it goes, as the file beside it says."""
        return read_head(self.file)

    def append(self, line: Mapping[str, Any]) -> dict[str, Any]:
        """Add a line for good, with the time and the digest of the line before.

        What a kill has cut off never counted: it is taken away. To a chain that does not end as its
        head says nothing is added.
        """
        remedy = "make room or mend the disk, then go on"
        with explained(f"{self.file} cannot be written", remedy), _opened(self.file) as out:
            head = _end(self.file, out)
            said = {**line, "time": _now(), "before": head.sha256}
            content = json.dumps(said, sort_keys=True).encode() + b"\n"
            if head != self.head:  # of the line that a kill left: so there is never a second
                put_file(head_file(self.file), head.text, mode=0o600)
            _write(out, head.length, content)
            try:
                put_file(head_file(self.file), head.after(content).text, mode=0o600)
            except (OSError, StoreError):
                out.truncate(head.length)  # a disk that is full now has room again later
                raise
        return said


def read_chain(file: Path) -> list[dict[str, Any]]:
    """The lines of a chain, proved; an error says where it is broken.

    A line that a kill cut off is not among them. Of a file that is not there there are none, unless
    its head is.
    """
    # The head first: a line that is written meanwhile is then one more, and not one too few.
    said = read_head(file)
    content = file.read_bytes() if file.exists() else b""
    lines = content[: content.rfind(b"\n") + 1].splitlines(keepends=True)
    head, found, told = Head(), list[dict[str, Any]](), not said.lines
    for line in lines:
        found.append(_follows(file, head, line))
        head = head.after(line)
        told |= head == said
    if not told:
        raise _short(file, said, len(lines))
    _require_near(file, said, head)
    return found


def read_head(file: Path) -> Head:
    """The head of a chain; of one that has not begun there is none on the disk."""
    beside = head_file(file)
    if not beside.exists():
        return Head()
    text = beside.read_text(encoding="utf-8", errors="replace")
    try:
        found = Head(**json.loads(text))
    except (ValueError, TypeError, RecursionError) as error:
        raise BrokenChain(f"{beside} is no head of a chain: put a copy of it back") from error
    if found.text != text:
        raise BrokenChain(f"{beside} was changed: put a copy of it back")
    return found


def head_file(file: Path) -> Path:
    """The file beside a chain that says how far it goes."""
    return file.with_name(f"{file.name}.head")


@contextmanager
def _opened(file: Path) -> Generator[BinaryIO]:
    with sole(file, wait=WAIT) as opened, os.fdopen(os.dup(opened), "r+b") as out:
        yield out


def _end(file: Path, out: BinaryIO) -> Head:
    """Where the next line goes: after the head, and after a line that a kill left without one."""
    head = read_head(file)
    out.seek(head.length - head.last)
    last = out.read(head.last)
    if head.lines and (len(last) < head.last or hashlib.sha256(last).hexdigest() != head.sha256):
        raise _short(file, head)
    content = out.read()
    end = head
    for line in content[: content.rfind(b"\n") + 1].splitlines(keepends=True):
        _follows(file, end, line)
        end = end.after(line)
    _require_near(file, head, end)
    return end


def _require_near(file: Path, said: Head, found: Head) -> None:
    """A kill leaves one line at most of which the head does not know."""
    if found.lines > said.lines + 1:
        raise BrokenChain(
            f"{file} has {found.lines} lines, and {head_file(file).name} knows of {said.lines}: "
            "lines were added by another hand, or the head is of an older copy; put both back"
        )


def _follows(file: Path, head: Head, line: bytes) -> dict[str, Any]:
    """A line as values, if it follows from the head."""
    number = head.lines + 1
    try:
        said = json.loads(line)
    except (ValueError, RecursionError):
        said = None
    if not isinstance(said, dict):
        raise BrokenChain(f"{file} is broken at line {number}, which was edited: put a copy back")
    found = cast("dict[str, Any]", said)
    if found.get("before") != head.sha256:
        raise BrokenChain(
            f"{file} is broken at line {number}, which does not follow the line before: one of "
            "them was edited, or lines were removed, inserted or put in another order; put a copy "
            "of it back"
        )
    return found


def _short(file: Path, head: Head, lines: int | None = None) -> BrokenChain:
    have = "" if lines is None else f" has {lines} whole lines and"
    return BrokenChain(
        f"{file}{have} does not hold line {head.lines} as {head_file(file).name} knows it: the "
        "last lines were removed or edited; put a copy of both back"
    )


def _write(out: BinaryIO, place: int, content: bytes) -> None:
    out.seek(place)
    out.truncate()
    out.write(content)
    out.flush()
    os.fsync(out.fileno())


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
