# SPDX-License-Identifier: Apache-2.0
"""Interval chart: a mean with its confidence interval in each row, and a line at zero."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fedplan.reports.figures.drawing import (
    Dot,
    Drawing,
    Shape,
    Stroke,
    TextLabel,
    text_width,
    truncate_text,
)
from fedplan.reports.figures.scales import Scale, format_tick, make_scale
from fedplan.sweeps.statistics import Interval

ROW_HEIGHT, TOP, MAX_LABEL, RIGHT = 26.0, 8.0, 150.0, 20.0
"""Sizes in pixels: height of a row, top margin, widest row label, right margin."""


def interval_chart(
    title: str, rows: Sequence[tuple[str, Interval]], *, width: float = 480
) -> Drawing:
    """Return a chart with a named interval in each row; a mean without an interval is a dot."""
    left = min(MAX_LABEL, 14 + max(text_width(name) for name, _ in rows))
    values = [v for _, each in rows for v in (each.mean, each.low, each.high) if v is not None]
    scale = make_scale((0.0, *values), left, width - RIGHT, count=4)
    bottom = TOP + ROW_HEIGHT * len(rows)
    shapes = [*_axis_shapes(scale, bottom)]
    for number, (name, each) in enumerate(rows):
        shapes += _row_shapes(name, each, scale, TOP + ROW_HEIGHT * (number + 0.5))
    table = tuple((name, each.mean, each.low, each.high) for name, each in rows)
    return Drawing(
        title, width, bottom + 26, tuple(shapes), ("group", "difference", "low", "high"), table
    )


def _axis_shapes(scale: Scale, bottom: float) -> Iterator[Shape]:
    """Yield grid lines with labels at the ticks, and a dark line at zero."""
    largest = max(map(abs, scale.ticks))
    for tick in scale.ticks:
        x = scale(tick)
        yield Stroke(((x, TOP), (x, bottom)), "grid")
        yield TextLabel(x, bottom + 16, format_tick(tick, largest), "faint", "middle", 11)
    yield Stroke(((scale(0.0), TOP), (scale(0.0), bottom)), "ink", 1.2)


def _row_shapes(name: str, interval: Interval, scale: Scale, y: float) -> Iterator[Shape]:
    """Yield the label, the interval's line and the mean's dot of a row at height `y`."""
    yield TextLabel(scale.start - 8, y + 4, truncate_text(name, scale.start - 10), anchor="end")
    if interval.low is not None and interval.high is not None:
        yield Stroke(((scale(interval.low), y), (scale(interval.high), y)), "c0", 2.0)
    yield Dot(scale(interval.mean), y, "c0", "disc", 4.0, f"{name}: {interval.text(4)}")
