# SPDX-License-Identifier: Apache-2.0
"""Statistics over seeds: confidence intervals by Student's t, paired t test, Holm correction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite, nan, sqrt
from statistics import mean, stdev
from typing import cast

CONFIDENCE = 0.95
"""The confidence level of intervals."""
RELATIVE_TOLERANCE = 1e-9
"""A standard error below this share of the largest difference is taken as rounding error."""


@dataclass(frozen=True)
class Interval:
    """The mean of `count` numbers with a 95 % confidence interval: mean ± `half_width`.

    `half_width` is None for a single number, and if a number is not finite.
    """

    mean: float
    half_width: float | None
    count: int

    @property
    def low(self) -> float | None:
        """The lower end; None without an interval."""
        return None if self.half_width is None else self.mean - self.half_width

    @property
    def high(self) -> float | None:
        """The upper end; None without an interval."""
        return None if self.half_width is None else self.mean + self.half_width

    def text(self, digits: int = 3) -> str:
        """Return mean and half width with `digits` decimals, as `0.812 ± 0.020`, or the mean alone.

        >>> mean_interval([0.0, 1.0]).text()
        '0.500 ± 6.353'
        """
        half_width = "" if self.half_width is None else f" ± {self.half_width:.{digits}f}"
        return f"{self.mean:.{digits}f}{half_width}"


def mean_interval(numbers: Sequence[float]) -> Interval:
    """Return the mean of one or more numbers with a 95 % confidence interval (Student's t).

    The mean is NaN if a number is not finite, as the score of a diverged model.
    """
    if not all(map(isfinite, numbers)):
        return Interval(nan, None, len(numbers))
    half_width = None
    if len(numbers) > 1:
        half_width = t_quantile(len(numbers) - 1) * (stdev(numbers) / sqrt(len(numbers)))
    return Interval(mean(numbers), half_width, len(numbers))


def t_quantile(freedom: int) -> float:
    """Return half the width of a 95 % interval, in standard errors, by the degrees of freedom."""
    from scipy.special import stdtrit  # pyright: ignore[reportUnknownVariableType]

    return float(stdtrit(freedom, (1 + CONFIDENCE) / 2))


def p_value(differences: Sequence[float]) -> float | None:
    """Return the two-sided p-value of the paired t test, from the differences of the pairs.

    Returns None for fewer than two differences, for one that is not finite, and if all are equal,
    since there is no spread to test against.
    """
    from scipy.special import stdtr  # pyright: ignore[reportUnknownVariableType]

    if len(differences) < 2 or not all(map(isfinite, differences)):
        return None
    standard_error = stdev(differences) / sqrt(len(differences))
    largest = max(map(abs, differences))
    if standard_error <= RELATIVE_TOLERANCE * largest:
        return None
    t = abs(mean(differences)) / standard_error
    return 2 * float(cast("float", stdtr(len(differences) - 1, -t)))


def holm(values: Sequence[float | None]) -> list[float | None]:
    """Return p-values corrected for multiple comparisons by Holm's method, in the same order.

    None stays None and does not count as a comparison.

    >>> holm([0.01, 0.04, None, 0.03])
    [0.03, 0.06, None, 0.06]
    """
    ascending = sorted((p, index) for index, p in enumerate(values) if p is not None)
    corrected, smallest = list[float | None](values), 0.0
    for step, (p, index) in enumerate(ascending):
        smallest = max(smallest, min(1.0, (len(ascending) - step) * p))
        corrected[index] = smallest
    return corrected


def format_p_value(value: float | None) -> str:
    """Return a p-value with three decimals; "" for None.

    >>> format_p_value(0.0371), format_p_value(0.00001)
    ('0.037', '< 0.001')
    """
    if value is None:
        return ""
    return "< 0.001" if value < 0.001 else f"{value:.3f}"
