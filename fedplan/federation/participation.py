# SPDX-License-Identifier: Apache-2.0
"""Participation: the random cohort of each round, seeded by experiment name and round."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedplan import seeds


@dataclass(frozen=True)
class Participation:
    """Sampling of clients: a `fraction` of the roster in each round."""

    fraction: float = 1.0

    def cohort(self, experiment: str, number: int, roster: list[str]) -> list[str]:
        """Return the sampled clients of round `number`, at least one, in the roster's order."""
        draw = torch.randperm(len(roster), generator=seeds.generator(experiment, "cohort", number))
        count = max(1, round(self.fraction * len(roster)))
        places = draw[:count].sort().values
        return [roster[int(place)] for place in places]
