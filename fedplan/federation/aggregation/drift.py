# SPDX-License-Identifier: Apache-2.0
"""Drift: how far the clients' updates are apart, by kind of param, computed from sums."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import fsum, isfinite

import torch
from torch import Tensor

from fedplan.models.params import Params
from fedplan.tensors.chunks import squared_distances

STEPS = 2**80
"""Squares are summed as integers in units of 1/STEPS, so that their order does not matter."""

Squares = Mapping[str, Mapping[str, float]]
"""Squared distances by client and key."""

DIGITS = 6
"""Significant digits of recorded numbers; more would depend on the number of threads."""


@dataclass
class Drift:
    """Sum over clients of weight x squared change of each param, exact in any order.

    `squares`: sums by param key, as integers in units of 1/STEPS; a square that is not finite
    counts as 0. Call `add` per client, `merge` other sums of the round, then `by_kind`.
    """

    squares: dict[str, int] = field(default_factory=dict[str, int])

    def add(self, squares: Mapping[str, float], weight: int) -> None:
        """Add one client's update, as squared distances from the base by key."""
        for key, square in squares.items():
            steps = weight * round(_finite_or_zero(square) * STEPS)
            self.squares[key] = self.squares.get(key, 0) + steps

    def merge(self, other: Drift) -> None:
        """Add the sums of another Drift of the same round."""
        for key, square in other.squares.items():
            self.squares[key] = self.squares.get(key, 0) + square

    def by_kind(
        self,
        params: Params,
        base: Mapping[str, Tensor],
        means: Mapping[str, Tensor],
        weights: Mapping[str, int],
    ) -> dict[str, tuple[float, float]]:
        """Return by kind of param (variance, squared step of the mean), 6 significant digits each.

        Both are summed over the params of the kind. Variance: weighted mean squared distance of the
        clients' values from their mean. Step: from `base` to the mean. `base`: values before the
        round, from which `squares` were computed. `means`, `weights`: mean value and total weight
        of the clients that were added. All three are by `Param.key`; each key of `means` must be in
        `base`. Params that are not in `means` or not in `squares` are left out; under secure
        aggregation only params with drift tracking have squares.
        """
        totals: dict[str, tuple[float, float]] = {}
        steps = squared_distances(means, base) if self.squares else {}
        for p in params:
            if p.key in means and p.key in self.squares:
                step = _finite_or_zero(steps[p.key])
                mean_square = self.squares[p.key] / weights[p.key] / STEPS
                variance = mean_square - step
                variance = max(variance, 0.0) if variance > 1e-9 * mean_square else 0.0
                total = totals.get(p.kind, (0.0, 0.0))
                totals[p.kind] = (total[0] + variance, total[1] + step)
        return {kind: (round_digits(v), round_digits(s)) for kind, (v, s) in totals.items()}


def drift_around(
    params: Params, base: Mapping[str, Tensor], center: Mapping[str, Tensor], squares: Squares
) -> dict[str, tuple[float, float]]:
    """Return by kind of param (mean squared distance from `center`, squared step from `base`).

    Both are summed over the params of the kind, and all clients count alike. As `Drift.by_kind`,
    for robust rules with a result that is no mean. `center`: result of the rule by key. `base`:
    values before the round. `squares`: squared distances of the clients' values from `center`, by
    client and key.
    """
    totals: dict[str, tuple[float, float]] = {}
    steps = squared_distances(center, base)
    for p in params:
        if p.key in center:
            distances = [by_key[p.key] for by_key in squares.values() if p.key in by_key]
            total, step = totals.get(p.kind, (0.0, 0.0)), _finite_or_zero(steps[p.key])
            totals[p.kind] = (total[0] + fsum(distances) / len(distances), total[1] + step)
    return {kind: (round_digits(v), round_digits(s)) for kind, (v, s) in totals.items()}


class SquaredNorms(Mapping[str, float]):
    """Read-only mapping from kind of param to the squared norm of the values, computed on access.

    `params`: gives the kind of each key. `values`: tensors by key, not copied.
    """

    def __init__(self, params: Params, values: Mapping[str, Tensor]) -> None:
        self._values = values
        self._keys = dict[str, list[str]]()
        for p in params:
            if p.key in values:
                self._keys.setdefault(p.kind, []).append(p.key)

    def __getitem__(self, kind: str) -> float:
        values = {key: self._values[key] for key in self._keys[kind]}
        zeros = {key: torch.zeros_like(value) for key, value in values.items()}
        return round_digits(fsum(map(_finite_or_zero, squared_distances(values, zeros).values())))

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


def _finite_or_zero(square: float) -> float:
    return square if isfinite(square) else 0.0


def round_digits(number: float) -> float:
    """Round a number to DIGITS significant digits."""
    return float(f"{number:.{DIGITS}g}")
