# SPDX-License-Identifier: Apache-2.0
"""Interval charts: a mean and its interval in each row, against zero."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fedplan.reports.figures.drawing import Dot, Drawing, Shape, Stroke, Words, shortened, width_of
from fedplan.reports.figures.scales import Scale, scaled, spelled
from fedplan.sweeps.statistics import Interval

ROW, TOP, LABEL, RIGHT = 26.0, 8.0, 150.0, 20.0


def interval_chart(
    title: str, rows: Sequence[tuple[str, Interval]], *, width: float = 480
) -> Drawing:
    """Rows by name; of a number without an interval there is the dot alone."""
    left = min(LABEL, 14 + max(width_of(name) for name, _ in rows))
    ends = [end for _, each in rows for end in (each.mean, each.low, each.high) if end is not None]
    across = scaled((0.0, *ends), left, width - RIGHT, count=4)
    bottom = TOP + ROW * len(rows)
    shapes = [*_frame(across, bottom)]
    for number, (name, each) in enumerate(rows):
        shapes += _row(name, each, across, TOP + ROW * (number + 0.5))
    told = tuple((name, each.mean, each.low, each.high) for name, each in rows)
    return Drawing(
        title, width, bottom + 26, tuple(shapes), ("group", "difference", "low", "high"), told
    )


def _frame(across: Scale, bottom: float) -> Iterator[Shape]:
    most = max(map(abs, across.ticks))
    for tick in across.ticks:
        place = across(tick)
        yield Stroke(((place, TOP), (place, bottom)), "grid")
        yield Words(place, bottom + 16, spelled(tick, most), "faint", "middle", 11)
    yield Stroke(((across(0.0), TOP), (across(0.0), bottom)), "ink", 1.2)


def _row(name: str, each: Interval, across: Scale, y: float) -> Iterator[Shape]:
    yield Words(across.start - 8, y + 4, shortened(name, across.start - 10), anchor="end")
    if each.low is not None and each.high is not None:
        yield Stroke(((across(each.low), y), (across(each.high), y)), "c0", 2.0)
    yield Dot(across(each.mean), y, "c0", "disc", 4.0, f"{name}: {each.text(4)}")
