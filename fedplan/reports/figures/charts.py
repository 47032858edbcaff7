# SPDX-License-Identifier: Apache-2.0
"""Charts with axes: lines over rounds, small multiples, horizontal bars and intervals."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, floor, fsum, log10, nan
from typing import TYPE_CHECKING, Any

from fedplan.errors import printable
from fedplan.reports.figures.drawing import (
    HUES,
    LIGHT,
    Drawing,
    add_axes,
    is_drawable,
    text_width,
    tip,
    truncate_text,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from fedplan.reports.figures.drawing import Canvas

Point = tuple[float, float]
MARKERS: tuple[dict[str, Any], ...] = (
    *({"marker": form, "markeredgewidth": 0.0} for form in ("o", "s", "^", "D")),
    {"marker": "o", "markerfacecolor": "none", "markeredgewidth": 1.5},
    {"marker": "x", "markeredgewidth": 1.5},
)
"""The markers of series: hue and marker change together."""
MAX_MARKERS = 24
"""About the most points of a series that get a marker."""
DASH = (0, (5, 3))
"""The dash pattern of forecasts, limits and series beyond the sixth."""
BAND = 0.22
"""The opacity of bands."""
NAME_HEIGHT = 13.0
"""The least distance of names at the ends of lines."""
LOG_RATIO = 100.0
"""The ratio of the largest to the smallest number from which a log scale is used."""
SMALLEST = 1e-100
"""Smaller magnitudes count as 0."""
PANEL_WIDTH, PANEL_HEIGHT, PANEL_GAP, PANEL_HEADER, PANEL_LEFT = 148.0, 58.0, 14.0, 32.0, 34.0
"""Sizes of small multiples: a panel's plot, the gap, and the room for names and for y labels."""
BAR_STEP = 26.0
"""The height of a row of bars or intervals."""


@dataclass(frozen=True)
class Series:
    """A series of points (x, y), with the lowest and highest y at each point, or no band."""

    name: str
    points: tuple[Point, ...]
    band: tuple[Point, ...] = ()

    @property
    def last(self) -> float | None:
        """The last y that can be drawn (see `is_drawable`), or None."""
        finite = [y for _, y in self.points if is_drawable(y)]
        return finite[-1] if finite else None

    def rows(self) -> list[tuple[object, ...]]:
        """Return a row (name, x, y, lowest, highest) for each point."""
        bands = self.band or ((None, None),) * len(self.points)
        pairs = zip(self.points, bands, strict=True)
        return [(self.name, x, y, low, high) for (x, y), (low, high) in pairs]


def mean_series(name: str, several: Sequence[Series]) -> Series:
    """Return the mean of several series, called `name`, at each x where all of them have a point.

    Two or more series give a band from the lowest to the highest, one has its own; none give no
    points.
    """
    if len(several) == 1:
        return replace(several[0], name=name)
    values = [dict(each.points) for each in several]
    xs = sorted(set(values[0]).intersection(*values[1:])) if values else []
    columns = [(x, [each[x] for each in values]) for x in xs]
    return Series(
        name,
        tuple((x, fsum(ys) / len(ys)) for x, ys in columns),
        tuple((min(ys), max(ys)) for _, ys in columns),
    )


