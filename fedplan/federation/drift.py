# SPDX-License-Identifier: Apache-2.0
"""Drift: how far the clients' changes lie apart, part by part, from sums alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import fsum, isfinite

import torch
from torch import Tensor

from fedplan.models.params import Params
from fedplan.tensors.stretches import distances

STEPS = 2**80
"""Squares are summed as whole numbers of this part of one: in any order, the same sum."""

Squares = Mapping[str, Mapping[str, float]]
"""The squared length of something of each client, param by param."""

DIGITS = 6
"""Significant digits that are told: those that no number of threads changes."""


@dataclass
class Drift:
    """A running sum of each param's squared changes, weighted as the changes themselves are."""

    squares: dict[str, int] = field(default_factory=dict[str, int])

    def add(self, values: Mapping[str, Tensor], base: Mapping[str, Tensor], weight: int) -> None:
        """Add what one client changed."""
        self.count(distances(values, base), weight)

    def count(self, squares: Mapping[str, float], weight: int) -> None:
        """Add what one client changed, by its squared length."""
        for key, square in squares.items():
            moved = weight * round(_told(square) * STEPS)
            self.squares[key] = self.squares.get(key, 0) + moved

    def merge(self, other: Drift) -> None:
        """Add what another sum of the same round holds."""
        for key, square in other.squares.items():
            self.squares[key] = self.squares.get(key, 0) + square

    def by_kind(
        self,
        params: Params,
        base: Mapping[str, Tensor],
        means: Mapping[str, Tensor],
        weights: Mapping[str, int],
    ) -> dict[str, tuple[float, float]]:
        """For each kind: the mean squared distance of changes from their mean, and the mean's own.

        The two add up to the mean square of the changes, so their ratio says how much of what the
        clients did was lost when it was averaged. Masked sums may be without squares: of
        those nothing is told.
        """
        found: dict[str, tuple[float, float]] = {}
        steps = distances(means, base) if self.squares else {}
        for p in params:
            if p.key in means and p.key in self.squares:
                step = _told(steps[p.key])
                whole = self.squares[p.key] / weights[p.key] / STEPS
                apart = max(whole - step, 0.0) if whole - step > 1e-9 * whole else 0.0
                before = found.get(p.kind, (0.0, 0.0))
                found[p.kind] = (before[0] + apart, before[1] + step)
        return {kind: (_short(apart), _short(step)) for kind, (apart, step) in found.items()}


def around(
    params: Params, base: Mapping[str, Tensor], made: Mapping[str, Tensor], squares: Squares
) -> dict[str, tuple[float, float]]:
    """The same where the middle of the changes is no mean: by each client's distances from it."""
    found: dict[str, tuple[float, float]] = {}
    steps = distances(made, base)
    for p in params:
        if p.key in made:
            held = [each[p.key] for each in squares.values() if p.key in each]
            before, step = found.get(p.kind, (0.0, 0.0)), _told(steps[p.key])
            found[p.kind] = (before[0] + fsum(held) / len(held), before[1] + step)
    return {kind: (_short(apart), _short(step)) for kind, (apart, step) in found.items()}


class Sizes(Mapping[str, float]):
    """The squared length of values by kind of param, each worked out when a rule looks at it."""

    def __init__(self, params: Params, values: Mapping[str, Tensor]) -> None:
        self._values = values
        self._keys = dict[str, list[str]]()
        for p in params:
            if p.key in values:
                self._keys.setdefault(p.kind, []).append(p.key)

    def __getitem__(self, kind: str) -> float:
        held = {key: self._values[key] for key in self._keys[kind]}
        nothing = {key: torch.zeros_like(value) for key, value in held.items()}
        return _short(fsum(map(_told, distances(held, nothing).values())))

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


def _told(square: float) -> float:
    return square if isfinite(square) else 0.0


def _short(number: float) -> float:
    return float(f"{number:.{DIGITS}g}")
