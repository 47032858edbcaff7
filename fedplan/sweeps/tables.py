# SPDX-License-Identifier: Apache-2.0
"""A comparison as Markdown, as CSV and as plain values for JSON."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from io import StringIO
from math import isfinite
from typing import TYPE_CHECKING, Any

from fedplan.reports.figures.drawing import replace_control_chars, spreadsheet_safe
from fedplan.reports.formats import duration, megabytes
from fedplan.sweeps.statistics import Interval

if TYPE_CHECKING:
    from fedplan.sweeps.comparisons import Comparison, GroupComparison

EMPTY_CELL = ""
"""Text of a table cell without a value."""


def comparison_markdown(comparison: Comparison) -> str:
    """Return a comparison as Markdown: the table, the differences in words, and notes."""
    rows = comparison.rows
    parts = [markdown_table(column_names(comparison), [row_cells(comparison, row) for row in rows])]
    if different := [row for row in rows if row.differences]:
        parts.append(f"Differences from {comparison.baseline.label}:\n")
        parts += [f"- **{row.group.label}**: {'; '.join(row.differences)}." for row in different]
        parts.append("")
    notes = (*comparison.notes, table_explanation(comparison))
    parts += [f"Note: {replace_control_chars(note)}." for note in notes]
    return "\n".join(parts) + "\n"


def table_explanation(comparison: Comparison) -> str:
    """Return the sentence, without a period, that explains the columns of a comparison's table."""
    better = "higher" if comparison.higher_is_better else "lower"
    text = (
        f"{comparison.score} is the value of the last round that has it, {better} is better; ± is "
        "half the width of the 95 % confidence interval over seeds (Student's t)"
    )
    if len(comparison.rows) > 1:
        text += (
            f"; 'minus {comparison.baseline.label}' is the mean difference paired by seed, with an "
            "interval for each row by itself; p is of the paired t test, corrected for all rows of "
            "the table (Holm)"
        )
    return text


def column_names(comparison: Comparison) -> list[str]:
    """Return the names of the table's columns."""
    several = len(comparison.rows) > 1
    paired = [f"minus {comparison.baseline.label}", "p (Holm)"] if several else []
    epsilon = ["epsilon"] if _has_epsilon(comparison) else []
    return ["runs", "seeds", comparison.score, *paired, "MB up", "MB down", *epsilon,
            "rounds", "time"]  # fmt: skip


def row_cells(comparison: Comparison, row: GroupComparison) -> list[str]:
    """Return the cells of a group's row in a comparison's table, in the order of `column_names`.

    Upload and download are MB of a whole run, summed over clients, mean over the group's runs.
    """
    group, several = row.group, len(comparison.rows) > 1
    difference = row.difference.text() if row.difference else EMPTY_CELL
    up, down, seconds = map(group.mean_of, ("upload_bytes", "download_bytes", "seconds"))
    epsilon, rounds = group.mean_of("epsilon_spent"), group.mean_of("rounds")
    epsilon_cell = f"{epsilon:.3g}" if epsilon is not None else EMPTY_CELL
    return [
        group.label,
        str(row.score.count),
        row.score.text(),
        *([difference, format_p_value(row.p_holm)] if several else []),
        megabytes(int(up)) if up is not None else EMPTY_CELL,
        megabytes(int(down)) if down is not None else EMPTY_CELL,
        *([epsilon_cell] if _has_epsilon(comparison) else []),
        f"{rounds:g}",
        duration(seconds) if seconds is not None else EMPTY_CELL,
    ]


def _has_epsilon(comparison: Comparison) -> bool:
    return any(row.group.mean_of("epsilon_spent") is not None for row in comparison.rows)


def format_p_value(value: float | None) -> str:
    """Return a p-value with three decimals; an empty cell for None.

    >>> format_p_value(0.0371), format_p_value(0.00001)
    ('0.037', '< 0.001')
    """
    if value is None:
        return EMPTY_CELL
    return "< 0.001" if value < 0.001 else f"{value:.3f}"


def markdown_table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; bars in cells are escaped, and line breaks become spaces."""
    cells = [[" ".join(cell.replace("|", "\\|").split()) for cell in row] for row in (names, *rows)]
    lines = [f"| {' | '.join(row)} |" for row in cells]
    return "\n".join([lines[0], "|---" * len(names) + "|", *lines[1:], ""])


def comparison_csv(comparison: Comparison) -> str:
    """Return the table of a comparison as CSV with a header line, and a line for each group.

    Numbers are not rounded, sizes in bytes, times in seconds; unknown values are empty. An interval
    is three columns: the mean, and both ends.
    """
    rows = list[dict[str, Any]]()
    for row in comparison.rows:
        values = _group_values(row)
        for name in ("score", "difference"):
            interval = values.pop(name) or dict.fromkeys(("mean", "low", "high"))
            values[name] = interval["mean"]
            values |= {f"{name}_low": interval["low"], f"{name}_high": interval["high"]}
        del values["runs"], values["differences"]
        label = spreadsheet_safe(values.pop("label"))
        rows.append({"label": label, "metric": comparison.score, **values})
    output = StringIO()
    writer = csv.DictWriter(output, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return output.getvalue()


def comparison_values(comparison: Comparison) -> dict[str, Any]:
    """Return a comparison as plain values for JSON; numbers that are not finite become None."""
    groups = [_group_values(row) for row in comparison.rows]
    for values, row in zip(groups, comparison.rows, strict=True):
        values["runs"] = [
            {
                "seed": seed,
                "folder": str(run.folder),
                "score": _finite_or_none(run.score(comparison.score)),
            }
            for seed, run in sorted(row.group.runs.items())
        ]
    return {
        "metric": comparison.score,
        "higher_is_better": comparison.higher_is_better,
        "baseline": comparison.baseline.label,
        "groups": groups,
        "notes": list(comparison.notes),
    }


def _group_values(row: GroupComparison) -> dict[str, Any]:
    """Return the values of one group of a comparison by name.

    `runs` is an empty list, which `comparison_values` fills.
    """
    group = row.group
    return {
        "label": group.label,
        "seeds": row.score.count,
        "score": _interval_values(row.score),
        "difference": _interval_values(row.difference),
        "p": row.p,
        "p_holm": row.p_holm,
        "upload_bytes": group.mean_of("upload_bytes"),
        "download_bytes": group.mean_of("download_bytes"),
        "epsilon_spent": group.mean_of("epsilon_spent"),
        "rounds": group.mean_of("rounds"),
        "seconds": group.mean_of("seconds"),
        "runs": [],
        "differences": list(row.differences),
    }


def _interval_values(interval: Interval | None) -> dict[str, float | None] | None:
    if interval is None:
        return None
    ends = {"mean": interval.mean, "low": interval.low, "high": interval.high}
    return {name: _finite_or_none(value) for name, value in ends.items()}


def _finite_or_none(number: float | None) -> float | None:
    return number if number is not None and isfinite(number) else None
