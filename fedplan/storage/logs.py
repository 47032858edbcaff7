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
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
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

    @contextmanager
    def heard(self, run: str) -> Generator[None]:
        """Write down what fedplan warns of meanwhile, by way of Python's logging."""
        source = logging.getLogger("fedplan")
        # Where nobody listens, Python prints warnings: it goes on to when we listen.
        last = logging.lastResort if not source.hasHandlers() else None
        handlers = [_Handler(self, run), *([last] if last else [])]
        for handler in handlers:
            source.addHandler(handler)
        try:
            yield
        finally:
            for handler in handlers:
                source.removeHandler(handler)

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


class _Handler(logging.Handler):
    """What is said by way of Python's logging, put into a log."""

    def __init__(self, log: Log, run: str) -> None:
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
    mark = ((folder / LOG).stat().st_ino, (folder / LOG).stat().st_size)
    while True:
        time.sleep(LOOK)
        with suppress(FileNotFoundError):  # a log begins anew just now: the next look finds it
            content, mark = _since(folder, mark)
            yield from (entry for entry in _entries(content) if _meant(entry, site, since))


def _since(folder: Path, mark: tuple[int, int]) -> tuple[bytes, tuple[int, int]]:
    """What was written since a mark, a file and a place in it; the log may have begun anew."""
    files = [file for file in _files(folder) if file.exists()]
    numbers = [file.stat().st_ino for file in files]
    if mark == (numbers[-1], files[-1].stat().st_size):
        return b"", mark
    place = numbers.index(mark[0]) if mark[0] in numbers else 0
    pieces = [file.read_bytes() for file in files[place:]]
    begun = mark[1] if numbers[place] == mark[0] else 0
    last = pieces[-1][: pieces[-1].rfind(b"\n") + 1]
    content = b"".join([*pieces[:-1], last])[begun:]
    return content, (numbers[-1], len(last))


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
