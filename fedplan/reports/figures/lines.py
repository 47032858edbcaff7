# SPDX-License-Identifier: Apache-2.0
"""Line charts of series over rounds, each with its name at the end of its line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from fedplan.reports.figures.drawing import (
    Area,
    Dot,
    Drawing,
    Shape,
    Stroke,
    TextLabel,
    text_width,
    truncate_text,
)
from fedplan.reports.figures.palette import FORMS, HUES
from fedplan.reports.figures.scales import Scale, is_drawable, make_scale, tick_labels
from fedplan.reports.figures.series import Point, Series

LEFT, TOP, BOTTOM, MAX_RIGHT = 46.0, 26.0, 38.0, 130.0
"""The margins of the plot; the right one holds names."""
NAME_HEIGHT = 13.0
"""The least distance of names at the ends of lines."""
MAX_MARKERS = 24
"""About the most points of a series that get a marker."""
DASH = "5 3"
"""The dash pattern of forecasts, limits and series beyond the sixth."""


def line_chart(
    title: str,
    series: Sequence[Series],
    *,
    x: str = "round",
    y: str = "",
    limit: tuple[str, float] | None = None,
    expected: Series | None = None,
    whole: bool = True,
    named: Sequence[str] = (),
    size: tuple[float, float] = (480, 260),
) -> Drawing:
    """Return a drawing of series as lines, each with a name, a colour and a marker.

    Six series have a colour of their own, further ones are grey. `x` and `y` label the axes;
    `limit` is (name, level) of a horizontal dashed line; `expected` is a forecast, drawn behind the
    lines as a dashed line with its band. `whole`: the x axis is linear and has whole numbers only.
    `named` are texts in place of 0, 1, 2 and so on at the x axis. `size` is (width, height) in
    pixels. Series without finite values are left out.
    """
    drawn = [each for each in series if any(is_drawable(y) for _, y in each.points)]
    behind = [expected] if expected else []
    names = [each.name for each in (*drawn, *behind)] + ([limit[0]] if limit else [])
    right = min(MAX_RIGHT, 26 + max((text_width(name, 11) for name in names), default=0.0))
    width, height = size
    points = [point for each in (*drawn, *behind) for point in each.points]
    levels = [end for each in (*drawn, *behind) for pair in each.band for end in pair]
    levels += [level for _, level in points] + ([limit[1]] if limit else [])
    xs = [each for each, level in points if is_drawable(level)]
    across = make_scale(xs, LEFT, width - right, whole=whole)
    up = make_scale(levels, height - BOTTOM, TOP)
    shapes = list(axes_shapes(across, up, x=x, y=y, named=named))
    if expected and expected.band:
        shapes.append(Area(_band_outline(expected, across, up), "faint"))
    for run in split_at_gaps(expected.points if expected else ()):
        shapes.append(Stroke(tuple((across(x), up(y)) for x, y in run), "faint", 1.2, DASH))
    if limit:
        ends = ((across.start, up(limit[1])), (across.end, up(limit[1])))
        shapes.append(Stroke(ends, "c1", 1.4, DASH))
    for place, each in enumerate(drawn):
        shapes += _line(each, place, across, up)
    shapes += _names(drawn, expected, limit, across, up, right)
    rows = [row for each in (*drawn, *behind) for row in each.rows()]
    return Drawing(
        title,
        width,
        height,
        tuple(shapes),
        ("series", x, y or "value", "lowest", "highest"),
        (*rows, *([(limit[0], None, limit[1], None, None)] if limit else [])),
    )


def axes_shapes(
    across: Scale, up: Scale, *, x: str = "", y: str = "", named: Sequence[str] = ()
) -> Iterator[Shape]:
    """Yield grid lines, tick labels and axis names for the scales of x (`across`) and y (`up`).

    `x` and `y` name the axes; `named` replaces the labels of x at 0, 1, 2 and so on.
    """
    for tick, label in zip(up.ticks, tick_labels(up), strict=True):
        place = up(tick)
        yield Stroke(((across.start, place), (across.end, place)), "grid")
        yield TextLabel(across.start - 6, place + 4, label, "faint", "end", 11)
    for tick, label in zip(across.ticks, tick_labels(across), strict=True):
        place = across(tick)
        yield Stroke(((place, up.start), (place, up.start + 4)), "faint")
        label = named[int(tick)] if 0 <= tick < len(named) else label
        yield TextLabel(place, up.start + 16, label, "faint", "middle", 11)
    yield TextLabel((across.start + across.end) / 2, up.start + 31, x, "faint", "middle", 11)
    log = ", log scale" if up.log else ""
    yield TextLabel(4, up.end - 11, f"{y}{log}", "faint", size=11)


def split_at_gaps(points: Iterable[Point]) -> Iterator[list[Point]]:
    """Split points where y is not finite or its magnitude exceeds 1e100; yield each part."""
    run = list[Point]()
    for x, y in points:
        if is_drawable(y):
            run.append((x, y))
        elif run:
            yield run
            run = []
    if run:
        yield run


def _line(series: Series, place: int, across: Scale, up: Scale) -> Iterator[Shape]:
    """Yield the band, line and markers of the series with number `place` on two scales."""
    paint, form = _paint_and_marker(place)
    if series.band and all(is_drawable(end) for pair in series.band for end in pair):
        yield Area(_band_outline(series, across, up), paint)
    for run in split_at_gaps(series.points):
        dash = "" if place < len(HUES) else DASH
        yield Stroke(tuple((across(x), up(y)) for x, y in run), paint, 1.8, dash)
    every = max(1, len(series.points) // MAX_MARKERS)
    for number, (x, y) in enumerate(series.points):
        if is_drawable(y) and (number % every == 0 or number == len(series.points) - 1):
            yield Dot(across(x), up(y), paint, form, 2.6, f"{series.name}, {x:g}: {y:.4g}")


def _paint_and_marker(place: int) -> tuple[str, str]:
    """Return (paint, marker) of the series with number `place`; all beyond the sixth are grey."""
    return HUES[place] if place < len(HUES) else "faint", FORMS[place % len(FORMS)]


def _band_outline(series: Series, across: Scale, up: Scale) -> tuple[Point, ...]:
    """Return the polygon of the band of a series on two scales."""
    pairs = [(across(x), pair) for (x, _), pair in zip(series.points, series.band, strict=True)]
    forward = [(x, up(high)) for x, (_, high) in pairs]
    back = [(x, up(low)) for x, (low, _) in reversed(pairs)]
    return (*forward, *back)


def _names(
    series: Sequence[Series],
    expected: Series | None,
    limit: tuple[str, float] | None,
    across: Scale,
    up: Scale,
    right: float,
) -> Iterator[Shape]:
    """Yield the names at the ends of all lines, spread where they would overlap.

    `across` and `up` are the scales of x and y, `right` the room in pixels at the right.
    """
    names = [
        (up(each.last), each.name, _paint_and_marker(place))
        for place, each in enumerate(series)
        if each.last is not None
    ]
    if limit:
        names.append((up(limit[1]), limit[0], ("c1", "")))
    if expected and expected.last is not None:
        names.append((up(expected.last), expected.name, ("faint", "")))
    places = spread_labels([y for y, _, _ in names], NAME_HEIGHT, up.end, up.start)
    for place, (near, name, (paint, form)) in zip(places, names, strict=True):
        if form and abs(place - near) > 2:  # else the last marker of the line is beside it
            yield Dot(across.end + 8, place, paint, form, 2.6)
        yield TextLabel(
            across.end + 15, place + 4, truncate_text(name, right - 15, 11), paint, size=11
        )


def spread_labels(
    targets: Sequence[float], distance: float, low: float, high: float
) -> list[float]:
    """Return a position near each target, with at least `distance` between any two positions.

    `targets` may have any order; position i is that of target i. The positions are between `low`
    and `high`; if there is too little room, the distances are kept, and some positions are below
    `low`.
    """
    order = sorted(range(len(targets)), key=lambda i: targets[i])
    places, last = dict[int, float](), low - distance
    for i in order:
        last = places[i] = max(targets[i], last + distance)
    over = high
    for i in reversed(order):
        over = places[i] = min(places[i], over)
        over -= distance
    return [places[i] for i in range(len(targets))]
