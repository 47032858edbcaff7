# SPDX-License-Identifier: Apache-2.0
"""Statistics: means over seeds with Student's intervals, and p values for many comparisons."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite, nan, sqrt
from statistics import mean, stdev
from typing import cast

LEVEL = 0.95
"""How often an interval holds what it is of."""
SAME = 1e-9
"""Differences are the same if their spread is so small a share of the largest."""


@dataclass(frozen=True)
class Interval:
    """A mean of some numbers, and half the width of its 95 % interval; of one there is none."""

    mean: float
    half: float | None
    count: int

    @property
    def low(self) -> float | None:
        """Where it begins."""
        return None if self.half is None else self.mean - self.half

    @property
    def high(self) -> float | None:
        """Where it ends."""
        return None if self.half is None else self.mean + self.half

    def text(self, digits: int = 3) -> str:
        """It as `0.812 ± 0.020`.

        >>> interval([0.0, 1.0]).text()
        '0.500 ± 6.353'
        """
        half = "" if self.half is None else f" ± {self.half:.{digits}f}"
        return f"{self.mean:.{digits}f}{half}"


def interval(numbers: Sequence[float]) -> Interval:
    """The mean of numbers with its 95 % interval, by Student's t.

    Where one of them is no number, as of a model that diverged, the mean is none either.
    """
    if not all(map(isfinite, numbers)):
        return Interval(nan, None, len(numbers))
    if len(numbers) < 2:
        return Interval(mean(numbers), None, len(numbers))
    error = stdev(numbers) / sqrt(len(numbers))
    return Interval(mean(numbers), quantile(len(numbers) - 1) * error, len(numbers))


def quantile(freedom: int) -> float:
    """How many standard errors an interval reaches to each side, of so many degrees of freedom."""
    from scipy.special import stdtrit  # pyright: ignore[reportUnknownVariableType]

    return float(stdtrit(freedom, (1 + LEVEL) / 2))


def p_value(differences: Sequence[float]) -> float | None:
    """How often differences as large as these come about if there is none: the paired t test.

    Of one difference, or of one that is no number, nobody knows. Nor where all are the same: there
    is no spread to judge by. If they are all zero it is 1.
    """
    from scipy.special import stdtr  # pyright: ignore[reportUnknownVariableType]

    if len(differences) < 2 or not all(map(isfinite, differences)):
        return None
    middle, error = mean(differences), stdev(differences) / sqrt(len(differences))
    largest = max(map(abs, differences))
    if error <= SAME * largest:  # what is left of a spread is what floats round off
        return None if largest else 1.0
    far = abs(middle) / error
    return 2 * float(cast("float", stdtr(len(differences) - 1, -far)))


def holm(values: Sequence[float | None]) -> list[float | None]:
    """P values corrected for how many there are, by Holm's step-down; unknown ones do not count.

    >>> holm([0.01, 0.04, None, 0.03])
    [0.03, 0.06, None, 0.06]
    """
    known = sorted((p, place) for place, p in enumerate(values) if p is not None)
    found, least = list[float | None](values), 0.0
    for step, (p, place) in enumerate(known):
        least = max(least, min(1.0, (len(known) - step) * p))
        found[place] = least
    return found
