# SPDX-License-Identifier: Apache-2.0
"""Small multiples: one small chart for each of many, on one scale, with the mean of all behind."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from fedplan.reports.figures.drawing import Dot, Drawing, Shape, Stroke, Words, shortened
from fedplan.reports.figures.lines import pieces
from fedplan.reports.figures.scales import Scale, drawable, labels, scaled, spelled
from fedplan.reports.figures.series import Series

WIDE, TALL, GAP = 148.0, 92.0, 14.0
HEAD, LEFT = 32.0, 34.0


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
    """A panel for each series; `marked` ones have a word, and another hue; `behind` is in each."""
    words, columns = marked or {}, max(1, min(columns, len(series)))
    every = [*series, *([behind] if behind else [])]
    points = [point for each in every for point in each.points]
    shapes = list[Shape]()
    rows = -(-len(series) // columns)
    for number, each in enumerate(series):
        left = LEFT + number % columns * (WIDE + GAP)
        top = number // columns * (TALL + GAP)
        across = scaled([x for x, _ in points], left, left + WIDE, count=3, whole=True)
        up = scaled([y for _, y in points], top + TALL - 2, top + HEAD, count=3)
        shapes += _panel(each, behind, across, up, words.get(each.name, ""))
        if number % columns == 0:
            shapes += _numbers(up)
        if number // columns == rows - 1 or number + columns >= len(series):
            shapes += _rounds(across, up)
    told = [row[:3] for each in every for row in each.rows()]
    width = LEFT + columns * (WIDE + GAP)
    height = rows * (TALL + GAP) + 12
    columns_of = ("series", x, y or "value")
    return Drawing(title, width, height, tuple(shapes), columns_of, tuple(told))


def _panel(
    series: Series, behind: Series | None, across: Scale, up: Scale, word: str
) -> Iterator[Shape]:
    paint, top = ("c1" if word else "c0"), up.end - HEAD
    told = f"{series.last:.3g}" if series.last is not None else "no number"
    name = shortened(series.name, across.end - across.start - 40, 12)
    yield Words(across.start, top + 12, name, bold=True)
    yield Words(across.end, top + 12, told, paint, "end", bold=bool(word))
    if word:
        yield Words(across.start, top + 25, word, paint, size=11)
    for level in (up.ticks[0], up.ticks[-1]):
        yield Stroke(((across.start, up(level)), (across.end, up(level))), "grid")
    for held in pieces(behind.points) if behind else ():
        yield Stroke(tuple((across(x), up(y)) for x, y in held), "faint", 1.0, "3 2")
    for held in pieces(series.points):
        yield Stroke(tuple((across(x), up(y)) for x, y in held), paint, 1.8)
    known = [(x, y) for x, y in series.points if drawable(y)]
    for x, y in known[-1:]:
        form = "square" if word else "disc"
        yield Dot(across(x), up(y), paint, form, 3.0, f"{series.name}, {x:g}: {y:.4g}")


def _numbers(up: Scale) -> Iterator[Shape]:
    told = labels(up)
    for level, label in ((up.ticks[0], told[0]), (up.ticks[-1], told[-1])):
        yield Words(LEFT - 5, up(level) + 4, label, "faint", "end", 10)


def _rounds(across: Scale, up: Scale) -> Iterator[Shape]:
    ends = dict.fromkeys((across.low, across.high))
    for tick in ends:
        anchor = "start" if tick == across.low else "end"
        yield Words(across(tick), up.start + 13, spelled(tick), "faint", anchor, 10)
