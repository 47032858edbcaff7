# SPDX-License-Identifier: Apache-2.0
"""Lower bounds of a mechanism's epsilon, from samples of its releases on neighbouring data sets.

Neighbouring data sets have the same clients, with and without one. An event that is likely for one
and rare for the other proves an epsilon; one above the claimed epsilon proves a mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from typing import Any

import numpy as np
import scipy.special
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedplan.errors import PrivacyError
from fedplan.privacy.accounting.accountant import NOISE_MULTIPLIERS, Release, epsilon
from fedplan.privacy.mechanisms.gaussian import Change, GaussianMechanism

Draws = NDArray[np.float64]
"""Samples: one row per release, one column per statistic of it."""
Column = NDArray[np.float64]
"""One number per sample, or per event."""
Measure = Callable[[Column, Column], Column]
"""Distance of two distributions, from the probabilities of events in each (likely, rare)."""
Aggregate = Callable[[GaussianMechanism, Sequence[Change]], dict[str, Tensor]]
"""Releases the noisy mean of some changes."""

_THRESHOLD_COUNT = 200


def lower_bound(one: Draws, other: Draws, *, delta: float = 0.0, confidence: float = 0.95) -> float:
    """Lower bound of epsilon at `delta` for any mechanism, from samples of releases.

    one, other: releases on two neighbouring data sets, a row each and a column per statistic. The
    true epsilon is below the bound with probability at most 1 - confidence. Raises a PrivacyError
    if columns differ in number, or if a sample has fewer than four rows.
    """

    def measure(likely: Column, rare: Column) -> Column:
        return np.log(np.maximum(likely - delta, 1e-300) / rare)

    return max(0.0, _best_measure(one, other, measure, confidence))


def gaussian_lower_bound(
    one: Draws, other: Draws, *, delta: float, confidence: float = 0.95
) -> float:
    """Lower bound of epsilon at `delta` for a mechanism that claims Gaussian noise: far sharper.

    one, other, confidence and exceptions as in `lower_bound`. An event with probabilities p and q
    shows a noise multiplier of at most 1 / (Phi^-1(p) - Phi^-1(q)) (Nasr et al., arXiv 2302.07956);
    returns the epsilon of this noise, 0.0 if no difference is measurable.
    """
    quantile = scipy.special.ndtri
    separation = _best_measure(
        one, other, lambda likely, rare: quantile(likely) - quantile(rare), confidence
    )
    is_measurable = separation > 1 / NOISE_MULTIPLIERS[1]
    return epsilon([Release(1 / separation)], delta) if is_measurable else 0.0


def sample_releases(
    mechanism: GaussianMechanism, changes: Sequence[Change], count: int, aggregate: Aggregate
) -> dict[str, Tensor]:
    """Sample `count` independent releases of the same changes, by one call of `aggregate`.

    `aggregate` gets a mechanism and changes whose tensors have a first dimension `count`; each copy
    is clipped and noised as a single release of `mechanism`. Returns the released tensors by name,
    each [count, *shape].
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
    """Lower confidence bound of a measure, at the event where the measure is largest.

    one, other: as in `lower_bound`; events: a statistic is at least, or at most, a threshold. Even
    rows choose the event, odd rows estimate the event's probabilities. Raises a PrivacyError if
    columns differ in number or a sample has fewer than four rows.
    """
    if one.ndim != 2 or one.shape[1:] != other.shape[1:] or min(len(one), len(other)) < 4:
        raise PrivacyError(
            f"samples are of shapes {one.shape} and {other.shape}: give four rows or more, "
            "of one width"
        )
    risk = (1 - confidence) / 2
    columns = range(one.shape[1])
    tests = [_Test(c, sign, swap) for c in columns for sign in (1, -1) for swap in (False, True)]
    candidates = list[tuple[float, _Test, float]]()
    for test in tests:
        likely, rare = (np.sort(values) for values in test.values(one[::2], other[::2]))
        # Thresholds are samples of both sides, denser in the upper tail.
        ranks = np.geomspace(1, min(len(likely), len(rare)), _THRESHOLD_COUNT).astype(np.int64)
        thresholds = np.unique(np.concatenate([likely[-ranks], rare[-ranks]]))
        hits = [len(each) - np.searchsorted(each, thresholds) for each in (likely, rare)]
        # At a lower risk than below: events that are rare on both sides owe more to luck.
        bounds = _probability_bounds(hits[0], hits[1], len(likely), len(rare), risk / 20)
        measures = measure(*bounds)
        best = int(measures.argmax())
        candidates.append((float(measures[best]), test, float(thresholds[best])))
    _, test, threshold = max(candidates, key=lambda candidate: candidate[0])
    likely, rare = test.values(one[1::2], other[1::2])
    hits = [np.array([(values >= threshold).sum()]) for values in (likely, rare)]
    bounds = _probability_bounds(hits[0], hits[1], len(likely), len(rare), risk)
    return float(measure(*bounds)[0])


@dataclass(frozen=True)
class _Test:
    """Events of one kind: the statistic in `column` times `sign` (1 or -1) is at least a threshold.

    swapped: whether the events are likely in the second sample and rare in the first, instead of
    the reverse.
    """

    column: int
    sign: int
    swapped: bool

    def values(self, one: Draws, other: Draws) -> tuple[Column, Column]:
        likely, rare = (other, one) if self.swapped else (one, other)
        return likely[:, self.column] * self.sign, rare[:, self.column] * self.sign


def _probability_bounds(
    likely: NDArray[Any], rare: NDArray[Any], size: int, other_size: int, risk: float
) -> tuple[Column, Column]:
    """Confidence bounds of probabilities from counts (Clopper and Pearson), each wrong with `risk`.

    likely, rare: for each event, the number of hits among `size` and among `other_size` samples.
    Returns (lower bounds for `likely`, upper bounds for `rare`).
    """
    quantile = scipy.special.betaincinv
    least = quantile(np.maximum(likely, 1), size - likely + 1, risk)
    most = quantile(rare + 1, np.maximum(other_size - rare, 1), 1 - risk)
    return np.where(likely > 0, least, 0.0), np.where(rare < other_size, most, 1.0)