def line_chart(
    title: str,
    series: Sequence[Series],
    *,
    x: str = "round",
    y: str = "",
    limit: tuple[str, float] | None = None,
    expected: Series | None = None,
    whole: bool = True,
    from_zero: bool = False,
    named: Sequence[str] = (),
    size: tuple[float, float] = (480, 260),
) -> Drawing:
    """Return a chart of series as lines, each with a name, a colour and a marker.

    Six series have a colour of their own, further ones are grey. `x` and `y` label the axes;
    `limit` is (name, level) of a horizontal dashed line; `expected` is a forecast, drawn behind the
    lines as a dashed line with its band. `whole`: the x axis is linear and has whole numbers only.
    `from_zero`: the y axis is linear and includes 0. `named` are texts in place of 0, 1, 2 and so
    on at the x axis. `size` is (width, height) in pixels. Series without finite values are left
    out.
    """
    drawn = [each for each in series if each.last is not None]
    every = [*drawn, *([expected] if expected else [])]
    levels = [level for each in every for _, level in each.points]
    levels += [end for each in every for pair in each.band for end in pair]
    levels += ([limit[1]] if limit else []) + ([0.0] if from_zero else [])
    xs = [place for each in every for place, level in each.points if is_drawable(level)]

    def draw(figure: Canvas) -> None:
        # (name, y, colour, marker) at the end of each line
        ends: list[tuple[str, float, str, dict[str, Any]]] = [
            (each.name, each.last, LIGHT[_hue(n)], MARKERS[n % len(MARKERS)])
            for n, each in enumerate(drawn)
            if each.last is not None
        ]
        ends += [(limit[0], limit[1], LIGHT["c1"], {})] if limit else []
        if expected and expected.last is not None:
            ends.append((expected.name, expected.last, LIGHT["faint"], {}))
        room = 26 + max((text_width(name, 11) for name, *_ in ends), default=0.0)
        right = min(0.34 * size[0], room)
        _, ticks, log = axis_ticks(levels, linear=from_zero)
        left = max(46.0, 12 + max(text_width(text, 11) for text in tick_labels(ticks, log=log)))
        ax, width, height = add_axes(figure, left, 38, right, 26)
        ax.grid(visible=False, axis="x")
        ax.tick_params(axis="x", length=4)
        _scale(ax, "x", xs, whole=whole, names=named)
        _scale(ax, "y", levels, linear=from_zero)
        ax.set_xlabel(x, labelpad=3)
        lowest = tick_labels(ticks, log=log)[0]
        label = f"{y}{', log scale' if log else f', from {lowest}' if min(ticks) > 0 else ''}"
        _write(ax, label, (0, 1), (4 - left, 11), size=11, color=LIGHT["faint"])
        if expected:
            _line(ax, expected, LIGHT["faint"], linewidth=1.2, linestyle=DASH)
        if limit and is_drawable(limit[1]):
            ax.plot((0, 1), (limit[1],) * 2, transform=ax.get_yaxis_transform(),
                    color=LIGHT["c1"], linewidth=1.4, linestyle=DASH, clip_on=False)  # fmt: skip
        for n, each in enumerate(drawn):
            color, marker = LIGHT[_hue(n)], MARKERS[n % len(MARKERS)]
            _line(ax, each, color, linestyle="-" if n < len(HUES) else DASH)
            stride = max(1, len(each.points) // MAX_MARKERS)
            for number, (place, level) in enumerate(each.points):
                last = number == len(each.points) - 1
                if is_drawable(level) and (number % stride == 0 or last):
                    _dot(ax, place, level, f"{each.name}, {place:g}: {level:.4g}", color, **marker)
        to_axes = ax.transScale + ax.transLimits
        start = ax.get_xlim()[0]
        tops = [height * (1 - to_axes.transform((start, level))[1]) for _, level, *_ in ends]
        for (name, _, color, marker), near, place in zip(
            ends, tops, spread_labels(tops, NAME_HEIGHT, 0.0, height), strict=True
        ):
            if marker and abs(place - near) > 2:  # else the last marker of the line is beside it
                at = (1 + 8 / width, 1 - place / height)
                _dot(ax, *at, "", color, transform=ax.transAxes, **marker)
            name = truncate_text(name, right - 15, 11)
            _write(ax, name, (1, 1 - place / height), (15, -4), size=11, color=color)

    rows = [row for each in every for row in each.rows()]
    rows += [(limit[0], None, limit[1], None, None)] if limit else []
    columns = ("series", x, y or "value", "lowest", "highest")
    return Drawing(title, *size, draw, columns, tuple(rows))


def small_multiples(
    title: str,
    series: Sequence[Series],
    *,
    marked: Mapping[str, str] | None = None,
    behind: Series | None = None,
    y: str = "",
    columns: int = 6,
) -> Drawing:
    """Return a chart with a panel per series, at most `columns` side by side, on common scales.

    `marked` maps names of series to a word for their panel; these series get another colour.
    `behind` is a series drawn dashed in every panel. `y` names a column of the CSV.
    """
    columns = max(1, min(columns, len(series)))
    every = [*series, *([behind] if behind else [])]
    xs = [place for each in every for place, _ in each.points]
    ys = [level for each in every for _, level in each.points]
    step = PANEL_HEADER + PANEL_HEIGHT + PANEL_GAP
    width = PANEL_LEFT + columns * (PANEL_WIDTH + PANEL_GAP)
    height = -(-len(series) // columns) * step + 14

    def draw(figure: Canvas) -> None:
        for number, each in enumerate(series):
            left = PANEL_LEFT + number % columns * (PANEL_WIDTH + PANEL_GAP)
            top = number // columns * step + PANEL_HEADER
            right, bottom = width - left - PANEL_WIDTH, height - top - PANEL_HEIGHT
            ax, *_ = add_axes(figure, left, bottom, right, top)
            ax.grid(visible=False, axis="x")
            _scale(ax, "x", xs, whole=True)
            _scale(ax, "y", ys, count=3)
            ticks, (start, end) = ax.get_yticks(), ax.get_xlim()
            texts = [each.get_text() for each in ax.get_yticklabels()]
            first, lowest = number % columns == 0, number + columns >= len(series)
            ax.set_yticks(ticks[[0, -1]], [texts[0], texts[-1]] if first else ["", ""], size=10)
            ax.set_xticks([start, end], [f"{start:g}", f"{end:g}"] if lowest else ["", ""], size=10)
            for label, side in zip(ax.get_xticklabels(), ("left", "right"), strict=True):
                label.set_horizontalalignment(side)
            word = (marked or {}).get(each.name, "")
            color = LIGHT["c1" if word else "c0"]
            last = f"{each.last:.3g}" if each.last is not None else "no value"
            bold = "bold" if word else "normal"
            name = truncate_text(each.name, PANEL_WIDTH - 40)
            _write(ax, name, (0, 1), (0, 20), weight="bold")
            _write(ax, last, (1, 1), (0, 20), ha="right", color=color, weight=bold)
            _write(ax, word, (0, 1), (0, 7), size=11, color=color)
            if behind:
                _line(ax, behind, LIGHT["faint"], linewidth=1.0, linestyle=(0, (3, 2)))
            _line(ax, each, color)
            for place, level in [point for point in each.points if is_drawable(point[1])][-1:]:
                text = f"{each.name}, {place:g}: {level:.4g}"
                _dot(ax, place, level, text, color, **MARKERS[bool(word)], markersize=6.0)

    rows = [row[:3] for each in every for row in each.rows()]
    return Drawing(title, width, height, draw, ("series", "round", y or "value"), tuple(rows))


@dataclass(frozen=True)
class Bar:
    """A bar; `expected` is a forecast (least, most), `paint` a colour of the palette."""

    name: str
    amount: float
    expected: tuple[float, float] | None = None
    paint: str = "c0"


def bar_chart(
    title: str,
    bars: Sequence[Bar],
    *,
    unit: str = "",
    format_value: Callable[[float], str] = lambda value: format_tick(value),
) -> Drawing:
    """Return a chart of horizontal bars with their values, and marks at the expected ranges."""
    amounts = [end for bar in bars for end in (bar.amount, *(bar.expected or ()))]

    def draw(ax: Axes) -> None:
        ax.set_xlabel(unit, labelpad=3)
        ink: dict[str, Any] = {"color": LIGHT["ink"], "clip_on": False}
        for row, bar in enumerate(bars):
            text = f"{bar.name}: {format_value(bar.amount)}"
            ax.barh(row, bar.amount, height=18 / BAR_STEP, color=LIGHT[bar.paint], gid=tip(text))
            ends = bar.expected or ()
            for end in ends:
                ax.plot((end, end), (row - 0.42, row + 0.42), linewidth=2.0, **ink)
            ax.plot(ends, (row,) * len(ends), linewidth=1.0, linestyle=(0, (2, 2)), **ink)
            end = max((bar.amount, *ends))
            _write(ax, format_value(bar.amount), (end, row), (6, -4), "data", size=11)

    rows = [(bar.name, bar.amount, *(bar.expected or (None, None))) for bar in bars]
    columns = ("name", unit or "amount", "expected_min", "expected_max")
    return _row_chart(title, [bar.name for bar in bars], amounts, draw, columns, rows, right=76)


def interval_chart(
    title: str, rows: Sequence[tuple[str, float, float | None, float | None]]
) -> Drawing:
    """Return a chart of a line from low to high, with a dot at the mean, for each named row."""

    def draw(ax: Axes) -> None:
        ax.axvline(0.0, color=LIGHT["ink"], linewidth=1.2, clip_on=False)
        for row, (name, mean, low, high) in enumerate(rows):
            text = f"{name}: {mean:+.4f}"
            if low is not None and high is not None:
                ax.plot((low, high), (row, row), color=LIGHT["c0"], linewidth=2.0, clip_on=False)
                text += f" [{low:+.4f}, {high:+.4f}]"
            _dot(ax, mean, row, text, LIGHT["c0"], **MARKERS[0], markersize=8.0)

    values = [value for _, *ends in rows for value in ends if value is not None]
    columns = ("group", "difference", "low", "high")
    return _row_chart(title, [row[0] for row in rows], values, draw, columns, rows, right=20)


def _row_chart(
    title: str,
    names: Sequence[str],
    values: Sequence[float],
    draw: Callable[[Axes], None],
    columns: tuple[str, ...],
    rows: Sequence[tuple[object, ...]],
    *,
    right: float,
) -> Drawing:
    """Return a chart of named rows over a linear axis that includes 0.

    `draw` draws row i at y = i, from the top. `values` are all numbers on the axis, `columns` and
    `rows` the CSV, `right` is the margin in pixels.
    """
    left = min(150.0, 18 + max(map(text_width, names), default=0.0))

    def draw_all(figure: Canvas) -> None:
        ax, *_ = add_axes(figure, left, 36, right, 6)
        ax.grid(visible=False, axis="y")
        ax.set_ylim(max(1, len(names)) - 0.5, -0.5)
        ax.set_yticks(range(len(names)), [truncate_text(name, left - 10) for name in names])
        ax.tick_params(axis="y", pad=8, labelsize=12, labelcolor=LIGHT["ink"])
        _scale(ax, "x", (0.0, *values), count=4, linear=True)
        draw(ax)

    return Drawing(title, 480, len(names) * BAR_STEP + 42, draw_all, columns, tuple(rows))


def spread_labels(
    targets: Sequence[float], distance: float, low: float, high: float
) -> list[float]:
    """Return a position near each target, with at least `distance` between any two positions.

    All are between `low` and `high`, unless there is too little room: then some are below `low`.
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


def axis_ticks(
    numbers: Iterable[float], *, count: int = 5, whole: bool = False, linear: bool = False
) -> tuple[tuple[float, float], list[float], bool]:
    """Return the limits of an axis that holds all drawable numbers, its ticks, and if it is log.

    It is logarithmic if all numbers are positive and the largest is at least 100 times the
    smallest, unless `linear`. With `whole` it is linear, ends at the numbers, and has whole ticks.
    """
    from matplotlib.ticker import MaxNLocator

    finite = [0.0 if abs(n) < SMALLEST else n for n in numbers if is_drawable(n)] or [0.0, 1.0]
    low, high = min(finite), max(finite)
    if not (whole or linear) and low > 0 and high / low >= LOG_RATIO:
        first, last = floor(log10(low)), ceil(log10(high))
        ticks = [10.0**n for n in range(first, last + 1, max(1, (last - first) // 6))]
        return (10.0**first, 10.0**last), ticks, True
    if high - low <= 1e-12 * max(abs(low), abs(high)):
        room = 0.1 * abs(high) or 1.0
        low, high = (low, low + 1) if whole else (low - room, high + room)
    locator = MaxNLocator(count, steps=[1, 2, 5, 10], integer=whole, min_n_ticks=1)
    ticks = [float(f"{tick:.12g}") for tick in locator.tick_values(low, high)]
    if not whole:
        return (min(low, ticks[0]), max(high, ticks[-1])), ticks, False
    ticks = [tick for tick in ticks if low <= tick <= high]
    # The first round gets a tick too if there is room for it.
    if not ticks or ticks[0] - low >= (high - low) / (2 * count):
        ticks = [low, *ticks]
    return (low, high), ticks, False


def _scale(
    ax: Axes, axis: str, numbers: Iterable[float], *, names: Sequence[str] = (), **options: Any
) -> bool:
    """Set the limits and ticks of an axis, "x" or "y"; `names` replace the labels 0, 1, 2 ..."""
    limits, ticks, log = axis_ticks(numbers, **options)
    labels = tick_labels(ticks, log=log)
    labels = [
        printable(names[int(t)]) if 0 <= t < len(names) else s
        for t, s in zip(ticks, labels, strict=True)
    ]
    ax.set(**{f"{axis}scale": "log" if log else "linear", f"{axis}lim": limits})
    (ax.set_xticks if axis == "x" else ax.set_yticks)(ticks, labels)
    ax.minorticks_off()
    return log


def format_tick(number: float, largest: float = 0.0) -> str:
    """Return a number for an axis in the unit of the `largest` number on it, as `2 M`."""
    top = max(abs(number), abs(largest))
    for size, letter in ((1e9, " G"), (1e6, " M"), (1e4, " k")):
        if top >= size:
            size = 1e3 if letter == " k" else size
            return f"{number / size:g}{letter}" if number else "0"
    return f"{number:g}" if top >= 1e-4 or not top else f"{number:.0e}"


def tick_labels(ticks: Sequence[float], *, log: bool = False) -> list[str]:
    """Return the labels of ticks, all with the same decimals unless they are log or have a unit."""
    texts = [format_tick(tick, 0.0 if log else max(map(abs, ticks))) for tick in ticks]
    if log or not all(re.fullmatch(r"-?[0-9]+(\.[0-9]+)?", each) for each in texts):
        return texts
    digits = max(len(each.partition(".")[2]) for each in texts)
    return [f"{tick:.{digits}f}" for tick in ticks]


def _hue(place: int) -> str:
    """Return the paint of the series with number `place`; all beyond the sixth are grey."""
    return HUES[place] if place < len(HUES) else "faint"


def _line(ax: Axes, series: Series, color: str, **style: Any) -> None:
    """Draw a series as a line with gaps where it is not drawable, and its band if it is whole."""
    xs = [x for x, _ in series.points]
    if series.band and all(is_drawable(end) for pair in series.band for end in pair):
        lows, highs = zip(*series.band, strict=True)
        ax.fill(xs + xs[::-1], lows + highs[::-1], color=(color, BAND), clip_on=False)
    ys = [y if is_drawable(y) else nan for _, y in series.points]
    ax.plot(xs, ys, color=color, clip_on=False, solid_capstyle="butt", **style)


def _write(
    ax: Axes, text: str, at: Point, offset: Point, unit: Any = "axes fraction", **style: Any
) -> None:
    """Write a text with its baseline `offset` pixels from a point of the axes or of the data."""
    ax.annotate(text, at, offset, unit, "offset points", annotation_clip=False, **style)


def _dot(ax: Axes, x: float, y: float, text: str, color: str, **style: Any) -> None:
    """Draw a marker at a point; a pointer shows `text`, if any."""
    ax.plot([x], [y], color=color, clip_on=False, linestyle="none", gid=tip(text), **style)
