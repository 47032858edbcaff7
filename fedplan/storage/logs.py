# SPDX-License-Identifier: Apache-2.0
"""Event logs of a server or a site: JSON lines in files that rotate at a size limit.

A server writes one in its run folder, a site in its state folder. Lines hold events and texts of
fedplan, no examples and no tensor values.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from dataclasses import fields as dataclass_fields
from datetime import UTC, datetime
from itertools import chain, pairwise, repeat
from pathlib import Path
from typing import Any, cast

from fedplan.errors import FedplanError
from fedplan.storage.files import PRIVATE

LOG = "log.jsonl"
LARGEST = 4 << 20
"""Size in bytes at which a log file rotates."""
KEPT = 4
"""Number of rotated files; log.1.jsonl is the newest of them."""
LOOK = 0.5
"""Seconds between two reads of `follow_log`."""


@dataclass(frozen=True)
class LogEntry:
    """One line of a log.

    `time` is UTC in ISO format, `level` "info", "warning" or "error", `event` a short fixed text,
    `text` the details. `run`, `round` and `site` are empty or 0 where not applicable.
    """

    time: str
    level: str
    run: str
    round: int
    site: str
    event: str
    text: str


FIELD_TYPES = {f.name: int if f.name == "round" else str for f in dataclass_fields(LogEntry)}
"""Type of each field of a valid log line."""


def utc_now() -> str:
    """Return the time in UTC as ISO text, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


class Log:
    """Writer of the log files in `folder`, which must exist. Call `note` or `append`.

    `log.jsonl` is created by the first line, and renamed to `log.1.jsonl` at 4 MiB, that file to
    `log.2.jsonl` and so on; the former `log.4.jsonl` is lost. A line that cannot be written (full
    disk) is dropped without an error.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def note(
        self,
        event: str,
        text: str = "",
        *,
        level: str = "info",
        run: str = "",
        round: int = 0,
        site: str = "",
    ) -> None:
        """Append a line with the current time and these fields of LogEntry; see `append`."""
        self.append(LogEntry(utc_now(), level, run, round, site, event, text))

    def append(self, entry: LogEntry) -> None:
        """Append an entry; rotate the files first if the line would exceed the size limit.

        Never raises OSError.
        """
        with suppress(OSError):
            line = json.dumps(vars(entry)).encode() + b"\n"
            file = self.folder / LOG
            if file.exists() and file.stat().st_size + len(line) > LARGEST:
                for older, newer in pairwise(_log_files(self.folder)):
                    if newer.exists():
                        newer.replace(older)
            # One write per line: readers see it whole or not at all.
            descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, PRIVATE)
            try:
                os.write(descriptor, line)
            finally:
                os.close(descriptor)


def read_log(folder: Path, *, site: str = "", since: str = "") -> list[LogEntry]:
    """Return the entries of a folder's log files, oldest first.

    `site` selects the entries of one site, `since` (ISO time) those not older; empty selects all.
    Malformed lines are skipped. Raises FedplanError if the folder has no log file.
    """
    files = _require_log(folder)
    entries = (entry for file in files for entry in _parse_entries(file.read_bytes()))
    return [entry for entry in entries if _matches(entry, site, since)]


def _require_log(folder: Path) -> list[Path]:
    """Return the log files of a folder, oldest first. Raises FedplanError if there are none."""
    if files := [file for file in _log_files(folder) if file.exists()]:
        return files
    raise FedplanError(f"{folder} has no {LOG}: name the folder of a run, or a site's state folder")


def follow_log(folder: Path, *, site: str = "", since: str = "") -> Iterator[LogEntry]:
    """Yield the entries that `read_log` returns, then each new entry when it is written; endless.

    Reads the files in `folder` every half second, also across rotations. `site` and `since` filter
    as in `read_log`. Raises FedplanError if there is no log.
    """
    _require_log(folder)
    inode, offset = -1, 0  # of the newest file, up to where it was read
    for pause in chain([0.0], repeat(LOOK)):
        time.sleep(pause)
        with suppress(FileNotFoundError):  # the log rotates at this moment: try again later
            files = [file for file in _log_files(folder) if file.exists()]
            inodes = [file.stat().st_ino for file in files]
            if (inode, offset) == (inodes[-1], files[-1].stat().st_size):
                continue
            first = inodes.index(inode) if inode in inodes else 0
            contents = [file.read_bytes() for file in files[first:]]
            if inodes != [file.stat().st_ino for file in _log_files(folder) if file.exists()]:
                continue  # it has rotated since, so that lines may be missing or double
            contents[-1] = contents[-1][: contents[-1].rfind(b"\n") + 1]  # whole lines
            content = b"".join(contents)[offset if inodes[first] == inode else 0 :]
            inode, offset = inodes[-1], len(contents[-1])
            entries = _parse_entries(content)
            yield from (entry for entry in entries if _matches(entry, site, since))


def _matches(entry: LogEntry, site: str, since: str) -> bool:
    return site in ("", entry.site) and entry.time >= since


def _log_files(folder: Path) -> list[Path]:
    """Return the paths of all possible log files of a folder, oldest first."""
    return [*(folder / f"log.{n}.jsonl" for n in range(KEPT, 0, -1)), folder / LOG]


def _parse_entries(content: bytes) -> Iterator[LogEntry]:
    """Yield the log entries in a file's bytes; skip lines that are malformed or cut off."""
    for line in content.splitlines():
        with suppress(ValueError):
            parsed = json.loads(line)
            if type(parsed) is dict:
                fields = cast("dict[str, Any]", parsed)
                if {name: type(value) for name, value in fields.items()} == FIELD_TYPES:
                    yield LogEntry(**fields)
