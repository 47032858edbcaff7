# SPDX-License-Identifier: Apache-2.0
"""Format numbers, closed rounds and log entries as text for people; parse the times of --since."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

from rich.markup import escape
from rich.text import Text

from fedplan.errors import FedplanError
from fedplan.federation.ledger.records import RoundRecord
from fedplan.storage.logs import LogEntry


def millions(count: int) -> str:
    """Return a count in short, with three digits: 85.8 M, 12.4 k, 512."""
    for size, letter in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            return f"{count / size:.3g} {letter}"
    return str(count)


def megabytes(count: int) -> str:
    """Return bytes in MB (10^6), without the unit: 1,234.5, or 0.012 below 0.1."""
    return f"{count / 1e6:,.1f}" if count >= 10**5 else f"{count / 1e6:.3f}"


def byte_unit(largest: float) -> tuple[float, str]:
    """Return the unit for numbers of bytes up to `largest`: its size in bytes, and its name."""
    units = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
    return next((unit for unit in units if largest >= unit[0]), (1.0, "bytes"))


def percent(share: float) -> str:
    """Return a share of 1 in percent: 12.3 %."""
    return f"{100 * share:.1f} %"


def duration(seconds: float) -> str:
    """Return seconds in short: 4.0 s, 12 s, 12 min, 3 h 5 min or 2 d 4 h."""
    for size, name, smaller, smaller_name in ((86400, "d", 3600, "h"), (3600, "h", 60, "min")):
        if seconds >= size:
            count, left = divmod(int(seconds), size)
            return f"{count} {name} {left // smaller} {smaller_name}"
    if seconds >= 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"


HEADING = "round    loss  global  personal ± std  worst client  upload MB  download MB"
"""Global: score of the global model on the common test set, or on the clients' held-out examples.
Personal: mean score of the clients' personal models on their own held-out examples."""

PERSONAL = ("personal.", "sites.spread.personal.")
"""Prefixes of the metrics on how personal scores spread over clients."""

SCORE_LABELS = {
    "global": "global {}",
    "sites.global": "global {} at sites",
    "sites.personal": "personal {} at sites",
}
"""Labels of scores by the prefix of their metric; those at sites are means over their examples."""


def score_note(primary: str, higher: bool | None = None) -> str:
    """Return the sentence that names the metric of all scores, and its direction if given."""
    better = "" if higher is None else f": {'higher' if higher else 'lower'} is better"
    return f"Scores are {primary}{better}."


def simulation_line(row: Mapping[str, float], spent: float | None = None, *, primary: str) -> str:
    """Return the line of a simulated round under HEADING, with rich markup.

    `row` are the round's metrics, `spent` the epsilon spent so far (None: no epsilon), `primary`
    the name of the metric that scores show.
    """
    prefix = next((prefix for prefix in PERSONAL if f"{prefix}{primary}" in row), "")
    mean, std, worst = (row.get(f"{prefix}{primary}{end}", 0.0) for end in ("", "_std", "_worst"))
    personal = f"{mean:.3f} ± {std:.3f}" if prefix else ""
    rejected = int(row["rejected"])
    cells = (
        f"{int(row['round']):5d}",
        f"{row['loss']:6.3f}" if "loss" in row else "     -",
        f"{_score(row, primary, 'global.', 'sites.global.'):>6}",
        f"{personal:>14}  {f'{worst:.3f}' if prefix else '':>12}",
        f"{megabytes(int(row['upload_bytes'])):>9}  {megabytes(int(row['download_bytes'])):>11}",
        f"  [yellow]{rejected} not aggregated[/yellow]" if rejected else "",
        f"  epsilon {spent:.4f}" if spent is not None else "",
    )
    return "  ".join(cells)


def sites_line(record: RoundRecord, row: Mapping[str, float], *, primary: str) -> str:
    """Return the line of a round of real sites, escaped for rich: sizes, scores, rejected sites.

    `record` is the round's ledger record, `row` its metrics, `primary` the name of the metric that
    scores show.
    """
    rejected = ", ".join(f"{name} ({why})" for name, why in record.rejected.items())
    loss = f"  loss {row['loss']:.3f}" if "loss" in row else ""
    scores = "".join(
        f"  {label.format(primary)} {score}"
        for prefix, label in SCORE_LABELS.items()
        if (score := _score(row, primary, f"{prefix}."))
    )
    return escape(
        f"round {record.round:3d}{loss}{scores}  {len(record.aggregated)} aggregated  "
        f"upload {megabytes(record.upload_bytes)} MB  "
        f"download {megabytes(record.download_bytes)} MB"
        + (f"  not aggregated: {rejected}" if rejected else "")
    )


def _score(row: Mapping[str, float], primary: str, *prefixes: str) -> str:
    """Return the score under the first prefix of metrics that has it, as text; empty for none."""
    scores = [row[f"{prefix}{primary}"] for prefix in prefixes if f"{prefix}{primary}" in row]
    return f"{scores[0]:.3f}" if scores else ""


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
