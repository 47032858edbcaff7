# SPDX-License-Identifier: Apache-2.0
"""The frozen stage: FedAvg on the value alone is an affine map, so where it goes is known."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from research.kernel.problem import Array
from research.kernel.profile import Restricted


@dataclass(frozen=True)
class Stage:
    """One round as V -> kept V + given. With a step size below 2 / L it has one fixed point."""

    kept: Array
    given: Array

    @property
    def limit(self) -> Array:
        """Where the rounds lead: V = kept V + given."""
        return np.linalg.solve(np.eye(len(self.kept)) - self.kept, self.given)

    def after(self, value: Array, rounds: int) -> Array:
        """The value after so many rounds."""
        limit = self.limit
        return limit + np.linalg.matrix_power(self.kept, rounds) @ (value - limit)


def stage(problem: Restricted, steps: int, rate: float) -> Stage:
    """The map of one round of so many full-gradient steps at each client.

    A client's steps are V -> M V + (I - M) A^-1 B with M = (I - rate A)^steps; the server takes
    the mean. With one step, or where clients share A, or share A^-1 B, the limit is the best value.
    """
    one = np.eye(problem.curvatures.shape[-1])
    kept = np.linalg.matrix_power(one - rate * problem.curvatures, steps)
    own = np.linalg.solve(problem.curvatures, problem.pulls)
    return Stage(kept.mean(0), ((one - kept) @ own).mean(0))


@dataclass(frozen=True)
class Split:
    """The final error over a reference, split without a remainder.

    `bias` is what the frozen kernel costs even with the best value; `drift` is what the value's
    limit costs, since clients' steps pull apart; `rest` is what rounds that were not played cost.
    """

    bias: float
    drift: float
    rest: float

    @property
    def error(self) -> float:
        return self.bias + self.drift + self.rest


def split(
    problem: Restricted, value: Array, *, steps: int, rate: float, rounds: int, reference: float
) -> Split:
    """What becomes of a value after the rounds that are left, once the kernel is frozen."""
    found = stage(problem, steps, rate)
    drift = problem.above(found.limit)
    left = problem.above(found.after(value, rounds)) - drift
    return Split(problem.profile - reference, drift, left)
