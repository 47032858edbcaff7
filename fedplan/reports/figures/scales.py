# SPDX-License-Identifier: Apache-2.0
"""Scales: from numbers to places on a sheet, with round numbers along the way."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil, floor, isfinite, log10

LARGEST, LEAST = 1e100, 1e-100
"""What is beyond is drawn as no number at all, or as 0."""
FAR = 100.0
"""How many times the least the most must be for equal factors to take equal room."""


def drawable(number: float) -> bool:
    """Whether a number has a place on a sheet: a model that diverged has a score that has none."""
    return isfinite(number) and abs(number) <= LARGEST


@dataclass(frozen=True)
class Scale:
    """Numbers from `low` to `high` along a sheet from `start` to `end`; `ticks` stand beside it."""

    low: float
    high: float
    start: float
    end: float
    ticks: tuple[float, ...]
    factors: bool = False

    def __call__(self, number: float) -> float:
        """The place of a number."""
        low, high, each = self.low, self.high, number
        if self.factors:
            low, high, each = log10(low), log10(high), log10(number)
        return self.start + (self.end - self.start) * (each - low) / (high - low)


def scaled(
    numbers: Iterable[float], start: float, end: float, *, count: int = 5, whole: bool = False
) -> Scale:
    """A scale that holds all numbers, from a round one to a round one; `whole` ones if asked."""
    known = [each for each in numbers if drawable(each)] or [0.0, 1.0]
    low, high = min(known), max(known)
    if not whole and low > LEAST and high / low >= FAR:
        return _by_factors(low, high, start, end)
    if high - low <= max(LEAST, 1e-12 * max(abs(low), abs(high))):
        room = abs(high) * 0.1 if abs(high) > LEAST else 1.0
        low, high = (low - room, high + room) if not whole else (low, low + 1)
    step = _step((high - low) / count, whole=whole)
    if whole:
        ticks = [n * step for n in range(ceil(low / step), floor(high / step) + 1)]
        # The first round is told too, where there is room for it.
        first = [low] if not ticks or ticks[0] - low >= step / 2 else []
        return Scale(low, high, start, end, (*first, *ticks))
    places = range(floor(low / step + 1e-9), ceil(high / step - 1e-9) + 1)
    low, high = places[0] * step, places[-1] * step
    return Scale(low, high, start, end, tuple(float(f"{n * step:.12g}") for n in places))


def _by_factors(low: float, high: float, start: float, end: float) -> Scale:
    first, last = floor(log10(low)), ceil(log10(high))
    apart = max(1, (last - first) // 6)
    ticks = tuple(10.0**n for n in range(first, last + 1, apart))
    return Scale(10.0**first, 10.0**last, start, end, ticks, factors=True)


def _step(rough: float, *, whole: bool) -> float:
    """The round number that is just above a rough one: 1, 2 or 5 times a power of ten."""
    power = 10.0 ** floor(log10(rough))
    found = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * (1 - 1e-9))
    return max(1.0, float(round(found))) if whole else found


def spelled(number: float, most: float = 0.0) -> str:
    """A number as it stands beside an axis: large ones in thousands and millions."""
    top = max(abs(number), abs(most))
    for size, letter in ((1e9, " G"), (1e6, " M"), (1e4, " k")):
        if top >= size:
            size = 1e3 if letter == " k" else size
            return f"{number / size:g}{letter}" if number else "0"
    return f"{number:g}" if top >= 1e-4 or not top else f"{number:.0e}"


def labels(scale: Scale) -> list[str]:
    """The numbers beside an axis, all with as many digits after the point."""
    most = 0.0 if scale.factors else max(map(abs, scale.ticks))
    told = [spelled(tick, most) for tick in scale.ticks]
    if scale.factors or not all(re.fullmatch(r"-?[0-9]+(\.[0-9]+)?", each) for each in told):
        return told
    digits = max(len(each.partition(".")[2]) for each in told)
    return [f"{tick:.{digits}f}" for tick in scale.ticks]
