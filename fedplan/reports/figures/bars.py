# SPDX-License-Identifier: Apache-2.0
"""Bar charts: an amount of each thing, with what was expected of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from fedplan.reports.figures.drawing import Box, Drawing, Shape, Stroke, Words, shortened, width_of
from fedplan.reports.figures.scales import Scale, labels, scaled, spelled

TALL, GAP, TOP = 18.0, 8.0, 6.0
LABEL, VALUE = 150.0, 76.0


@dataclass(frozen=True)
class Bar:
    """An amount under a name; `expected` is from the least to the most, if that was foretold."""

    name: str
    amount: float
    expected: tuple[float, float] | None = None
    paint: str = "c0"


def bar_chart(
    title: str,
    bars: Sequence[Bar],
    *,
    unit: str = "",
    told: Callable[[float], str] = spelled,
    width: float = 480,
) -> Drawing:
    """Bars from left to right, each with its amount; a bracket stands where it was expected."""
    left = min(LABEL, 18 + max((width_of(each.name) for each in bars), default=0.0))
    most = [end for each in bars for end in (each.amount, *(each.expected or ()))]
    across = scaled((0.0, *most), left, width - VALUE, count=4)
    bottom = TOP + len(bars) * (TALL + GAP)
    shapes = list[Shape]()
    for tick, label in zip(across.ticks, labels(across), strict=True):
        shapes.append(Stroke(((across(tick), TOP), (across(tick), bottom)), "grid"))
        shapes.append(Words(across(tick), bottom + 14, label, "faint", "middle", 11))
    shapes.append(Words((left + width - VALUE) / 2, bottom + 30, unit, "faint", "middle", 11))
    for number, each in enumerate(bars):
        shapes += _bar(each, across, TOP + number * (TALL + GAP) + GAP / 2, told)
    rows = [(each.name, each.amount, *(each.expected or (None, None))) for each in bars]
    columns = ("name", unit or "amount", "expected least", "expected most")
    return Drawing(title, width, bottom + 36, tuple(shapes), columns, tuple(rows))


def _bar(bar: Bar, across: Scale, y: float, told: Callable[[float], str]) -> Iterator[Shape]:
    zero, end = across(0.0), across(bar.amount)
    tip = f"{bar.name}: {told(bar.amount)}"
    yield Words(across.start - 8, y + 13, shortened(bar.name, across.start - 10), anchor="end")
    yield Box(zero, y, max(0.0, end - zero), TALL, bar.paint, tip)
    far = end
    if bar.expected is not None:
        low, high = (across(each) for each in bar.expected)
        yield Stroke(((low, y - 2), (low, y + TALL + 2)), "ink", 2.0)
        if high - low > 1:
            yield Stroke(((high, y - 2), (high, y + TALL + 2)), "ink", 2.0)
            yield Stroke(((low, y + TALL / 2), (high, y + TALL / 2)), "ink", 1.0, "2 2")
        far = max(far, high)
    yield Words(far + 6, y + 13, told(bar.amount), size=11)
