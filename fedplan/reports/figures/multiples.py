# SPDX-License-Identifier: Apache-2.0
"""Small multiples: one small chart per series, all on the same scales."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from fedplan.reports.figures.drawing import Dot, Drawing, Shape, Stroke, TextLabel, truncate_text
from fedplan.reports.figures.lines import split_at_gaps
from fedplan.reports.figures.scales import Scale, format_tick, is_drawable, make_scale, tick_labels
from fedplan.reports.figures.series import Series

PANEL_WIDTH, PANEL_HEIGHT, GAP = 148.0, 92.0, 14.0
"""The size of a panel, and the gap between panels."""
HEADER, LEFT = 32.0, 34.0
"""The room for a panel's name, and for the y labels."""


def small_multiples(
    title: str,
    series: Sequence[Series],
    *,
    marked: Mapping[str, str] | None = None,
    behind: Series | None = None,
    x: str = "round",
    y: str = "",
    columns: int = 6,
) -> Drawing:
    """Return a drawing with a panel per series, at most `columns` side by side.

    `marked` maps names of series to a word; they get another colour. `behind` is drawn dashed in
    every panel.
    """
    marks, columns = marked or {}, max(1, min(columns, len(series)))
    every = [*series, *([behind] if behind else [])]
    points = [point for each in every for point in each.points]
    shapes = list[Shape]()
    rows = -(-len(series) // columns)
    for number, each in enumerate(series):
        left = LEFT + number % columns * (PANEL_WIDTH + GAP)
        top = number // columns * (PANEL_HEIGHT + GAP)
        across = make_scale([x for x, _ in points], left, left + PANEL_WIDTH, count=3, whole=True)
        up = make_scale([y for _, y in points], top + PANEL_HEIGHT - 2, top + HEADER, count=3)
        shapes += _panel(each, behind, across, up, marks.get(each.name, ""))
        if number % columns == 0:
            shapes += _y_labels(up)
        if number // columns == rows - 1 or number + columns >= len(series):
            shapes += _x_labels(across, up)
    table = [row[:3] for each in every for row in each.rows()]
    width = LEFT + columns * (PANEL_WIDTH + GAP)
    height = rows * (PANEL_HEIGHT + GAP) + 12
    header = ("series", x, y or "value")
    return Drawing(title, width, height, tuple(shapes), header, tuple(table))


def _panel(
    series: Series, behind: Series | None, across: Scale, up: Scale, word: str
) -> Iterator[Shape]:
    """Yield the shapes of a panel: name, last value, mark `word`, and lines."""
    paint, top = ("c1" if word else "c0"), up.end - HEADER
    last = f"{series.last:.3g}" if series.last is not None else "no value"
    name = truncate_text(series.name, across.end - across.start - 40, 12)
    yield TextLabel(across.start, top + 12, name, bold=True)
    yield TextLabel(across.end, top + 12, last, paint, "end", bold=bool(word))
    if word:
        yield TextLabel(across.start, top + 25, word, paint, size=11)
    for level in (up.ticks[0], up.ticks[-1]):
        yield Stroke(((across.start, up(level)), (across.end, up(level))), "grid")
    for run in split_at_gaps(behind.points) if behind else ():
        yield Stroke(tuple((across(x), up(y)) for x, y in run), "faint", 1.0, "3 2")
    for run in split_at_gaps(series.points):
        yield Stroke(tuple((across(x), up(y)) for x, y in run), paint, 1.8)
    finite = [(x, y) for x, y in series.points if is_drawable(y)]
    for x, y in finite[-1:]:
        form = "square" if word else "disc"
        yield Dot(across(x), up(y), paint, form, 3.0, f"{series.name}, {x:g}: {y:.4g}")


def _y_labels(up: Scale) -> Iterator[Shape]:
    """Yield the labels of the lowest and highest tick."""
    texts = tick_labels(up)
    for level, label in ((up.ticks[0], texts[0]), (up.ticks[-1], texts[-1])):
        yield TextLabel(LEFT - 5, up(level) + 4, label, "faint", "end", 10)


def _x_labels(across: Scale, up: Scale) -> Iterator[Shape]:
    """Yield the labels of the first and last round."""
    ends = dict.fromkeys((across.low, across.high))
    for tick in ends:
        anchor = "start" if tick == across.low else "end"
        yield TextLabel(across(tick), up.start + 13, format_tick(tick), "faint", anchor, 10)
