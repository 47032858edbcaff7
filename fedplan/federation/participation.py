# SPDX-License-Identifier: Apache-2.0
"""Participation: the random cohort of each round, seeded by experiment name and round."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedplan import seeds


@dataclass(frozen=True)
class Participation:
    """Sampling of a `fraction` of all clients in each round, without replacement."""

    fraction: float = 1.0

    def cohort(self, experiment: str, number: int, roster: list[str]) -> list[str]:
        """Return the sampled clients of round `number`, at least one, in the order of `roster`.

        The number is `fraction` times the clients, rounded. Equal experiment names, rounds and
        rosters give the same clients.
        """
        draw = torch.randperm(len(roster), generator=seeds.generator(experiment, "cohort", number))
        count = max(1, round(self.fraction * len(roster)))
        places = draw[:count].sort().values
        return [roster[int(place)] for place in places]
