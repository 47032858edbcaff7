# SPDX-License-Identifier: Apache-2.0
"""Bubble charts: a dot for each row and column whose area is the amount."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from math import sqrt

from fedplan.reports.figures.drawing import (
    Dot,
    Drawing,
    Shape,
    TextLabel,
    text_width,
    truncate_text,
)

ROW_HEIGHT, MIN_COLUMN, MAX_COLUMN = 22.0, 14.0, 84.0
"""The height of a row, and the least and most width of a column."""
MAX_LABEL_WIDTH, SUM_WIDTH = 150.0, 64.0
"""The most room for names at the left, and the room for sums at the right."""


def bubble_chart(
    title: str,
    amounts: Mapping[str, Mapping[str, int]],
    *,
    columns: Sequence[str],
    sums: Mapping[str, int],
    row: str = "row",
    column: str = "column",
    width: float = 720,
) -> Drawing:
    """Return a drawing with a dot for each amount above 0; the dot's area shows the amount.

    `amounts` are by row name, then by column name. `columns` are all column names in order; `sums`
    are the numbers written at the ends of rows, by row name. `row` and `column` are headers of the
    CSV, `width` is in pixels. If column names are too long, the columns are numbered, and the names
    listed below.
    """
    left = min(MAX_LABEL_WIDTH, 18 + max((text_width(name) for name in amounts), default=0.0))
    step = min(MAX_COLUMN, max(MIN_COLUMN, (width - left - SUM_WIDTH) / max(1, len(columns))))
    fits = all(text_width(name, 11) + 6 <= step for name in columns)
    shapes, top = list[Shape](), 22.0 if columns else 4.0
    for number, name in enumerate(columns):
        if fits or number == 0 or not (number + 1) % (5 if step < 22 else 1):
            at = left + (number + 0.5) * step
            shapes.append(
                TextLabel(at, 14, name if fits else str(number + 1), "faint", "middle", 11)
            )
    largest = max((n for counts in amounts.values() for n in counts.values()), default=0) or 1
    max_radius = min(ROW_HEIGHT, step) / 2 - 1
    for place, (name, counts) in enumerate(amounts.items()):
        y = top + place * ROW_HEIGHT + ROW_HEIGHT / 2
        shapes.append(TextLabel(left - 8, y + 4, truncate_text(name, left - 10), anchor="end"))
        for number, each in enumerate(columns):
            if amount := counts.get(each, 0):
                at, tip = left + (number + 0.5) * step, f"{name}, {each}: {amount}"
                radius = max(1.0, max_radius * sqrt(amount / largest))
                shapes.append(Dot(at, y, "c0", size=radius, tip=tip))
        end = left + len(columns) * step + 8
        shapes.append(TextLabel(end, y + 4, f"{sums[name]:,}", "faint", size=11))
    bottom, full_width = (
        top + len(amounts) * ROW_HEIGHT,
        max(width, left + len(columns) * step + SUM_WIDTH),
    )
    key = [] if fits else [f"{n} {name}" for n, name in enumerate(columns, 1)]
    for line in _wrap(key, full_width):
        bottom += 16
        shapes.append(TextLabel(8, bottom, line, "faint", size=11))
    rows = [(name, each, n) for name, counts in amounts.items() for each, n in counts.items()]
    columns_csv = (row, column, "count")
    return Drawing(title, full_width, bottom + 8, tuple(shapes), columns_csv, tuple(rows))


def _wrap(texts: Sequence[str], width: float) -> Iterator[str]:
    """Yield texts joined by commas, in lines that fit into a width in pixels."""
    line = ""
    for text, following in pairwise([*texts, ""]):
        line += text + (", " if following else "")
        if text_width(line + following, 11) > width - 16 or not following:
            yield line
            line = ""
