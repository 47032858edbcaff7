# SPDX-License-Identifier: Apache-2.0
"""Lines of a log as a person reads them, and times as a person says them."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

from rich.text import Text

from fedplan.errors import FedplanError
from fedplan.storage.logs import Entry

COLOURS = {"warning": "yellow", "error": "red", "critical": "red"}
_AGO = re.compile(r"(\d{1,6})([smhd])")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


def log_line(entry: Entry) -> Text:
    """One line: the local time, the round, the site, what happened, and in words."""
    when = f"{datetime.fromisoformat(entry.time).astimezone():%Y-%m-%d %H:%M:%S}"
    number = f"round {entry.round:<4d}" if entry.round else " " * 10
    what = entry.event.removeprefix("site ") if entry.site else entry.event
    said = Text(f"{when}  {number}  ")
    said.append(f"{entry.site:<12}  " if entry.site else f"{'':<12}  ", style="bold")
    said.append(what, style=COLOURS.get(entry.level, ""))
    said.append(f"  {entry.text}" if entry.text else "")
    return said


def moment(said: str) -> str:
    """A time as a log writes it: of so long ago, or of a day and hour; nothing is the beginning."""
    if not said:
        return ""
    if found := _AGO.fullmatch(said):
        past = timedelta(**{_UNITS[found[2]]: int(found[1])})
        return (datetime.now(UTC) - past).isoformat(timespec="seconds")
    try:
        return datetime.fromisoformat(said).astimezone(UTC).isoformat(timespec="seconds")
    except ValueError as error:
        raise FedplanError(
            f"--since is {said!r}: say 10m, 2h or 3d, or a time as 2026-11-16T09:00"
        ) from error
