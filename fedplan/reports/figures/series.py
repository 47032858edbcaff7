# SPDX-License-Identifier: Apache-2.0
"""Series of numbers over rounds, and the mean of several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum

from fedplan.reports.figures.scales import is_drawable

Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """A named series of points (x, y); `band` has the lowest and highest y at each, or is empty."""

    name: str
    points: tuple[Point, ...]
    band: tuple[Point, ...] = ()

    @property
    def last(self) -> float | None:
        """The last drawable y, or None."""
        finite = [y for _, y in self.points if is_drawable(y)]
        return finite[-1] if finite else None

    def rows(self) -> list[tuple[object, ...]]:
        """Return a row (name, x, y, lowest, highest) for each point."""
        bands = self.band or ((None, None),) * len(self.points)
        pairs = zip(self.points, bands, strict=True)
        return [(self.name, x, y, low, high) for (x, y), (low, high) in pairs]


def mean_series(name: str, several: Sequence[Series]) -> Series:
    """Return the mean of several series where all have a point; its band is lowest to highest."""
    values = [dict(each.points) for each in several]
    xs = sorted(set(values[0]).intersection(*values[1:])) if values else []
    columns = [(x, [each[x] for each in values]) for x in xs]
    return Series(
        name,
        tuple((x, fsum(ys) / len(ys)) for x, ys in columns),
        tuple((min(ys), max(ys)) for _, ys in columns) if len(values) > 1 else (),
    )
