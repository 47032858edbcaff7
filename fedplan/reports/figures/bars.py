# SPDX-License-Identifier: Apache-2.0
"""Horizontal bar charts, with the expected range of each bar."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from fedplan.reports.figures.drawing import (
    Box,
    Drawing,
    Shape,
    Stroke,
    TextLabel,
    text_width,
    truncate_text,
)
from fedplan.reports.figures.scales import Scale, format_tick, make_scale, tick_labels

BAR_HEIGHT, GAP, TOP = 18.0, 8.0, 6.0
"""The height of a bar, the gap between bars, and the margin above them."""
MAX_LABEL_WIDTH, VALUE_WIDTH = 150.0, 76.0
"""The most room for names at the left, and the room for values at the right."""


@dataclass(frozen=True)
class Bar:
    """A bar called `name` of length `amount`; `expected` is a forecast range (least, most).

    `paint` names a colour of the palette.
    """

    name: str
    amount: float
    expected: tuple[float, float] | None = None
    paint: str = "c0"


def bar_chart(
    title: str,
    bars: Sequence[Bar],
    *,
    unit: str = "",
    format_value: Callable[[float], str] = format_tick,
    width: float = 480,
) -> Drawing:
    """Return a drawing of horizontal bars with their values, and marks at the expected ranges.

    `unit` labels the axis; `format_value` writes the value at the end of a bar; `width` is in
    pixels.
    """
    left = min(MAX_LABEL_WIDTH, 18 + max((text_width(bar.name) for bar in bars), default=0.0))
    amounts = [end for bar in bars for end in (bar.amount, *(bar.expected or ()))]
    across = make_scale((0.0, *amounts), left, width - VALUE_WIDTH, count=4)
    bottom = TOP + len(bars) * (BAR_HEIGHT + GAP)
    shapes = list[Shape]()
    for tick, label in zip(across.ticks, tick_labels(across), strict=True):
        shapes.append(Stroke(((across(tick), TOP), (across(tick), bottom)), "grid"))
        shapes.append(TextLabel(across(tick), bottom + 14, label, "faint", "middle", 11))
    shapes.append(
        TextLabel((left + width - VALUE_WIDTH) / 2, bottom + 30, unit, "faint", "middle", 11)
    )
    for number, bar in enumerate(bars):
        y = TOP + number * (BAR_HEIGHT + GAP) + GAP / 2
        shapes += _bar(bar, across, y, format_value)
    rows = [(bar.name, bar.amount, *(bar.expected or (None, None))) for bar in bars]
    columns = ("name", unit or "amount", "expected_min", "expected_max")
    return Drawing(title, width, bottom + 36, tuple(shapes), columns, tuple(rows))


def _bar(
    bar: Bar, across: Scale, y: float, format_value: Callable[[float], str]
) -> Iterator[Shape]:
    """Yield the shapes of one bar: name, box, expected range and value.

    `across` maps amounts to x; `y` is the top of the bar.
    """
    zero, end = across(0.0), across(bar.amount)
    tip = f"{bar.name}: {format_value(bar.amount)}"
    yield TextLabel(
        across.start - 8, y + 13, truncate_text(bar.name, across.start - 10), anchor="end"
    )
    yield Box(zero, y, max(0.0, end - zero), BAR_HEIGHT, bar.paint, tip)
    right = end
    if bar.expected is not None:
        low, high = map(across, bar.expected)
        yield Stroke(((low, y - 2), (low, y + BAR_HEIGHT + 2)), "ink", 2.0)
        if high - low > 1:
            yield Stroke(((high, y - 2), (high, y + BAR_HEIGHT + 2)), "ink", 2.0)
            yield Stroke(((low, y + BAR_HEIGHT / 2), (high, y + BAR_HEIGHT / 2)), "ink", 1.0, "2 2")
        right = max(right, high)
    yield TextLabel(right + 6, y + 13, format_value(bar.amount), size=11)
