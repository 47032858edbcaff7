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
from collections.abc import Mapping
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
    """A hash chain was changed: a line does not follow the line before, or last lines are lost."""

    code = "disk"
    exit_code = 1


@dataclass(frozen=True)
class ChainHead:
    """Position and digest of a chain's last line, as stored in the head file.

    `lines` is the number of lines, `length` their total bytes (with newlines), `last` the bytes of
    the last line and `sha256` the hex digest of the last line. The default is the head of an empty
    chain.
    """

    lines: int = 0
    length: int = 0
    last: int = 0
    sha256: str = GENESIS_DIGEST

    def extended_by(self, line: bytes) -> ChainHead:
        """Return the head after one more line; `line` ends with a newline. Changes nothing."""
        size = len(line)
        return ChainHead(self.lines + 1, self.length + size, size, hashlib.sha256(line).hexdigest())

    @property
    def text(self) -> str:
        """Content of the head file: one line of JSON."""
        return json.dumps(asdict(self), sort_keys=True) + "\n"


class ChainFile:
    """Writer of the hash chain in `file`, with a head file `<name>.head` beside it.

    `append` adds a line and creates both files if they are missing. Several processes and threads
    may append to one file; a lock orders them. Read and verify a chain with `read_chain`.
    """

    def __init__(self, file: Path) -> None:
        self.file = file

    @property
    def head(self) -> ChainHead:
        """Head of the chain, read from the head file."""
        return read_head(self.file)

    def append(self, line: Mapping[str, Any]) -> dict[str, Any]:
        """Append a JSON line and return it with `time` (UTC) and `before` (digest) added.

        The line is on disk (fsync) on return. Waits up to LOCK_TIMEOUT seconds for other writers.
        An incomplete last line, left by a killed writer, is removed first. Raises BrokenChain if
        the file does not end as its head file says, StoreError if the file cannot be written or
        locked.
        """
        remedy = "free space or mend the disk, then go on"
        with (
            wrap_disk_errors(f"{self.file} cannot be written", remedy),
            open_exclusively(self.file, timeout=LOCK_TIMEOUT) as descriptor,
            os.fdopen(os.dup(descriptor), "r+b") as out,
        ):
            head = _verified_end(self.file, out)
            now = datetime.now(UTC).isoformat(timespec="milliseconds")
            entry = {**line, "time": now, "before": head.sha256}
            content = json.dumps(entry, sort_keys=True).encode() + b"\n"
            if head != self.head:  # a killed writer left a line: at most one is without a head
                write_atomic(head_file(self.file), head.text, mode=0o600)
            out.seek(head.length)
            out.truncate()
            out.write(content)
            out.flush()
            os.fsync(out.fileno())
            try:
                write_atomic(head_file(self.file), head.extended_by(content).text, mode=0o600)
            except (OSError, StoreError):
                out.truncate(head.length)  # the disk is full: give the space back
                raise
        return entry


def read_chain(file: Path) -> list[dict[str, Any]]:
    """Return all lines of a chain as dicts, after checking every digest and the head file.

    An incomplete last line is left out. A missing or empty file without head file gives an empty
    list. Changes nothing on disk. Raises BrokenChain, with the number of the line at which the
    chain breaks, if lines were edited, removed, inserted or moved.
    """
    # The head first: a line written meanwhile is then one more, not one too few.
    stored_head = read_head(file)
    lines = _parse_lines(file, ChainHead(), file.read_bytes() if file.exists() else b"")
    heads = [ChainHead(), *(head for _, head in lines)]
    if stored_head.lines and stored_head not in heads:
        raise _truncated_error(file, stored_head, f" has {len(lines)} whole lines and")
    _require_one_ahead(file, stored_head, heads[-1])
    return [line for line, _ in lines]


def read_head(file: Path) -> ChainHead:
    """Read the head file of the chain `file`; an empty head if there is no head file.

    Raises BrokenChain if the head file is damaged. The chain itself is not read.
    """
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


def _verified_end(file: Path, out: BinaryIO) -> ChainHead:
    """Return the head of the open chain `out` (of path `file`) after its last complete line.

    Includes one line that a killed writer left without head. Changes nothing on disk. Raises
    BrokenChain if the file does not continue from its stored head.
    """
    head = read_head(file)
    out.seek(head.length - head.last)
    last = out.read(head.last)
    if head.lines and (len(last) < head.last or hashlib.sha256(last).hexdigest() != head.sha256):
        raise _truncated_error(file, head)
    lines = _parse_lines(file, head, out.read())
    end = lines[-1][1] if lines else head
    _require_one_ahead(file, head, end)
    return end


def _require_one_ahead(file: Path, stored: ChainHead, actual: ChainHead) -> None:
    """Raise BrokenChain if a file has 2 lines more than its stored head: a kill leaves one."""
    if actual.lines > stored.lines + 1:
        raise BrokenChain(
            f"{file} has {actual.lines} lines, and {head_file(file).name} knows of {stored.lines}: "
            "lines were added by other means, or the head is an older copy; restore both files"
        )


def _parse_lines(
    file: Path, head: ChainHead, content: bytes
) -> list[tuple[dict[str, Any], ChainHead]]:
    """Parse the complete lines in `content`, which follow `head`; return (line, head after it).

    Raises BrokenChain, naming `file`, if a line is not a JSON object, or the digest in its `before`
    is not that of the line before.
    """
    lines = list[tuple[dict[str, Any], ChainHead]]()
    for line in content[: content.rfind(b"\n") + 1].splitlines(keepends=True):
        place = f"{file} is broken at line {head.lines + 1}"
        try:
            parsed = json.loads(line)
        except (ValueError, RecursionError):
            parsed = None
        if not isinstance(parsed, dict):
            raise BrokenChain(f"{place}, which was edited: restore it from a backup")
        entry = cast("dict[str, Any]", parsed)
        if entry.get("before") != head.sha256:
            raise BrokenChain(
                f"{place}, which does not follow the line before: one of them was edited, or lines "
                "were removed, inserted or reordered; restore it from a backup"
            )
        head = head.extended_by(line)
        lines.append((entry, head))
    return lines


def _truncated_error(file: Path, head: ChainHead, present: str = "") -> BrokenChain:
    """Return (not raise) the error that line `head.lines` of a file is missing or edited."""
    return BrokenChain(
        f"{file}{present} does not hold line {head.lines} as {head_file(file).name} knows it: the "
        "last lines were removed or edited; restore both files from a backup"
    )
