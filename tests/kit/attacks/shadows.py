# SPDX-License-Identifier: Apache-2.0
"""Clients whose examples are partly candidates that the server knows, and what it sees of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from fedplan.data.examples import Examples
from fedplan.models.params import Param

OWN = 4
"""Examples of each client that no other client has, and that the server does not know."""
CANDIDATES, RATE = 24, 1 / 6
"""Candidates, and the probability that a client has one, independently of all others: two worlds
differ in one example that is there or not, as in the definition of differential privacy."""
MAX_EXAMPLES = CANDIDATES + OWN


@dataclass(frozen=True)
class Chosen:
    """Rows of other examples. Implements Examples."""

    base: Examples
    rows: Tensor

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, indices: Tensor) -> dict[str, Tensor]:
        """The examples at these indices."""
        return self.base.batch(self.rows[indices])


@dataclass(frozen=True)
class Cohort:
    """Clients with random candidates: the first rows of `pool` are candidates, in `members` by
    client [clients, CANDIDATES]; the rest are OWN for each client.
    """

    pool: Examples
    members: Tensor

    @staticmethod
    def draw(make_pool: Callable[[int], Examples], clients: int, seed: int = 0) -> Cohort:
        """Draw the members of `clients` clients; make_pool: makes that many examples."""
        generator = torch.Generator().manual_seed(seed)
        members = torch.rand(clients, CANDIDATES, generator=generator) < RATE
        return Cohort(make_pool(CANDIDATES + OWN * clients), members)

    @property
    def clients(self) -> list[Chosen]:
        """The examples of each client."""
        own = torch.arange(OWN) + CANDIDATES
        return [
            Chosen(self.pool, torch.cat([row.nonzero().flatten(), own + OWN * i]))
            for i, row in enumerate(self.members)
        ]

    @property
    def alone(self) -> list[Chosen]:
        """For each candidate, a client that has it and nothing else."""
        return [Chosen(self.pool, torch.tensor([i])) for i in range(CANDIDATES)]

    def counts(self, classes: int) -> Tensor:
        """Label counts [clients, classes]."""
        labels = (each.batch(torch.arange(len(each)))["labels"] for each in self.clients)
        return torch.stack([one_hot(each, classes).sum(0) for each in labels])


@dataclass(frozen=True)
class Seen:
    """What the server sees, a row for each client or group, and the truth that it looks for.

    updates: [rows, numbers]; members: [rows, candidates]; counts: [rows, classes].
    """

    updates: Tensor
    members: Tensor
    counts: Tensor

    def __len__(self) -> int:
        return len(self.updates)

    def halves(self) -> tuple[Seen, Seen]:
        """The even and the odd rows: each half is the shadows of the other."""
        return self.at(torch.arange(0, len(self), 2)), self.at(torch.arange(1, len(self), 2))

    def at(self, rows: Tensor) -> Seen:
        """Some of the rows."""
        return Seen(self.updates[rows], self.members[rows], self.counts[rows])

    def groups(self, size: int) -> Seen:
        """Sums over disjoint groups of `size` rows; rows that fill no group are left out."""
        return self._sums(torch.arange(len(self) // size * size).view(-1, size))

    def random_groups(self, size: int, count: int) -> Seen:
        """`count` sums over random groups of `size` rows, which overlap: a server's shadows.

        Even sums are of even rows and odd of odd, so that `halves` of the result do not overlap.
        """
        generator, half = torch.Generator().manual_seed(0), len(self) // 2
        rows = [torch.randperm(half, generator=generator)[:size] * 2 for _ in range(count)]
        return self._sums(torch.stack([row + i % 2 for i, row in enumerate(rows)]))

    def _sums(self, rows: Tensor) -> Seen:
        return Seen(self.updates[rows].sum(1), self.members[rows].any(1), self.counts[rows].sum(1))


def flatten(changes: Sequence[Mapping[Param, Tensor]], params: Iterable[Param]) -> Tensor:
    """Changes of some params as rows of float64, with zeros for params that a client did not send."""
    flat = [[c.get(p, torch.zeros(p.shape)).flatten() for p in params] for c in changes]
    return torch.stack([torch.cat(row) for row in flat]).double()
