# SPDX-License-Identifier: Apache-2.0
"""Problems: clients with rows of tokens, each labelled by a linear attention of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

SLOPE = 1.5
"""How long the columns of a teacher's query and key are, about: tanh bends, and does not clip."""
SHIFT = 0.5
"""How far a client's mean token moves, for each unit of heterogeneity."""
START = 0.3
"""The deviation of the query and key that training begins with."""


class Weights(NamedTuple):
    """Query and key, which are the kernel, and value; with an axis in front, one of each client."""

    query: Array
    key: Array
    value: Array

    def apart(self, clients: int) -> Weights:
        """As many copies as there are clients."""
        return Weights(*(np.repeat(each[None], clients, 0) for each in self))

    def mean(self) -> Weights:
        """What the server makes of the clients' own."""
        return Weights(*(each.mean(0) for each in self))


@dataclass(frozen=True)
class Setting:
    """How a problem is drawn. `kernels` and `values` say which teachers differ by client."""

    heterogeneity: float = 0.5
    clients: int = 10
    rows: int = 40
    tokens: int = 6
    width: int = 6
    rank: int = 3
    outputs: int = 3
    noise: float = 0.1
    ridge: float = 0.01
    kernels: bool = True
    values: bool = True


@dataclass(frozen=True)
class Problem:
    """Each client's rows (client, row, token, width), their targets, and the ridge on the value.

    All clients have as many rows, so each weighs the same.
    """

    tokens: Array
    targets: Array
    ridge: float

    @property
    def clients(self) -> int:
        return self.tokens.shape[0]

    @property
    def rows(self) -> int:
        return self.tokens.shape[1]

    @property
    def width(self) -> int:
        return self.tokens.shape[3]

    @property
    def flat(self) -> Array:
        """The tokens of each client, one below the other."""
        return self.tokens.reshape(self.clients, -1, self.width)

    @property
    def flat_targets(self) -> Array:
        """The targets of each client, in the order of `flat`."""
        return self.targets.reshape(self.clients, -1, self.targets.shape[-1])


def draw(setting: Setting, seed: int) -> Problem:
    """A problem. What is drawn does not depend on the heterogeneity, only how far it counts.

    What clients differ by sums to zero over them, so the mean teacher is the same at every level.
    """
    s, rng = setting, np.random.default_rng(seed)
    slope = SLOPE / np.sqrt(s.width)
    query, key = (slope * rng.normal(size=(s.width, s.rank)) for _ in range(2))
    value = rng.normal(size=(s.width, s.outputs))

    def around(*shape: int) -> Array:
        found = rng.normal(size=(s.clients, *shape))
        return s.heterogeneity * (found - found.mean(0))

    queries, keys = (slope * around(s.width, s.rank) for _ in range(2))
    values, centres = around(s.width, s.outputs), SHIFT * around(s.width)
    tokens = rng.normal(size=(s.clients, s.rows, s.tokens, s.width)) + centres[:, None, None]
    teacher = Weights(
        query + s.kernels * queries, key + s.kernels * keys, value + s.values * values
    )
    clean = features(tokens, teacher.query, teacher.key) @ teacher.value[:, None]
    return Problem(tokens, clean + s.noise * rng.normal(size=clean.shape), s.ridge)


def start(problem: Problem, seed: int, rank: int = Setting.rank) -> Weights:
    """What training begins with: a small random kernel, and no value at all."""
    rng, width = np.random.default_rng(100 + seed), problem.width
    query, key = (START * rng.normal(size=(width, rank)) for _ in range(2))
    return Weights(query, key, np.zeros((width, problem.targets.shape[-1])))


def features(tokens: Array, query: Array, key: Array) -> Array:
    """Z = tanh(H Q) tanh(H K)' H / n of every row; the output of the attention is Z V."""
    asked, held = np.tanh(tokens @ query[:, None]), np.tanh(tokens @ key[:, None])
    return asked @ (held.swapaxes(-1, -2) @ tokens) / tokens.shape[-2]
