# SPDX-License-Identifier: Apache-2.0
"""The kernel profile: how good a kernel is when its value is the best one, and its gradient."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.optimize import minimize

from research.kernel.problem import Array, Problem, Weights, features


@dataclass(frozen=True)
class Restricted:
    """What is left to learn under one kernel: a quadratic in the value, for each client.

    `curvatures` are A_m = mean Z'Z + ridge, `pulls` B_m = mean Z'Y, and `height` is half the mean
    square of the targets. A client's loss is height_m + tr(V'A_m V)/2 - tr(B_m'V).
    """

    curvatures: Array
    pulls: Array
    height: float

    @cached_property
    def curvature(self) -> Array:
        return self.curvatures.mean(0)

    @cached_property
    def pull(self) -> Array:
        return self.pulls.mean(0)

    @cached_property
    def best(self) -> Array:
        """The best value, in closed form: ridge regression on all clients' features."""
        return np.linalg.solve(self.curvature, self.pull)

    @cached_property
    def profile(self) -> float:
        """The loss with the best value."""
        return float(self.height - 0.5 * np.sum(self.pull * self.best))

    def loss(self, value: Array) -> float:
        """The federation's loss with a value."""
        bent = 0.5 * np.sum(value * (self.curvature @ value))
        return float(self.height + bent - np.sum(self.pull * value))

    def above(self, value: Array) -> float:
        """How far a value's loss lies above the profile; never below 0."""
        off = value - self.best
        return float(0.5 * np.sum(off * (self.curvature @ off)))


def restricted(problem: Problem, query: Array, key: Array) -> Restricted:
    """The problem under a kernel that is the same for all clients."""
    shape = (problem.clients, -1, problem.width)
    found = features(problem.tokens, query[None], key[None]).reshape(shape)
    across = found.swapaxes(-1, -2) / problem.rows
    height = 0.5 * np.sum(problem.targets**2) / (problem.clients * problem.rows)
    ridge = problem.ridge * np.eye(problem.width)
    return Restricted(across @ found + ridge, across @ problem.flat_targets, float(height))


def gradients(problem: Problem, each: Weights) -> Weights:
    """The gradient of each client's own loss at its own weights."""
    tokens, flat, count = problem.tokens, problem.flat, problem.tokens.shape[-2]
    by_row = (*tokens.shape[:-1], each.query.shape[-1])
    asked, held = (np.tanh(flat @ w).reshape(by_row) for w in (each.query, each.key))
    summary = held.swapaxes(-1, -2) @ tokens / count
    found = (asked @ summary).reshape(flat.shape)
    missed = (found @ each.value - problem.flat_targets) / problem.rows
    back = (missed @ each.value.swapaxes(-1, -2)).reshape(tokens.shape)
    to_asked = back @ summary.swapaxes(-1, -2) * (1 - asked**2)
    to_held = tokens @ (back.swapaxes(-1, -2) @ asked / count) * (1 - held**2)
    across, narrow = flat.swapaxes(-1, -2), (*flat.shape[:-1], -1)
    return Weights(
        across @ to_asked.reshape(narrow),
        across @ to_held.reshape(narrow),
        found.swapaxes(-1, -2) @ missed + problem.ridge * each.value,
    )


def envelope(problem: Problem, query: Array, key: Array) -> tuple[Array, Array]:
    """The gradient of the profile: that of the loss at the best value, which has none of its own.

    The best value moves with the kernel, but the loss is flat in it there, so its motion counts
    for nothing.
    """
    best = restricted(problem, query, key).best
    found = gradients(problem, Weights(query, key, best).apart(problem.clients)).mean()
    return found.query, found.key


def lowest(problem: Problem, query: Array, key: Array) -> float:
    """The profile at the bottom of the valley that a kernel lies in: a reference, not a proof."""
    shape = (2, *query.shape)

    def told(both: Array) -> tuple[float, Array]:
        there = both.reshape(shape)
        slope = np.stack(envelope(problem, *there))
        return restricted(problem, *there).profile, slope.ravel()

    done = minimize(
        told,
        np.stack((query, key)).ravel(),
        jac=True,
        method="L-BFGS-B",
        options={"maxiter": 5000, "maxfun": 10000, "ftol": 1e-15, "gtol": 1e-10},
    )
    return float(done.fun)
