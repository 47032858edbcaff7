# SPDX-License-Identifier: Apache-2.0
"""Audit of the Gaussian mechanism's epsilon on neighbouring data sets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from fedplan.audits.bounds import (
    Draws,
    gaussian_lower_bound,
    lower_bound,
    release_rows,
    sample_releases,
)
from fedplan.privacy.accounting.accountant import epsilon
from fedplan.privacy.mechanisms.gaussian import Change, GaussianMechanism, aggregate

DELTA = 1e-5
"""Delta of the claimed epsilon and of its lower bounds."""
CONFIDENCE = 0.999
"""Of each pair: correct noise fails fewer than one audit in a hundred by chance."""
_SHAPES = {"a": (2,), "b": (2,), "c": (1,)}
MECHANISM = GaussianMechanism(
    {name: (shape, torch.float64) for name, shape in _SHAPES.items()},
    clipping_norm=1.0,
    noise_multiplier=1.0,
    divisor=10.0,
)


def _change(**values: Sequence[float]) -> Change:
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}


_LONG = _change(a=[1.0, 0.0])
_SMALL = _change(a=[0.1, 0.0], b=[0.0, 0.2])
_MANY = (_LONG, _SMALL, _change(b=[0.0, 5.0]), _change(a=[1.0, -2.0], b=[0.5, 1.0], c=[3.0])) * 2
NEIGHBOR_PAIRS: dict[str, tuple[Change, tuple[Change, ...]]] = {
    "at the bound, alone": (_LONG, ()),
    "at the bound, among equals": (_LONG, (_LONG,) * 9),
    "all names, among many": (_change(a=[1.0, -2.0], b=[0.5, 1.0], c=[3.0]), _MANY),
    "names that no other sends": (_change(c=[9.0]), (_SMALL,) * 9),
    "below the bound": (_change(b=[0.3, 0.4]), _MANY),
    "huge": (_change(a=[1e30, -1e30]), _MANY),
    "zero": (_change(a=[0.0, 0.0], c=[0.0]), _MANY),
    "nothing": ({}, _MANY),
}
"""By what the one client sends: its change, and those of the clients in both data sets."""


@dataclass(frozen=True)
class EpsilonAudit:
    """Result for one pair of neighbouring data sets.

    client: what the one client sends; claimed: the epsilon that is charged.
    lower_bound: of epsilon, for any mechanism; gaussian_lower_bound: for a Gaussian one.
    """

    client: str
    claimed: float
    lower_bound: float
    gaussian_lower_bound: float

    @property
    def sound(self) -> bool:
        """Whether no lower bound is above the claimed epsilon."""
        return max(self.lower_bound, self.gaussian_lower_bound) <= self.claimed


def audit_epsilon(
    count: int, secret: bytes, mechanism: GaussianMechanism = MECHANISM
) -> list[EpsilonAudit]:
    """Audit each of NEIGHBOR_PAIRS by `count` releases of both of its data sets."""
    claimed = epsilon([mechanism.event], DELTA)
    audits = list[EpsilonAudit]()
    for client, (victim, others) in NEIGHBOR_PAIRS.items():
        pair = ([*others, victim], others)
        one, other = _statistics(*(_sample_rows(mechanism, c, count, secret) for c in pair))
        bounds = [
            bound(one, other, delta=DELTA, confidence=CONFIDENCE)
            for bound in (lower_bound, gaussian_lower_bound)
        ]
        audits.append(EpsilonAudit(client, claimed, bounds[0], bounds[1]))
    return audits


def _sample_rows(
    mechanism: GaussianMechanism, changes: Sequence[Change], count: int, secret: bytes
) -> Draws:
    return release_rows(
        sample_releases(mechanism, changes, count, partial(_aggregate_with, secret))
    )


def _aggregate_with(
    secret: bytes, mechanism: GaussianMechanism, changes: Sequence[Change]
) -> dict[str, Tensor]:
    return aggregate(mechanism, changes, secret, "audit")


def _statistics(one: Draws, other: Draws) -> tuple[Draws, Draws]:
    """Statistics of both samples: each coordinate, the projection on their difference, the norm."""
    direction = one[::2].mean(0) - other[::2].mean(0)  # by the half that chooses the event

    def with_statistics(rows: Draws) -> Draws:
        return np.column_stack([rows, rows @ direction, np.linalg.norm(rows, axis=1)])

    return with_statistics(one), with_statistics(other)
