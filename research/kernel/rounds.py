# SPDX-License-Identifier: Apache-2.0
"""Rounds: FedAvg on query, key and value, played step by step, with the sums a server has."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from research.kernel.problem import Array, Problem, Weights
from research.kernel.profile import gradients


@dataclass(frozen=True)
class Pace:
    """How clients train: full-gradient steps in a round, their rate, and rounds in all."""

    steps: int = 5
    rate: float = 0.02
    rounds: int = 150


@dataclass(frozen=True)
class Drift:
    """What a server knows of a part after a round, all of it from sums over clients.

    `apart` is the mean square of the changes around their mean and `step` the square of that mean:
    the `drift` of a fedplan ledger. `size` is the square of the part itself, before the round.
    """

    apart: float
    step: float
    size: float

    def __add__(self, other: Drift) -> Drift:
        """That of two parts as one."""
        return Drift(self.apart + other.apart, self.step + other.step, self.size + other.size)


@dataclass(frozen=True)
class Played:
    """A round: what the server has after it, and the drift of kernel and value in it."""

    weights: Weights
    kernel: Drift
    value: Drift


@dataclass(frozen=True)
class Batches:
    """How many rows a step looks at, and what draws them: each step anew, at each client."""

    rows: int
    rng: np.random.Generator

    def of(self, problem: Problem) -> Problem:
        """The problem that one step sees."""
        every = np.tile(np.arange(problem.rows), (problem.clients, 1))
        drawn = self.rng.permuted(every, axis=1)[:, : self.rows, None, None]
        tokens, targets = (
            np.take_along_axis(each, drawn, 1) for each in (problem.tokens, problem.targets)
        )
        return Problem(tokens, targets, problem.ridge)


def play(problem: Problem, weights: Weights, pace: Pace, batches: Batches | None = None) -> Played:
    """One round of everything; without batches, of full gradients."""
    each = weights.apart(problem.clients)
    for _ in range(pace.steps):
        slope = gradients(batches.of(problem) if batches else problem, each)
        each = Weights(*(w - pace.rate * g for w, g in zip(each, slope, strict=True)))
    query, key, value = (_drift(after, was) for after, was in zip(each, weights, strict=True))
    return Played(each.mean(), query + key, value)


def _drift(after: Array, before: Array) -> Drift:
    changes = after - before
    mean = changes.mean(0)
    apart = np.sum((changes - mean) ** 2) / len(changes)
    return Drift(float(apart), float(np.sum(mean**2)), float(np.sum(before**2)))


def path(
    problem: Problem, weights: Weights, pace: Pace, batches: Batches | None = None
) -> list[Played]:
    """All rounds without a freeze, each as it ended."""
    found = list[Played]()
    for _ in range(pace.rounds):
        found.append(play(problem, found[-1].weights if found else weights, pace, batches))
    return found


def play_frozen(problem: Problem, weights: Weights, pace: Pace, rounds: int) -> Weights:
    """The frozen stage step by step, as a check of its closed form."""
    for _ in range(rounds):
        each = weights.apart(problem.clients)
        for _ in range(pace.steps):
            slope = gradients(problem, each)
            each = each._replace(value=each.value - pace.rate * slope.value)
        weights = weights._replace(value=each.value.mean(0))
    return weights
