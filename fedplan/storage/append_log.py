# SPDX-License-Identifier: Apache-2.0
"""Append-only logs: files of JSON lines that keep each appended line through kills and power cuts.

The ledger, metrics, privacy charges, approvals, egress, errors, replies and reveals are such files.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from threading import RLock
from typing import Any, BinaryIO, cast

from fedplan.errors import FedplanError, StoreError
from fedplan.storage.files import PRIVATE, failpoint, wrap_disk_errors, write_atomic
from fedplan.storage.locks import open_exclusively, sync_folder

GENESIS_DIGEST = "0" * 64
"""Value of `before` in the first line of a chained log."""
LOCK_TIMEOUT = 60.0
"""Seconds that a writer waits for the lock of another process."""


class DamagedLog(FedplanError):
    """A log was edited, cut or reordered, or is no log; the message names the file and the line."""

    code = "disk"
    exit_code = 1


@dataclass(frozen=True)
class LogHead:
    """End of a log: number of lines, their bytes, and bytes and SHA-256 of the last line."""

    lines: int = 0
    length: int = 0
    last: int = 0
    sha256: str = GENESIS_DIGEST

    def extended_by(self, line: bytes) -> LogHead:
        """Return the head after one more line, given with its newline."""
        size = len(line)
        return LogHead(self.lines + 1, self.length + size, size, hashlib.sha256(line).hexdigest())

    @property
    def text(self) -> str:
        """Content of the head file: one line of JSON."""
        return json.dumps(vars(self), sort_keys=True) + "\n"


class AppendLog:
    """Append-only file of JSON lines; the folder must exist, the first append creates the file.

    A line is on disk when `append` returns. Several processes may append. A kill or power cut
    leaves at most one incomplete last line, which `read` ignores and the next `append` removes.

    `chained`: each line gets the field `before`, the SHA-256 of the line before, and a head file
    (`head_file`) holds length and digest of the end. So lines that were edited, inserted, reordered
    or removed raise DamagedLog. Somebody who can write both files can forge the log; only a head
    that was sent elsewhere before reveals that.
    """

    def __init__(self, file: Path, *, chained: bool = False) -> None:
        self.file, self.chained = file, chained
        self._stamped_files = os.fspath(head_file(file)), os.fspath(file)
        self.thread_lock = RLock()
        self._out: BinaryIO | None = None
        self._settled_stamp: object = None
        self._cache: tuple[object, list[dict[str, Any]]] | None = None

    @property
    def head(self) -> LogHead:
        """Length and digest of a chained log, from its head file; empty if there is none."""
        return read_head(self.file)

    @contextmanager
    def locked(self) -> Generator[None]:
        """Lock the log against other threads and processes for the body, to read and then append.

        Creates the file. Waits up to LOCK_TIMEOUT. Raises StoreError if the file cannot be locked
        or written, DamagedLog if a chained log does not end as its head says.
        """
        with self.thread_lock:
            if self._out is not None:
                yield
                return
            remedy = "free space or repair the disk, then resume"
            with (
                wrap_disk_errors(f"{self.file} cannot be written", remedy),
                open_exclusively(self.file, timeout=LOCK_TIMEOUT) as descriptor,
                os.fdopen(os.dup(descriptor), "r+b", buffering=0) as out,
            ):
                self._out = out
                try:
                    if self._stamp() != self._settled_stamp:
                        self._settle(out)
                    yield
                    self._settled_stamp = self._stamp()
                finally:
                    self._out = None

    def append(self, line: Mapping[str, Any]) -> None:
        """Append a line and sync it to disk. Raises as `locked` does.

        After an error the line is not in the log, or, if only the head's sync failed, it is.
        """
        with self.locked():
            assert self._out is not None
            end, was_read = self._end(self._out), self._cache and self._cache[0] == self._stamp()
            fields = {**line, "before": end.sha256} if self.chained else line
            content = json.dumps(fields, sort_keys=True, allow_nan=False).encode() + b"\n"
            head = end.extended_by(content)
            try:
                failpoint("log.begun")
                _write_from(self._out, end.length, content)
                failpoint("log.synced")
                if self.chained:
                    write_atomic(head_file(self.file), head.text)
                    failpoint("log.head_written")
            except (OSError, StoreError):
                # A line that the head counts must stay, though the sync of the head failed.
                if not (self.chained and self.head == head):
                    with suppress(OSError):
                        self._out.truncate(end.length)
                raise
            if self._cache and was_read:  # so that a reader need not parse all lines again
                self._cache[1].append(json.loads(content))
                self._cache = self._stamp(), self._cache[1]

    def read(self) -> list[dict[str, Any]]:
        """Return all lines as dicts, oldest first; [] without a file.

        The list is cached until the file changes, and `append` extends it: do not change it.
        An incomplete last line is left out. Raises DamagedLog with the number of the first line
        that is not a JSON object or, in a chained log, does not follow the line before; OSError if
        the file cannot be read.
        """
        with self.thread_lock:
            stamp = self._stamp()
            if self._cache is None or self._cache[0] != stamp:
                self._cache = stamp, self._read()
            return self._cache[1]

    def _read(self) -> list[dict[str, Any]]:
        """Read and check the file, as `read` does without a cache."""
        while True:
            stored = self.head if self.chained else LogHead()
            content = self.file.read_bytes() if self.file.exists() else b""
            if not self.chained or self.head == stored:  # else another process appends meanwhile
                break
        end, entries, stored_found = LogHead(), list[dict[str, Any]](), not stored.lines
        for line in self._whole_lines(stored, content):
            entries.append(self._parse(end, line))
            end = end.extended_by(line)
            stored_found |= end == stored
        if not stored_found:
            raise _cut_error(self.file, stored)
        if self.chained:
            _require_near(self.file, stored, end)
        return entries

    def _stamp(self) -> object:
        """Return a value that differs after any write to the log or its head."""
        stamp = list[tuple[int, ...]]()
        for file in self._stamped_files:
            with suppress(FileNotFoundError):
                s = os.stat(file)
                stamp.append((s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns))
        return stamp

    def _parse(self, end: LogHead, line: bytes) -> dict[str, Any]:
        """Return the line after `end` as a dict; raise DamagedLog if it is invalid there."""
        number = end.lines + 1
        try:
            parsed = json.loads(line)
        except (ValueError, RecursionError):
            parsed = None
        if not isinstance(parsed, dict):
            raise DamagedLog(
                f"{self.file} is damaged at line {number}, which was edited: restore it from a "
                "backup"
            )
        entry = cast("dict[str, Any]", parsed)
        if self.chained and entry.get("before") != end.sha256:
            raise DamagedLog(
                f"{self.file} is damaged at line {number}, which does not follow the line before: "
                "one of them was edited, or lines were removed, inserted or reordered; restore it "
                "from a backup"
            )
        return entry

    def _whole_lines(self, stored: LogHead, content: bytes) -> list[bytes]:
        """Return the lines of `content`, without a last one that a power cut left in part.

        Such a line may have its end, and not all before it. A line that the head `stored` counts is
        never left out.
        """
        lines = content[: content.rfind(b"\n") + 1].splitlines(keepends=True)
        last = lines[-1] if lines else b""
        counted = self.chained and hashlib.sha256(last).hexdigest() == stored.sha256
        if last and not counted:
            try:
                json.loads(last)
            except (ValueError, RecursionError):
                return lines[:-1]
        return lines

    def _end(self, out: BinaryIO) -> LogHead:
        """Return the end of the open log's complete lines; a plain log's has no count of lines.

        Raises DamagedLog if a chained log does not continue its head file by at most one line.
        """
        stored = self.head if self.chained else LogHead()
        out.seek(stored.length - stored.last)
        last = out.read(stored.last)
        if hashlib.sha256(last).hexdigest() != stored.sha256 and stored.lines:
            raise _cut_error(self.file, stored)
        lines = self._whole_lines(stored, last + out.read())[bool(last) :]
        if not self.chained:
            return LogHead(0, sum(map(len, lines)), len(lines[-1]) if lines else 0)
        end = stored
        for line in lines:
            self._parse(end, line)
            end = end.extended_by(line)
        _require_near(self.file, stored, end)
        return end

    def _settle(self, out: BinaryIO) -> None:
        """Remove an incomplete last line, write the last line and the head again, and sync.

        Called unless this object wrote the log last: a process that was killed, or whose sync
        failed, may have left a line or a name that is not on disk. After a failed sync a further
        one writes nothing, so the line is written again.
        """
        end = self._end(out)
        out.seek(end.length - end.last)
        _write_from(out, end.length - end.last, out.read(end.last))
        if self.chained and end != self.head:
            write_atomic(head_file(self.file), end.text)
        sync_folder(self.file.parent)


class CommittedLog:
    """Append-only file of JSON lines, of which a checkpoint records the valid length and digest.

    One process writes. `length`: bytes of all lines. Lines after the last checkpoint are removed by
    opening the log with the checkpoint's `length`.
    """

    def __init__(self, file: Path, *, length: int | None = None, sha256: str = "") -> None:
        """Open or create the file, and remove the bytes after `length` (default: keep all).

        Raises DamagedLog if the file is shorter than `length`, or the digest of its first `length`
        bytes is not `sha256` (if given).
        """
        self.file = file
        content = file.read_bytes() if file.exists() else b""
        self.length = len(content) if length is None else length
        if len(content) < self.length:
            raise DamagedLog(
                f"{file} is shorter than the {length} bytes it once had: restore it from a backup"
            )
        self._hash = hashlib.sha256(content[: self.length])
        if sha256 and self.sha256 != sha256:
            raise DamagedLog(f"{file} was changed since it was written: restore it from a backup")
        file.touch(PRIVATE)
        sync_folder(file.parent)
        if len(content) > self.length:
            os.truncate(file, self.length)

    @property
    def sha256(self) -> str:
        """SHA-256 of all lines, as hex."""
        return self._hash.hexdigest()

    @property
    def length_and_digest(self) -> list[int | str]:
        """`[length, sha256]`, as a list for JSON."""
        return [self.length, self.sha256]

    def append(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Append lines and sync them to disk; raises StoreError if the file cannot be written."""
        content = b"".join(json.dumps(line, sort_keys=True).encode() + b"\n" for line in lines)
        with (
            wrap_disk_errors(f"{self.file} cannot be written", "free space, then use --resume"),
            self.file.open("r+b", buffering=0) as out,
        ):
            _write_from(out, self.length, content)
        self.length += len(content)
        self._hash.update(content)


