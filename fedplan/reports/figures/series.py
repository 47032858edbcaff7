# SPDX-License-Identifier: Apache-2.0
"""Series: numbers over rounds, and one of several that differ by chance alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum

from fedplan.reports.figures.scales import drawable

Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """Points under a name. `band` holds the lowest and the highest at each point, if it has one."""

    name: str
    points: tuple[Point, ...]
    band: tuple[Point, ...] = ()

    @property
    def last(self) -> float | None:
        """The last number, if there is one."""
        known = [y for _, y in self.points if drawable(y)]
        return known[-1] if known else None

    def rows(self) -> list[tuple[object, ...]]:
        """A row for each point, as a table has it."""
        bands = self.band or ((None, None),) * len(self.points)
        told = zip(self.points, bands, strict=True)
        return [(self.name, x, y, low, high) for (x, y), (low, high) in told]


def mean_series(name: str, several: Sequence[Series]) -> Series:
    """The mean of several series where all of them have a point, from their lowest to highest."""
    held = [dict(each.points) for each in several]
    places = sorted(set(held[0]).intersection(*held[1:])) if held else []
    columns = [(x, [each[x] for each in held]) for x in places]
    return Series(
        name,
        tuple((x, fsum(ys) / len(ys)) for x, ys in columns),
        tuple((min(ys), max(ys)) for _, ys in columns) if len(held) > 1 else (),
    )
