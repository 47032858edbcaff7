# SPDX-License-Identifier: Apache-2.0
"""Logs: what happened and when, a JSON line each, in files that never grow without end.

Both ends write one: a server beside its run, a site in its home. A line holds an event and words of
our own, and nothing of rows or values.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

from fedplan.errors import FedplanError

LOG = "log.jsonl"
LARGEST = 4 << 20
"""Bytes after which a log begins anew."""
KEPT = 4
"""How many logs of before are kept: log.1.jsonl is the one just before."""
LOOK = 0.5
"""Seconds between two looks of whoever follows a log."""


@dataclass(frozen=True)
class Entry:
    """One line: when, how grave, in which run and round, of which site, what, and in words."""

    time: str
    level: str
    run: str
    round: int
    site: str
    event: str
    text: str


KINDS = {f.name: int if f.name == "round" else str for f in fields(Entry)}


def now() -> str:
    """The time in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


class Log:
    """The log of a folder. A disk that is full is no reason to stop: a line is then left out."""

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
        """Write a line."""
        entry = Entry(now(), level, run, round, site, event, text)
        with suppress(OSError):
            self._append(json.dumps(asdict(entry)).encode() + b"\n")

    def _append(self, line: bytes) -> None:
        file = self.folder / LOG
        if file.exists() and file.stat().st_size + len(line) > LARGEST:
            _turned(self.folder)
        # One write a line: whoever reads meanwhile sees it whole or not at all.
        opened = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(opened, line)
        finally:
            os.close(opened)


class LogHandler(logging.Handler):
    """What is said by way of Python's logging, put into a log."""

    def __init__(self, log: Log, run: str = "") -> None:
        super().__init__(logging.WARNING)
        self._log, self._run = log, run

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line."""
        self._log.note("note", record.getMessage(), level=record.levelname.lower(), run=self._run)


def read_log(folder: Path, *, site: str = "", since: str = "") -> list[Entry]:
    """The lines of a folder's logs, the oldest first: those of a site, and from a time on."""
    found = [file for file in _files(folder) if file.exists()]
    if not found:
        raise FedplanError(f"{folder} has no {LOG}: name the folder of a run, or a site's home")
    entries = (entry for file in found for entry in _entries(file.read_bytes()))
    return [entry for entry in entries if _meant(entry, site, since)]


def follow_log(folder: Path, *, site: str = "", since: str = "") -> Iterator[Entry]:
    """The same, and then each line as it comes; it has no end."""
    yield from read_log(folder, site=site, since=since)
    file, place = folder / LOG, (folder / LOG).stat()
    offset = place.st_size
    while True:
        time.sleep(LOOK)
        with suppress(FileNotFoundError):
            now_there = file.stat()
            if now_there.st_ino != place.st_ino:
                place, offset = now_there, 0
            with file.open("rb") as opened:
                opened.seek(offset)
                content = opened.read()
            whole = content[: content.rfind(b"\n") + 1]
            offset += len(whole)
            yield from (entry for entry in _entries(whole) if _meant(entry, site, since))


def _meant(entry: Entry, site: str, since: str) -> bool:
    return site in ("", entry.site) and entry.time >= since


def _files(folder: Path) -> list[Path]:
    """All logs of a folder that there may be, the oldest first."""
    return [*(folder / f"log.{n}.jsonl" for n in range(KEPT, 0, -1)), folder / LOG]


def _turned(folder: Path) -> None:
    """Put every log one place further; the oldest goes."""
    files = _files(folder)
    for older, newer in pairwise(files):
        if newer.exists():
            newer.replace(older)


def _entries(content: bytes) -> Iterator[Entry]:
    """The lines that can be read: the last may be cut off, and a disk may have been full."""
    for line in content.splitlines():
        with suppress(ValueError):
            said = json.loads(line)
            if type(said) is dict:
                found = cast("dict[str, Any]", said)
                if {name: type(each) for name, each in found.items()} == KINDS:
                    yield Entry(**found)
