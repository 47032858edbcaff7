# SPDX-License-Identifier: Apache-2.0
"""Format numbers, closed rounds and log entries as text for people; parse the times of --since."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.text import Text

from fedplan.errors import FedplanError
from fedplan.federation.ledger.records import RoundRecord
from fedplan.storage.logs import LogEntry

if TYPE_CHECKING:  # `explain` loads no torch
    from fedplan.studies.run_scores import ScoreKind, ScoreRules


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


TRAFFIC_LABELS = ("upload MB, all rounds", "download MB, all rounds")
"""Names of the bytes of a whole run, in MB."""


def round_heading(rules: ScoreRules) -> str:
    """Return the heading of `simulation_line`, with the score that matters for the plan first."""
    scores = "personal ± std  worst client  global" if rules.personal else "global  worst client"
    return f"round    loss  {scores}  upload MB  download MB"


def score_note(rules: ScoreRules, examples: str = "") -> str:
    """Return two lines on the scores below: metric and direction, and on which examples each is.

    `examples`: those of the global score; "" if there is none.
    """
    better = "higher" if rules.higher_is_better else "lower"
    own = "Personal and worst client" if rules.personal else "Worst client"
    overall = f"; global: on {examples}{rules.global_note}" if examples else ""
    return (
        f"Scores are {rules.metric}: {better} is better. {own}: on each client's own test examples"
        f"{overall}.\nUpload and download: all clients, per round."
    )


def simulation_line(row: Mapping[str, float], rules: ScoreRules, spent: float | None = None) -> str:
    """Return the line of a simulated round under `round_heading`, with rich markup.

    `row` are the round's metrics, `spent` is the epsilon spent so far (None: no epsilon).
    """
    scores, rejected = rules.of_row(row), int(row["rejected"])

    def number(*kinds: ScoreKind) -> str:
        score = scores.find(*kinds)
        return score.number if score else ""

    if rules.personal:
        personal = scores.find("personal")
        spread = f" ± {personal.std:.3f}" if personal and personal.std is not None else ""
        columns = f"{number('personal') + spread:>14}  {number('worst client'):>12}"
        columns += f"  {number('global'):>6}"
    else:
        columns = f"{number('global', 'mean of clients'):>6}  {number('worst client'):>12}"
    cells = (
        f"{int(row['round']):5d}",
        f"{row['loss']:6.3f}" if "loss" in row else "     -",
        columns,
        f"{megabytes(int(row['upload_bytes'])):>9}  {megabytes(int(row['download_bytes'])):>11}",
        f"  [yellow]{rejected} not aggregated[/yellow]" if rejected else "",
        f"  epsilon {spent:.4f}" if spent is not None else "",
    )
    return "  ".join(cells)


def sites_line(record: RoundRecord, row: Mapping[str, float], rules: ScoreRules) -> str:
    """Return the line of a round of real sites, escaped for rich: sizes, scores, rejected sites."""
    rejected = ", ".join(f"{name} ({why})" for name, why in record.rejected.items())
    loss = f"  loss {row['loss']:.3f}" if "loss" in row else ""
    scores = "".join(f"  {each.label} {each.number}" for each in rules.of_row(row).scores)
    return escape(
        f"round {record.round:3d}{loss}{scores}  {len(record.aggregated)} aggregated  "
        f"upload {megabytes(record.upload_bytes)} MB  "
        f"download {megabytes(record.download_bytes)} MB"
        + (f"  not aggregated: {rejected}" if rejected else "")
    )


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