def read_json_lines(file: Path) -> list[dict[str, Any]]:
    """Return the lines of a file as dicts; an incomplete last line is left out."""
    content = file.read_bytes()
    return [json.loads(line) for line in content[: content.rfind(b"\n") + 1].splitlines()]


def read_head(file: Path) -> LogHead:
    """Read the head file of a chained log; an empty head if there is none.

    Raises DamagedLog if the head file was changed.
    """
    path = head_file(file)
    if not path.exists():
        return LogHead()
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        head = LogHead(**json.loads(text))
    except (ValueError, TypeError, RecursionError) as error:
        raise DamagedLog(f"{path} is not the head of a log: restore it from a backup") from error
    numbers = head.lines, head.length, head.last
    are_counts = all(type(number) is int and number >= 0 for number in numbers)
    if head.text != text or not are_counts or (not head.lines and head != LogHead()):
        raise DamagedLog(f"{path} was changed: restore it from a backup")
    return head


def head_file(file: Path) -> Path:
    """Return the path of a chained log's head file."""
    return file.with_name(f"{file.name}.head")


def timestamp() -> str:
    """Return the time in UTC as ISO text with milliseconds, for the field `time` of a line."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _require_near(file: Path, stored: LogHead, actual: LogHead) -> None:
    """Raise DamagedLog if the file has over one line more than its head: a kill leaves one."""
    if actual.lines > stored.lines + 1:
        raise DamagedLog(
            f"{file} has {actual.lines} lines, and {head_file(file).name} knows of {stored.lines}: "
            "lines were added by other means, or the head is an older copy; restore both files"
        )


def _cut_error(file: Path, head: LogHead) -> DamagedLog:
    """Return the error for a file without the last line of its head."""
    return DamagedLog(
        f"{file} does not hold line {head.lines} as {head_file(file).name} knows it: the last "
        "lines were removed or edited; restore both files from a backup"
    )


def _write_from(out: BinaryIO, offset: int, content: bytes) -> None:
    """Replace all bytes of an unbuffered file from an offset on by `content`, and sync."""
    out.seek(offset)
    while content:
        content = content[out.write(content) or 0 :]
    out.truncate()  # after the write: a kill between both must not lose a line written before
    failpoint("log.written")
    os.fsync(out.fileno())
