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
    """Return a drawing with a panel per series, at most `columns` side by side, on common scales.

    `marked` maps names of series to a word for their panel; these series get another colour.
    `behind` is a series drawn dashed in every panel. `x` and `y` name the columns of the CSV.
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
            texts = tick_labels(up)
            for level, label in ((up.ticks[0], texts[0]), (up.ticks[-1], texts[-1])):
                shapes.append(TextLabel(LEFT - 5, up(level) + 4, label, "faint", "end", 10))
        if number // columns == rows - 1 or number + columns >= len(series):
            for tick in dict.fromkeys((across.low, across.high)):
                anchor, text = ("start" if tick == across.low else "end"), format_tick(tick)
                shapes.append(TextLabel(across(tick), up.start + 13, text, "faint", anchor, 10))
    table = [row[:3] for each in every for row in each.rows()]
    width = LEFT + columns * (PANEL_WIDTH + GAP)
    height = rows * (PANEL_HEIGHT + GAP) + 12
    header = ("series", x, y or "value")
    return Drawing(title, width, height, tuple(shapes), header, tuple(table))


def _panel(
    series: Series, behind: Series | None, across: Scale, up: Scale, word: str
) -> Iterator[Shape]:
    """Yield the shapes of the panel of a series: name, last value, mark `word`, and lines.

    `behind` is a dashed second series; `across` and `up` are the scales of x and y.
    """
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
