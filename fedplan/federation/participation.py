# SPDX-License-Identifier: Apache-2.0
"""Participation in a round: the random cohort, and how long a server waits for sites."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from fedplan import seeds

Edges = Mapping[str, Sequence[str]]
"""Names of the clients of each edge, by the edge's name."""


@dataclass(frozen=True)
class Participation:
    """Sampling of a `fraction` of all clients in each round, without replacement.

    `edges`: whose updates an edge sums before the server merges the sums; others send theirs to the
    server.
    """

    fraction: float = 1.0
    edges: Edges = field(default_factory=dict[str, Sequence[str]])

    @property
    def edge_of(self) -> dict[str, str]:
        """The edge of each client that has one."""
        return {name: edge for edge, names in self.edges.items() for name in names}

    def cohort(self, experiment: str, number: int, roster: list[str]) -> list[str]:
        """Return the sampled clients of round `number`, at least one, in the order of `roster`.

        The number is `fraction` times the clients, rounded. Equal experiment names, rounds and
        rosters give the same clients.
        """
        draw = torch.randperm(len(roster), generator=seeds.generator(experiment, "cohort", number))
        count = max(1, round(self.fraction * len(roster)))
        places = draw[:count].sort().values
        return [roster[int(place)] for place in places]


@dataclass(frozen=True)
class Timeouts:
    """Timeouts in seconds of a server with remote sites, and the number of attempts.

    Time in which the SuperLink does not answer counts in none of them.
    `sites`: wait for sites to connect, and for a SuperLink that rejects every call.
    `updates`: wait for the updates of a round.
    `reconnect`: time after which a site that disappeared is no longer waited for.
    `poll_interval`: shortest pause between two checks for replies; longer after slow checks.
    `tries`: attempts per request to a site that fails.
    `evaluations`: wait for the evaluation scores of a round; later ones are left out.
    """

    sites: float = 600.0
    updates: float = 3600.0
    reconnect: float = 300.0
    poll_interval: float = 0.5
    tries: int = 5
    evaluations: float = 600.0
