# SPDX-License-Identifier: Apache-2.0
"""Hash chains: append-only JSON lines, each with its time and the digest of the line before.

A line that was edited, removed, inserted or moved breaks the chain. Removal of the last lines is
detected by a head file beside the chain, which holds its length and last digest. Somebody who can
write both files can forge the chain; only a head that was sent elsewhere before reveals that.
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
from fedplan.storage.errors import wrap_disk_errors
from fedplan.storage.files import write_atomic
from fedplan.storage.locks import open_exclusively

GENESIS_DIGEST = "0" * 64
"""Digest of the line before in the first line."""
LOCK_TIMEOUT = 60.0
"""Seconds that a writer waits for another."""


class BrokenChain(FedplanError):
    """Lines do not follow from each other, or the file is shorter than its head says."""

    code = "disk"
    exit_code = 1


@dataclass(frozen=True)
class ChainHead:
    """End of a chain: number of lines, their bytes, and bytes and SHA-256 of the last line."""

    lines: int = 0
    length: int = 0
    last: int = 0
    sha256: str = GENESIS_DIGEST

    def extended_by(self, line: bytes) -> ChainHead:
        """Return the head after one more line."""
        size = len(line)
        return ChainHead(self.lines + 1, self.length + size, size, hashlib.sha256(line).hexdigest())

    @property
    def text(self) -> str:
        """Content of the head file: one line of JSON."""
        return json.dumps(asdict(self), sort_keys=True) + "\n"


class ChainFile:
    """Writer of a chain. Several processes may append to one file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    @property
    def head(self) -> ChainHead:
        """Head of the chain, read from the head file."""
        return read_head(self.file)

    def append(self, line: Mapping[str, Any]) -> dict[str, Any]:
        """Append a line, synced to disk, and return it with its `time` and `before` (a digest).

        An incomplete last line, left by a kill, is removed first. Raises BrokenChain if the file
        does not end as its head says, StoreError if it cannot be written or locked.
        """
        remedy = "free space or mend the disk, then go on"
        with (
            wrap_disk_errors(f"{self.file} cannot be written", remedy),
            _open_chain(self.file) as out,
        ):
            head = _find_end(self.file, out)
            entry = {**line, "time": _now(), "before": head.sha256}
            content = json.dumps(entry, sort_keys=True).encode() + b"\n"
            if head != self.head:  # a killed writer left a line: at most one is without a head
                write_atomic(head_file(self.file), head.text, mode=0o600)
            _write_at(out, head.length, content)
            try:
                write_atomic(head_file(self.file), head.extended_by(content).text, mode=0o600)
            except (OSError, StoreError):
                out.truncate(head.length)  # the disk is full: give the space back
                raise
        return entry


def read_chain(file: Path) -> list[dict[str, Any]]:
    """Return the lines of a chain after checking every digest and the head.

    An incomplete last line is left out; a file without head and content gives an empty list.
    Raises BrokenChain with the number of the first wrong line.
    """
    # The head first: a line written meanwhile is then one more, not one too few.
    stored_head = read_head(file)
    content = file.read_bytes() if file.exists() else b""
    lines = content[: content.rfind(b"\n") + 1].splitlines(keepends=True)
    head, entries, head_matched = ChainHead(), list[dict[str, Any]](), not stored_head.lines
    for line in lines:
        entries.append(_check_line(file, head, line))
        head = head.extended_by(line)
        head_matched |= head == stored_head
    if not head_matched:
        raise _truncated_error(file, stored_head, len(lines))
    _require_near(file, stored_head, head)
    return entries


def read_head(file: Path) -> ChainHead:
    """Read a chain's head file; an empty head if there is none. BrokenChain if it is damaged."""
    path = head_file(file)
    if not path.exists():
        return ChainHead()
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        head = ChainHead(**json.loads(text))
    except (ValueError, TypeError, RecursionError) as error:
        raise BrokenChain(f"{path} is not the head of a chain: restore it from a backup") from error
    if head.text != text:
        raise BrokenChain(f"{path} was changed: restore it from a backup")
    return head


def head_file(file: Path) -> Path:
    """Return the path of a chain's head file."""
    return file.with_name(f"{file.name}.head")


@contextmanager
def _open_chain(file: Path) -> Generator[BinaryIO]:
    """Open a chain for reading and writing, with an exclusive lock."""
    with (
        open_exclusively(file, timeout=LOCK_TIMEOUT) as descriptor,
        os.fdopen(os.dup(descriptor), "r+b") as out,
    ):
        yield out


def _find_end(file: Path, out: BinaryIO) -> ChainHead:
    """Return the true head of an open chain, including a line that a kill left without a head.

    Raises BrokenChain if the file does not continue its stored head.
    """
    head = read_head(file)
    out.seek(head.length - head.last)
    last = out.read(head.last)
    if head.lines and (len(last) < head.last or hashlib.sha256(last).hexdigest() != head.sha256):
        raise _truncated_error(file, head)
    content = out.read()
    end = head
    for line in content[: content.rfind(b"\n") + 1].splitlines(keepends=True):
        _check_line(file, end, line)
        end = end.extended_by(line)
    _require_near(file, head, end)
    return end


def _require_near(file: Path, stored: ChainHead, actual: ChainHead) -> None:
    """Raise BrokenChain if the file has over one line more than its head: a kill leaves one."""
    if actual.lines > stored.lines + 1:
        raise BrokenChain(
            f"{file} has {actual.lines} lines, and {head_file(file).name} knows of {stored.lines}: "
            "lines were added by other means, or the head is an older copy; restore both files"
        )


def _check_line(file: Path, head: ChainHead, line: bytes) -> dict[str, Any]:
    """Parse the line after `head`; BrokenChain if it is not JSON or does not follow the head."""
    number = head.lines + 1
    try:
        parsed = json.loads(line)
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        raise BrokenChain(
            f"{file} is broken at line {number}, which was edited: restore it from a backup"
        )
    entry = cast("dict[str, Any]", parsed)
    if entry.get("before") != head.sha256:
        raise BrokenChain(
            f"{file} is broken at line {number}, which does not follow the line before: one of "
            "them was edited, or lines were removed, inserted or reordered; restore it from a "
            "backup"
        )
    return entry


def _truncated_error(file: Path, head: ChainHead, lines: int | None = None) -> BrokenChain:
    """Return the error for a file without the last line of its head; `lines` is its length."""
    have = "" if lines is None else f" has {lines} whole lines and"
    return BrokenChain(
        f"{file}{have} does not hold line {head.lines} as {head_file(file).name} knows it: the "
        "last lines were removed or edited; restore both files from a backup"
    )


def _write_at(out: BinaryIO, offset: int, content: bytes) -> None:
    """Replace everything from an offset on by `content`, synced to disk."""
    out.seek(offset)
    out.truncate()
    out.write(content)
    out.flush()
    os.fsync(out.fileno())


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
