# SPDX-License-Identifier: Apache-2.0
"""Tables: a comparison as Markdown, as CSV and as plain values."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from io import StringIO
from math import isfinite
from typing import TYPE_CHECKING, Any

from fedplan.reports.figures.drawing import harmless, printable
from fedplan.reports.units import duration, megabytes
from fedplan.sweeps.statistics import Interval

if TYPE_CHECKING:
    from fedplan.sweeps.comparisons import Comparison, Contrast

NONE = ""
"""What a cell says that has nothing to say."""


def markdown(found: Comparison) -> str:
    """A comparison as a person reads it."""
    parts = [table(heads(found), [cells(found, row) for row in found.rows])]
    told = [row for row in found.rows if row.words]
    if told:
        parts.append(f"What differs from {found.base.label}:\n")
        parts += [f"- **{row.group.label}**: {'; '.join(row.words)}." for row in told]
        parts.append("")
    parts += [f"Note: {printable(note)}." for note in (*found.notes, reading(found))]
    return "\n".join(parts) + "\n"


def reading(found: Comparison) -> str:
    """How the table is read."""
    better = "higher" if found.higher else "lower"
    said = f"{found.score} is of the last round that has it, {better} is better; ± is half the "
    said += "width of a 95 % interval over seeds (Student's t)"
    if len(found.rows) > 1:
        said += (
            f"; 'minus {found.base.label}' is paired by seed, each interval by itself, and p is "
            "of the paired t test, corrected for all rows of the table (Holm)"
        )
    return said


def heads(found: Comparison) -> list[str]:
    """The names of the columns."""
    paired = [f"minus {found.base.label}", "p (Holm)"] if len(found.rows) > 1 else []
    return ["runs", "seeds", found.score, *paired, "MB up", "MB down", *_private(found),
            "rounds", "time"]  # fmt: skip


def cells(found: Comparison, row: Contrast) -> list[str]:
    """One group in words; bytes are of a whole run, all clients together."""
    group, several = row.group, len(found.rows) > 1
    paired = [row.difference.text() if row.difference else NONE, p_text(row.corrected)]
    up, down, seconds = (group.number(name) for name in ("up", "down", "seconds"))
    epsilon, rounds = group.number("epsilon"), group.number("rounds")
    return [
        group.label,
        str(row.score.count),
        row.score.text(),
        *(paired if several else []),
        megabytes(int(up)) if up is not None else NONE,
        megabytes(int(down)) if down is not None else NONE,
        *([f"{epsilon:.3g}" if epsilon is not None else NONE] if _private(found) else []),
        f"{rounds:g}",
        duration(seconds) if seconds is not None else NONE,
    ]


def _private(found: Comparison) -> list[str]:
    told = any(row.group.number("epsilon") is not None for row in found.rows)
    return ["epsilon"] if told else []


def p_text(value: float | None) -> str:
    """A p value in few digits.

    >>> p_text(0.0371), p_text(0.00001)
    ('0.037', '< 0.001')
    """
    if value is None:
        return NONE
    return "< 0.001" if value < 0.001 else f"{value:.3f}"


def table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Cells as a table of Markdown; a bar within a cell stays one, and so does a line."""
    lines = [[" ".join(each.replace("|", "\\|").split()) for each in row] for row in (names, *rows)]
    said = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join([said[0], "|---" * len(names) + "|", *said[1:], ""])


def csv_text(found: Comparison) -> str:
    """The table as CSV: plain numbers, bytes and seconds; what is not known is empty."""
    out = StringIO()
    rows = [_flat(found, row) for row in found.rows]
    writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def _flat(found: Comparison, row: Contrast) -> dict[str, Any]:
    whole = _row(row)
    for name in ("mean", "difference"):
        held = whole.pop(name) or dict.fromkeys(("mean", "low", "high"))
        short = "score" if name == "mean" else name
        whole |= {short: held["mean"], f"{short}_low": held["low"], f"{short}_high": held["high"]}
    del whole["runs"], whole["differs"]
    return {"label": harmless(whole.pop("label")), "measure": found.score, **whole}


def plain(found: Comparison) -> dict[str, Any]:
    """A comparison as plain values."""
    return {
        "score": found.score,
        "higher_is_better": found.higher,
        "base": found.base.label,
        "groups": [_row(row) | {"runs": _runs(found, row)} for row in found.rows],
        "notes": list(found.notes),
    }


def _row(row: Contrast) -> dict[str, Any]:
    group = row.group
    return {
        "label": group.label,
        "seeds": row.score.count,
        "mean": _interval(row.score),
        "difference": _interval(row.difference),
        "p": row.p,
        "p_holm": row.corrected,
        "bytes_up": group.number("up"),
        "bytes_down": group.number("down"),
        "epsilon": group.number("epsilon"),
        "rounds": group.number("rounds"),
        "seconds": group.number("seconds"),
        "runs": [],
        "differs": list(row.words),
    }


def _interval(found: Interval | None) -> dict[str, float | None] | None:
    if found is None:
        return None
    held = {"mean": found.mean, "low": found.low, "high": found.high}
    return {name: _known(each) for name, each in held.items()}


def _known(number: float | None) -> float | None:
    """A number that JSON has; what is none is not known."""
    return number if number is not None and isfinite(number) else None


def _runs(found: Comparison, row: Contrast) -> list[dict[str, Any]]:
    return [
        {"seed": seed, "folder": str(run.folder), "score": _known(run.score(found.score))}
        for seed, run in sorted(row.group.runs.items())
    ]
