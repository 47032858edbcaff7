# SPDX-License-Identifier: Apache-2.0
"""Format entries of a log for the terminal, and parse the times of --since."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

from rich.text import Text

from fedplan.errors import FedplanError
from fedplan.storage.logs import LogEntry

LEVEL_STYLES = {"warning": "yellow", "error": "red", "critical": "red"}
_AGE = re.compile(r"(\d{1,6})([smhd])")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


def format_log_entry(entry: LogEntry) -> Text:
    """Return a log entry as a coloured line: local time, round, site, event and text."""
    when = f"{datetime.fromisoformat(entry.time).astimezone():%Y-%m-%d %H:%M:%S}"
    number = f"round {entry.round:<4d}" if entry.round else " " * 10
    event = entry.event.removeprefix("site ") if entry.site else entry.event
    line = Text(f"{when}  {number}  ")
    line.append(f"{entry.site:<12}  " if entry.site else f"{'':<12}  ", style="bold")
    line.append(event, style=LEVEL_STYLES.get(entry.level, ""))
    line.append(f"  {entry.text}" if entry.text else "")
    return line


def parse_since(text: str) -> str:
    """Return the time of a --since text in ISO format and UTC, as in logs; "" for an empty text.

    The text is an age (10m, 2h, 3d) or an ISO time; a time without a time zone is local. Raises
    FedplanError for other texts.
    """
    if not text:
        return ""
    if match := _AGE.fullmatch(text):
        age = timedelta(**{_UNITS[match[2]]: int(match[1])})
        return (datetime.now(UTC) - age).isoformat(timespec="seconds")
    try:
        return datetime.fromisoformat(text).astimezone(UTC).isoformat(timespec="seconds")
    except ValueError as error:
        raise FedplanError(
            f"--since is {text!r}; use 10m, 2h or 3d, or a time like 2026-11-16T09:00"
        ) from error
