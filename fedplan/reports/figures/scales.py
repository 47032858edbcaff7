# SPDX-License-Identifier: Apache-2.0
"""Scales of an axis: from numbers to coordinates, with round numbers as ticks."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil, floor, isfinite, log10

LARGEST, SMALLEST = 1e100, 1e-100
"""Larger magnitudes are not drawn; smaller ones count as 0."""
LOG_RATIO = 100.0
"""The ratio of the largest to the smallest number from which a log scale is used."""


def is_drawable(number: float) -> bool:
    """Return whether a number is finite and of magnitude 1e100 at most, so that it can be drawn."""
    return isfinite(number) and abs(number) <= LARGEST


@dataclass(frozen=True)
class Scale:
    """A scale of an axis; call it with a number to get the coordinate.

    Numbers `low`..`high` map to coordinates `start`..`end`, linearly or by the logarithm (`log`);
    `ticks` are numbers.
    """

    low: float
    high: float
    start: float
    end: float
    ticks: tuple[float, ...]
    log: bool = False

    def __call__(self, number: float) -> float:
        """Return the coordinate of a number."""
        low, high, value = self.low, self.high, number
        if self.log:
            low, high, value = log10(low), log10(high), log10(number)
        return self.start + (self.end - self.start) * (value - low) / (high - low)


def make_scale(
    numbers: Iterable[float], start: float, end: float, *, count: int = 5, whole: bool = False
) -> Scale:
    """Return a scale of numbers over coordinates `start` to `end`, with about `count` ticks.

    Numbers that `is_drawable` rejects are ignored; without others, the scale is from 0 to 1. The
    scale is logarithmic if all numbers are positive and the largest is at least 100 times the
    smallest; with `whole` the scale is always linear, with whole numbers as ticks.
    """
    finite = [each for each in numbers if is_drawable(each)] or [0.0, 1.0]
    low, high = min(finite), max(finite)
    if not whole and low > SMALLEST and high / low >= LOG_RATIO:
        first, last = floor(log10(low)), ceil(log10(high))
        ticks = tuple(10.0**n for n in range(first, last + 1, max(1, (last - first) // 6)))
        return Scale(10.0**first, 10.0**last, start, end, ticks, log=True)
    if high - low <= max(SMALLEST, 1e-12 * max(abs(low), abs(high))):
        room = abs(high) * 0.1 if abs(high) > SMALLEST else 1.0
        low, high = (low - room, high + room) if not whole else (low, low + 1)
    # The step is the next 1, 2 or 5 times a power of ten.
    rough = (high - low) / count
    power = 10.0 ** floor(log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * (1 - 1e-9))
    if whole:
        step = max(1.0, float(round(step)))
        ticks = [n * step for n in range(ceil(low / step), floor(high / step) + 1)]
        # The first round gets a tick too if there is room for it.
        first = [low] if not ticks or ticks[0] - low >= step / 2 else []
        return Scale(low, high, start, end, (*first, *ticks))
    places = range(floor(low / step + 1e-9), ceil(high / step - 1e-9) + 1)
    low, high = places[0] * step, places[-1] * step
    return Scale(low, high, start, end, tuple(float(f"{n * step:.12g}") for n in places))


def format_tick(number: float, largest: float = 0.0) -> str:
    """Return a number for an axis: `2 M` from a million, also ` k` from 10 000 and ` G`.

    `largest`: the largest number of the axis, which sets the unit for all numbers of the axis.
    """
    top = max(abs(number), abs(largest))
    for size, letter in ((1e9, " G"), (1e6, " M"), (1e4, " k")):
        if top >= size:
            size = 1e3 if letter == " k" else size
            return f"{number / size:g}{letter}" if number else "0"
    return f"{number:g}" if top >= 1e-4 or not top else f"{number:.0e}"


def tick_labels(scale: Scale) -> list[str]:
    """Return the labels of a scale's ticks.

    All have the same number of decimals, unless the scale is logarithmic or labels have a unit.
    """
    largest = 0.0 if scale.log else max(map(abs, scale.ticks))
    texts = [format_tick(tick, largest) for tick in scale.ticks]
    if scale.log or not all(re.fullmatch(r"-?[0-9]+(\.[0-9]+)?", each) for each in texts):
        return texts
    digits = max(len(each.partition(".")[2]) for each in texts)
    return [f"{tick:.{digits}f}" for tick in scale.ticks]
