# SPDX-License-Identifier: Apache-2.0
"""Audit of the Gaussian mechanism's epsilon on neighbouring data sets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from epsilon_bounds import gaussian_lower_bound, lower_bound, release_rows, sample_releases
from noisy_means import aggregate

from fedplan.privacy.accounting.accountant import epsilon
from fedplan.privacy.mechanisms.gaussian import Change, GaussianMechanism

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
"""Neighbouring data sets: the one client's change, and the changes of the clients in both."""


@dataclass(frozen=True)
class EpsilonAudit:
    """Result for one pair of neighbouring data sets.

    client: key of the pair in NEIGHBOR_PAIRS; claimed: the mechanism's epsilon by the accountant.
    lower_bound: epsilon proven for any mechanism; gaussian_lower_bound: proven if noise is
    Gaussian. `sound` is False if a proven epsilon is above the claimed one.
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
    """Audit a mechanism on each of NEIGHBOR_PAIRS; return one result per pair, in order.

    count: releases sampled of each data set; secret: 32 bytes, the key of the noise.
    mechanism: must have the tensor names and shapes of MECHANISM.
    Statistics of a release: each coordinate, the projection on the difference of the mean releases
    of the two data sets, and the norm.
    """
    claimed = epsilon([mechanism.event], DELTA)
    noisy_mean = partial(aggregate, secret=secret, name="audit")
    audits = list[EpsilonAudit]()
    for client, (victim, others) in NEIGHBOR_PAIRS.items():
        pair = [
            release_rows(sample_releases(mechanism, changes, count, noisy_mean))
            for changes in ([*others, victim], others)
        ]
        direction = pair[0][::2].mean(0) - pair[1][::2].mean(0)  # by the half that chooses events
        one, other = (
            np.column_stack([rows, rows @ direction, np.linalg.norm(rows, axis=1)]) for rows in pair
        )
        bounds = [
            bound(one, other, delta=DELTA, confidence=CONFIDENCE)
            for bound in (lower_bound, gaussian_lower_bound)
        ]
        audits.append(EpsilonAudit(client, claimed, bounds[0], bounds[1]))
    return audits
