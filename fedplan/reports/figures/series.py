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
    """A series of points (x, y), for example (round, score); `name` labels its line.

    `band` has the lowest and highest y at each point, or is empty.
    """

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

    Two or more series give a band from the lowest to the highest; none give no points.
    """
    values = [dict(each.points) for each in several]
    xs = sorted(set(values[0]).intersection(*values[1:])) if values else []
    columns = [(x, [each[x] for each in values]) for x in xs]
    return Series(
        name,
        tuple((x, fsum(ys) / len(ys)) for x, ys in columns),
        tuple((min(ys), max(ys)) for _, ys in columns) if len(values) > 1 else (),
    )
