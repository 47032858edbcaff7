# SPDX-License-Identifier: Apache-2.0
"""Worlds: neighbouring ones, with and without one client, told apart by the shipped aggregate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from fedplan.audits.bounds import Draws, draws, flat, gaussian_lower_bound, lower_bound
from fedplan.privacy.accounting.accountant import epsilon
from fedplan.privacy.mechanisms.gaussian import Change, Mechanism, aggregate

DELTA = 1e-5
CONFIDENCE = 0.999
"""Of each world: chance makes sound noise look unsound in fewer than one audit of a hundred."""
_SHAPES = {"a": (2,), "b": (2,), "c": (1,)}
MECHANISM = Mechanism(
    {name: (shape, torch.float64) for name, shape in _SHAPES.items()},
    bound=1.0,
    noise=1.0,
    over=10.0,
)


def _change(**values: Sequence[float]) -> Change:
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}


_LONG = _change(a=[1.0, 0.0])
_SMALL = _change(a=[0.1, 0.0], b=[0.0, 0.2])
_MANY = (_LONG, _SMALL, _change(b=[0.0, 5.0]), _change(a=[1.0, -2.0], b=[0.5, 1.0], c=[3.0])) * 2
PAIRS: dict[str, tuple[Change, tuple[Change, ...]]] = {
    "at the bound, alone": (_LONG, ()),
    "at the bound, among equals": (_LONG, (_LONG,) * 9),
    "all names, among many": (_change(a=[1.0, -2.0], b=[0.5, 1.0], c=[3.0]), _MANY),
    "names that no other sends": (_change(c=[9.0]), (_SMALL,) * 9),
    "below the bound": (_change(b=[0.3, 0.4]), _MANY),
    "huge": (_change(a=[1e30, -1e30]), _MANY),
    "zero": (_change(a=[0.0, 0.0], c=[0.0]), _MANY),
    "nothing": ({}, _MANY),
}
"""By what the one client sends: its change, and those of the clients that are in both worlds."""


@dataclass(frozen=True)
class Audited:
    """What one pair of worlds shows: the epsilon claimed, and what it is at least.

    `found` is for any mechanism; `sharper` for one that claims to be Gaussian, as this one does.
    """

    client: str
    claimed: float
    found: float
    sharper: float

    @property
    def sound(self) -> bool:
        """Whether the claim stands."""
        return max(self.found, self.sharper) <= self.claimed


def audited(count: int, secret: bytes, mechanism: Mechanism = MECHANISM) -> list[Audited]:
    """The audit of each pair by so many releases of each of its worlds."""
    claimed = epsilon([mechanism.event], DELTA)
    found = list[Audited]()
    for client, (victim, others) in PAIRS.items():
        worlds = [_released(mechanism, w, count, secret) for w in ([*others, victim], others)]
        one, other = _statistics(*worlds)
        bounds = [
            bound(one, other, delta=DELTA, confidence=CONFIDENCE)
            for bound in (lower_bound, gaussian_lower_bound)
        ]
        found.append(Audited(client, claimed, bounds[0], bounds[1]))
    return found


def _released(mechanism: Mechanism, world: Sequence[Change], count: int, secret: bytes) -> Draws:
    return flat(draws(mechanism, world, count, partial(_once, secret)))


def _once(secret: bytes, mechanism: Mechanism, changes: Sequence[Change]) -> dict[str, Tensor]:
    return aggregate(mechanism, changes, secret, "audit")


def _statistics(one: Draws, other: Draws) -> tuple[Draws, Draws]:
    """Each coordinate, what lies along the way from one world to the other, and the length."""
    moved = one[::2].mean(0) - other[::2].mean(0)  # by the half that chooses the event

    def told(rows: Draws) -> Draws:
        return np.column_stack([rows, rows @ moved, np.linalg.norm(rows, axis=1)])

    return told(one), told(other)
