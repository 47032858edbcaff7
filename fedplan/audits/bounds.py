# SPDX-License-Identifier: Apache-2.0
"""Lower bounds of a mechanism's epsilon, from samples of its releases on neighbouring data sets.

Neighbouring data sets have the same clients, with and without one. An event that is likely for one
and rare for the other proves an epsilon; one above the claimed epsilon proves a mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedplan.privacy.accounting.accountant import epsilon
from fedplan.privacy.accounting.events import NOISE_MULTIPLIERS, Release
from fedplan.privacy.errors import PrivacyError, import_extra
from fedplan.privacy.mechanisms.gaussian import Change, GaussianMechanism

T = TypeVar("T")
Draws = NDArray[np.float64]
"""Samples: one row per release, one column per statistic of it."""
Column = NDArray[np.float64]
"""One number per sample, or per event."""
Measure = Callable[[Column, Column], Column]
"""Distance of two distributions, from the probabilities of events in each (likely, rare)."""
Aggregate = Callable[[GaussianMechanism, Sequence[Change]], dict[str, Tensor]]
"""Releases the noisy mean of some changes."""

_THRESHOLD_COUNT = 200
_PURPOSE = "an audit of epsilon"


def lower_bound(one: Draws, other: Draws, *, delta: float = 0.0, confidence: float = 0.95) -> float:
    """Lower bound of epsilon at `delta`, for any mechanism; wrong with probability 1 - confidence.

    one, other: samples of the releases on two neighbouring data sets. Raises a PrivacyError for
    samples of different widths, or fewer than four.
    """

    def measure(likely: Column, rare: Column) -> Column:
        return np.log(np.maximum(likely - delta, 1e-300) / rare)

    return max(0.0, _best_measure(one, other, measure, confidence))


def gaussian_lower_bound(
    one: Draws, other: Draws, *, delta: float, confidence: float = 0.95
) -> float:
    """As `lower_bound`, for a mechanism that claims to be Gaussian: a far sharper bound.

    An event with probabilities p and q shows a noise multiplier of at most
    1 / (Phi^-1(p) - Phi^-1(q)) (Nasr et al., arXiv 2302.07956). Returns the epsilon of that noise.
    """
    quantile = import_extra("scipy.special", _PURPOSE).ndtri
    separation = _best_measure(
        one, other, lambda likely, rare: quantile(likely) - quantile(rare), confidence
    )
    is_measurable = separation > 1 / NOISE_MULTIPLIERS[1]
    return epsilon([Release(1 / separation)], delta) if is_measurable else 0.0


def sample_releases(
    mechanism: GaussianMechanism, changes: Sequence[Change], count: int, aggregate: Aggregate
) -> dict[str, Tensor]:
    """`count` independent releases of the same changes, by one call of `aggregate`.

    Each released tensor gets a first dimension of size `count`.
    """
    # The changes are tiled `count` times. Norms grow by sqrt(count), and so does the clipping norm;
    # the noise multiplier shrinks as much. So clipping, divisor and noise of each copy are those of
    # a single release.
    shapes = mechanism.public_shapes.items()
    tiled_mechanism = replace(
        mechanism,
        public_shapes={name: ((count, *shape), dtype) for name, (shape, dtype) in shapes},
        clipping_norm=mechanism.clipping_norm * sqrt(count),
        noise_multiplier=mechanism.noise_multiplier / sqrt(count),
    )
    tiled = [{n: t.expand(count, *t.shape) for n, t in change.items()} for change in changes]
    return aggregate(tiled_mechanism, tiled)


def release_rows(released: dict[str, Tensor]) -> Draws:
    """Releases of `sample_releases` as rows: coordinates of all tensors, in the order of names."""
    parts = [v.double().reshape(len(v), -1) for _, v in sorted(released.items())]
    return torch.cat(parts, dim=1).numpy()


def _best_measure(one: Draws, other: Draws, measure: Measure, confidence: float) -> float:
    """Lower confidence bound of the measure of the best event.

    Events: a statistic is at least, or at most, a threshold. The even samples choose the event; the
    odd samples estimate its probabilities. Raises a PrivacyError for samples that do not match.
    """
    if one.ndim != 2 or one.shape[1:] != other.shape[1:] or min(len(one), len(other)) < 4:
        raise PrivacyError(
            f"samples are of shapes {one.shape} and {other.shape}: give four rows or more, "
            "of one width"
        )
    risk = (1 - confidence) / 2
    columns = range(one.shape[1])
    tests = [_Test(c, sign, swap) for c in columns for sign in (1, -1) for swap in (False, True)]
    # Chosen at a lower risk than estimated: events that are rare on both sides owe more to luck.
    chosen = max(
        (_best_threshold(t, one[::2], other[::2], measure, risk / 20) for t in tests), key=_score
    )
    _, test, threshold = chosen
    hits = [np.array([(v >= threshold).sum()]) for v in test.values(one[1::2], other[1::2])]
    sizes = test.ordered(len(one[1::2]), len(other[1::2]))
    return float(measure(*_probability_bounds(hits[0], hits[1], *sizes, risk))[0])


@dataclass(frozen=True)
class _Test:
    """A statistic (column), the side of its threshold (sign), and whether `other` is likely."""

    column: int
    sign: int
    swapped: bool

    def ordered(self, one: T, other: T) -> tuple[T, T]:
        return (other, one) if self.swapped else (one, other)

    def values(self, one: Draws, other: Draws) -> tuple[Column, Column]:
        likely, rare = self.ordered(one, other)
        return likely[:, self.column] * self.sign, rare[:, self.column] * self.sign


def _best_threshold(
    test: _Test, one: Draws, other: Draws, measure: Measure, risk: float
) -> tuple[float, _Test, float]:
    """The largest measure of a test over thresholds, with the test and that threshold."""
    likely, rare = (np.sort(values) for values in test.values(one, other))
    thresholds = _thresholds(likely, rare)
    hits = [len(each) - np.searchsorted(each, thresholds) for each in (likely, rare)]
    measures = measure(*_probability_bounds(hits[0], hits[1], len(likely), len(rare), risk))
    best = int(measures.argmax())
    return float(measures[best]), test, float(thresholds[best])


def _score(result: tuple[float, _Test, float]) -> float:
    return result[0]


def _thresholds(likely: Column, rare: Column) -> Column:
    """Candidate thresholds: samples of both sides, denser in the upper tail. Inputs are sorted."""
    size = min(len(likely), len(rare))
    ranks = np.geomspace(1, size, _THRESHOLD_COUNT).astype(np.int64)
    return np.unique(np.concatenate([likely[-ranks], rare[-ranks]]))


def _probability_bounds(
    likely: NDArray[Any], rare: NDArray[Any], size: int, other_size: int, risk: float
) -> tuple[Column, Column]:
    """Lower bounds of likely probabilities and upper bounds of rare ones (Clopper and Pearson).

    likely, rare: numbers of hits among `size` and `other_size` samples.
    """
    quantile = import_extra("scipy.special", _PURPOSE).betaincinv
    least = quantile(np.maximum(likely, 1), size - likely + 1, risk)
    most = quantile(rare + 1, np.maximum(other_size - rare, 1), 1 - risk)
    return np.where(likely > 0, least, 0.0), np.where(rare < other_size, most, 1.0)
