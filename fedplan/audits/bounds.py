# SPDX-License-Identifier: Apache-2.0
"""Bounds: what epsilon a mechanism has at least, shown by telling two worlds apart.

Worlds are neighbours: the same clients, with and without one. An event that is likely in one and
rare in the other proves an epsilon; one above what was claimed proves a mistake.
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
from fedplan.privacy.accounting.events import NOISES, Release
from fedplan.privacy.errors import PrivacyError, needed
from fedplan.privacy.mechanisms.gaussian import Change, Mechanism

T = TypeVar("T")
Draws = NDArray[np.float64]
"""One row per draw, one column per statistic of it."""
Column = NDArray[np.float64]
Measure = Callable[[Column, Column], Column]
"""How far apart two worlds are, from the chances of an event in each."""
Aggregate = Callable[[Mechanism, Sequence[Change]], dict[str, Tensor]]

_THRESHOLDS = 200
_PURPOSE = "to audit"


def lower_bound(one: Draws, other: Draws, *, delta: float = 0.0, confidence: float = 0.95) -> float:
    """An epsilon that the mechanism has at least, unless chance fooled us (1 - confidence)."""

    def measure(likely: Column, rare: Column) -> Column:
        return np.log(np.maximum(likely - delta, 1e-300) / rare)

    return max(0.0, _found(one, other, measure, confidence))


def gaussian_lower_bound(
    one: Draws, other: Draws, *, delta: float, confidence: float = 0.95
) -> float:
    """The same of a mechanism that claims to be Gaussian, which is far sharper.

    Such a claim is about every event at once, the common ones too: if one has the chances p and q,
    the noise is at most 1 / (Phi^-1(p) - Phi^-1(q)) (Nasr et al., arXiv 2302.07956). What is found
    is the epsilon of that noise.
    """
    quantile = needed("scipy.special", _PURPOSE).ndtri
    found = _found(one, other, lambda likely, rare: quantile(likely) - quantile(rare), confidence)
    return epsilon([Release(1 / found)], delta) if found > 1 / NOISES[1] else 0.0


def draws(
    mechanism: Mechanism, changes: Sequence[Change], count: int, aggregate: Aggregate
) -> dict[str, Tensor]:
    """Many independent releases of the same changes by one call: each name gets a first dimension.

    The world is laid side by side `count` times. Its lengths grow by the root of the count, and so
    does the bound; the noise as a multiple of it shrinks by as much. So factor, weights, divisor
    and noise are for each copy what they are for the world alone.
    """
    shared = {name: ((count, *shape), dtype) for name, (shape, dtype) in mechanism.shared.items()}
    bound, noise = mechanism.bound * sqrt(count), mechanism.noise / sqrt(count)
    wide = replace(mechanism, shared=shared, bound=bound, noise=noise)
    tiled = [{n: t.expand(count, *t.shape) for n, t in change.items()} for change in changes]
    return aggregate(wide, tiled)


def flat(released: dict[str, Tensor]) -> Draws:
    """Draws as rows: the coordinates of all names, in the order of the names."""
    parts = [v.double().reshape(len(v), -1) for _, v in sorted(released.items())]
    return torch.cat(parts, dim=1).numpy()


def _found(one: Draws, other: Draws, measure: Measure, confidence: float) -> float:
    """The measure of the best event.

    For each statistic and threshold, "at least" and "at most" are events. Half of the draws choose
    the best event; the other half alone says how likely it is in each world.
    """
    if one.ndim != 2 or one.shape[1:] != other.shape[1:] or min(len(one), len(other)) < 4:
        raise PrivacyError(f"draws are of shapes {one.shape} and {other.shape}: give rows alike")
    risk = (1 - confidence) / 2
    columns = range(one.shape[1])
    tests = [_Test(c, sign, swap) for c in columns for sign in (1, -1) for swap in (False, True)]
    # Chosen at a lower risk than judged: events that are rare in both worlds owe more to luck.
    chosen = max((_best(t, one[::2], other[::2], measure, risk / 20) for t in tests), key=_score)
    _, test, threshold = chosen
    hits = [np.array([(v >= threshold).sum()]) for v in test.values(one[1::2], other[1::2])]
    sizes = test.ordered(len(one[1::2]), len(other[1::2]))
    return float(measure(*_chances(hits[0], hits[1], *sizes, risk))[0])


@dataclass(frozen=True)
class _Test:
    """A statistic, which of its sides is looked at, and which world is the likely one."""

    column: int
    sign: int
    swapped: bool

    def ordered(self, one: T, other: T) -> tuple[T, T]:
        return (other, one) if self.swapped else (one, other)

    def values(self, one: Draws, other: Draws) -> tuple[Column, Column]:
        likely, rare = self.ordered(one, other)
        return likely[:, self.column] * self.sign, rare[:, self.column] * self.sign


def _best(
    test: _Test, one: Draws, other: Draws, measure: Measure, risk: float
) -> tuple[float, _Test, float]:
    """The threshold of the largest measure."""
    likely, rare = (np.sort(values) for values in test.values(one, other))
    thresholds = _thresholds(likely, rare)
    hits = [len(each) - np.searchsorted(each, thresholds) for each in (likely, rare)]
    found = measure(*_chances(hits[0], hits[1], len(likely), len(rare), risk))
    best = int(found.argmax())
    return float(found[best]), test, float(thresholds[best])


def _score(found: tuple[float, _Test, float]) -> float:
    return found[0]


def _thresholds(likely: Column, rare: Column) -> Column:
    """Values of both worlds, by ranks that lie closer in the upper tail."""
    size = min(len(likely), len(rare))
    ranks = np.geomspace(1, size, _THRESHOLDS).astype(np.int64)
    return np.unique(np.concatenate([likely[-ranks], rare[-ranks]]))


def _chances(
    likely: NDArray[Any], rare: NDArray[Any], size: int, other_size: int, risk: float
) -> tuple[Column, Column]:
    """The least chance of the likely hits and the most of the rare ones (Clopper and Pearson)."""
    quantile = needed("scipy.special", _PURPOSE).betaincinv
    least = quantile(np.maximum(likely, 1), size - likely + 1, risk)
    most = quantile(rare + 1, np.maximum(other_size - rare, 1), 1 - risk)
    return np.where(likely > 0, least, 0.0), np.where(rare < other_size, most, 1.0)
