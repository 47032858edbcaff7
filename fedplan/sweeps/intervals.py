# SPDX-License-Identifier: Apache-2.0
"""Interval chart: a mean with its confidence interval in each row, and a line at zero."""

from __future__ import annotations

from collections.abc import Sequence

from fedplan.reports.figures.drawing import (
    Dot,
    Drawing,
    Shape,
    Stroke,
    TextLabel,
    text_width,
    truncate_text,
)
from fedplan.reports.figures.scales import format_tick, make_scale
from fedplan.sweeps.statistics import Interval

ROW_HEIGHT, TOP, MAX_LABEL, RIGHT = 26.0, 8.0, 150.0, 20.0
"""Sizes in pixels: height of a row, top margin, widest row label, right margin."""


def interval_chart(
    title: str, rows: Sequence[tuple[str, Interval]], *, width: float = 480
) -> Drawing:
    """Return a chart with one row for each (name, interval): a line with a dot at the mean.

    A mean without an interval is a dot alone. Has a grid, and a dark line at zero. `width`: in
    pixels; the height grows with the rows, of which there must be one or more.
    """
    left = min(MAX_LABEL, 14 + max(text_width(name) for name, _ in rows))
    values = [v for _, each in rows for v in (each.mean, each.low, each.high) if v is not None]
    scale = make_scale((0.0, *values), left, width - RIGHT, count=4)
    bottom, largest = TOP + ROW_HEIGHT * len(rows), max(map(abs, scale.ticks))
    shapes = list[Shape]()
    for tick in scale.ticks:
        x, text = scale(tick), format_tick(tick, largest)
        shapes.append(Stroke(((x, TOP), (x, bottom)), "grid"))
        shapes.append(TextLabel(x, bottom + 16, text, "faint", "middle", 11))
    shapes.append(Stroke(((scale(0.0), TOP), (scale(0.0), bottom)), "ink", 1.2))
    for number, (name, each) in enumerate(rows):
        y, label = TOP + ROW_HEIGHT * (number + 0.5), truncate_text(name, scale.start - 10)
        shapes.append(TextLabel(scale.start - 8, y + 4, label, anchor="end"))
        if each.low is not None and each.high is not None:
            shapes.append(Stroke(((scale(each.low), y), (scale(each.high), y)), "c0", 2.0))
        tip = f"{name}: {each.text(4)}"
        shapes.append(Dot(scale(each.mean), y, "c0", "disc", 4.0, tip))
    table = tuple((name, each.mean, each.low, each.high) for name, each in rows)
    return Drawing(
        title, width, bottom + 26, tuple(shapes), ("group", "difference", "low", "high"), table
    )
