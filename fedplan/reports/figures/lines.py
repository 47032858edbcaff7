# SPDX-License-Identifier: Apache-2.0
"""Line charts: series over rounds, each with its name at its end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from fedplan.reports.figures.drawing import (
    Area,
    Dot,
    Drawing,
    Shape,
    Stroke,
    Words,
    shortened,
    width_of,
)
from fedplan.reports.figures.palette import FORMS, HUES
from fedplan.reports.figures.scales import Scale, drawable, labels, scaled
from fedplan.reports.figures.series import Point, Series

LEFT, TOP, BOTTOM, FAR_RIGHT = 46.0, 26.0, 38.0, 130.0
LINE = 13.0
"""How far apart names at the ends of lines stand at least."""
MANY = 24
"""Points from which on only some are marked."""
BAND = "5 3"


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
    """Lines by name, each with its hue and form; the first six have one of their own.

    `limit` is a level with its name. `expected` is a band that stands behind all. `whole` says that
    what stands along the bottom are whole numbers; `named` are words for 0, 1, 2 ... there.
    """
    shown = [each for each in series if any(drawable(y) for _, y in each.points)]
    behind = [expected] if expected else []
    names = [each.name for each in (*shown, *behind)] + ([limit[0]] if limit else [])
    right = min(FAR_RIGHT, 26 + max((width_of(name, 11) for name in names), default=0.0))
    width, height = size
    across, up = _scales(
        (*shown, *behind), limit, (LEFT, width - right), (height - BOTTOM, TOP), whole=whole
    )
    shapes = [
        *frame(across, up, x=x, y=y, named=named),
        *(_behind(expected, across, up) if expected else ()),
        *(_level(limit[1], across, up) if limit else ()),
        *(each for place, one in enumerate(shown) for each in _line(one, place, across, up)),
        *_names(shown, expected, limit, across, up, right),
    ]
    told = [row for each in (*shown, *behind) for row in each.rows()]
    return Drawing(
        title,
        width,
        height,
        tuple(shapes),
        ("series", x, y or "value", "lowest", "highest"),
        (*told, *([(limit[0], None, limit[1], None, None)] if limit else [])),
    )


def frame(
    across: Scale, up: Scale, *, x: str = "", y: str = "", named: Sequence[str] = ()
) -> Iterator[Shape]:
    """Level lines with their numbers, and the rounds below."""
    for tick, label in zip(up.ticks, labels(up), strict=True):
        place = up(tick)
        yield Stroke(((across.start, place), (across.end, place)), "grid")
        yield Words(across.start - 6, place + 4, label, "faint", "end", 11)
    for tick, label in zip(across.ticks, labels(across), strict=True):
        place = across(tick)
        yield Stroke(((place, up.start), (place, up.start + 4)), "faint")
        label = named[int(tick)] if 0 <= tick < len(named) else label
        yield Words(place, up.start + 16, label, "faint", "middle", 11)
    yield Words((across.start + across.end) / 2, up.start + 31, x, "faint", "middle", 11)
    by = ", by factors" if up.factors else ""
    yield Words(4, up.end - 11, f"{y}{by}", "faint", size=11)


def _scales(
    series: Iterable[Series],
    limit: tuple[str, float] | None,
    across: Point,
    up: Point,
    *,
    whole: bool,
) -> tuple[Scale, Scale]:
    points = [point for each in series for point in each.points]
    ends = [end for each in series for pair in each.band for end in pair]
    levels = [limit[1]] if limit else []
    xs, ys = [x for x, y in points if drawable(y)], [y for _, y in points]
    return scaled(xs, *across, whole=whole), scaled((*ys, *ends, *levels), *up)


def pieces(points: Iterable[Point]) -> Iterator[list[Point]]:
    """Points in a row; one that is no number breaks the line."""
    held = list[Point]()
    for x, y in points:
        if drawable(y):
            held.append((x, y))
        elif held:
            yield held
            held = []
    if held:
        yield held


def _line(series: Series, place: int, across: Scale, up: Scale) -> Iterator[Shape]:
    paint, form = _look(place)
    if series.band and all(drawable(end) for pair in series.band for end in pair):
        yield Area(_outline(series, across, up), paint)
    for held in pieces(series.points):
        dash = "" if place < len(HUES) else BAND
        yield Stroke(tuple((across(x), up(y)) for x, y in held), paint, 1.8, dash)
    every = max(1, len(series.points) // MANY)
    for number, (x, y) in enumerate(series.points):
        if drawable(y) and (number % every == 0 or number == len(series.points) - 1):
            yield Dot(across(x), up(y), paint, form, 2.6, f"{series.name}, {x:g}: {y:.4g}")


def _look(place: int) -> tuple[str, str]:
    """The hue and the form of a series; those beyond the sixth are faint, and dashed."""
    return HUES[place] if place < len(HUES) else "faint", FORMS[place % len(FORMS)]


def _outline(series: Series, across: Scale, up: Scale) -> tuple[Point, ...]:
    pairs = [(across(x), pair) for (x, _), pair in zip(series.points, series.band, strict=True)]
    there = [(x, up(high)) for x, (_, high) in pairs]
    back = [(x, up(low)) for x, (low, _) in reversed(pairs)]
    return (*there, *back)


def _behind(series: Series, across: Scale, up: Scale) -> Iterator[Shape]:
    if series.band:
        yield Area(_outline(series, across, up), "faint")
    for held in pieces(series.points):
        yield Stroke(tuple((across(x), up(y)) for x, y in held), "faint", 1.2, BAND)


def _level(level: float, across: Scale, up: Scale) -> Iterator[Shape]:
    yield Stroke(((across.start, up(level)), (across.end, up(level))), "c1", 1.4, BAND)


def _names(
    shown: Sequence[Series],
    expected: Series | None,
    limit: tuple[str, float] | None,
    across: Scale,
    up: Scale,
    right: float,
) -> Iterator[Shape]:
    """Names at the ends of their lines, pushed apart where they would lie over each other."""
    wanted = [
        (up(each.last), each.name, _look(place))
        for place, each in enumerate(shown)
        if each.last is not None
    ]
    if limit:
        wanted.append((up(limit[1]), limit[0], ("c1", "")))
    if expected and expected.last is not None:
        wanted.append((up(expected.last), expected.name, ("faint", "")))
    places = apart([place for place, _, _ in wanted], LINE, up.end, up.start)
    for place, (near, name, (paint, form)) in zip(places, wanted, strict=True):
        if form and abs(place - near) > 2:  # else its last point stands there
            yield Dot(across.end + 8, place, paint, form, 2.6)
        yield Words(across.end + 15, place + 4, shortened(name, right - 15, 11), paint, size=11)


def apart(wanted: Sequence[float], room: float, low: float, high: float) -> list[float]:
    """Places as near to those wanted as can be, no two nearer than `room`, in the same order."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    places, last = dict[int, float](), low - room
    for i in order:
        last = places[i] = max(wanted[i], last + room)
    over = high
    for i in reversed(order):
        over = places[i] = min(places[i], over)
        over -= room
    return [places[i] for i in range(len(wanted))]
