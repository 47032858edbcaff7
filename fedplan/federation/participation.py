# SPDX-License-Identifier: Apache-2.0
"""Participation: who takes part in a round, drawn from the experiment's name and the round."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedplan import seeds


@dataclass(frozen=True)
class Participation:
    """Who takes part: a share of the roster each round."""

    share: float = 1.0

    def cohort(self, experiment: str, number: int, roster: list[str]) -> list[str]:
        """The clients that are asked in a round, in the roster's order."""
        draw = torch.randperm(len(roster), generator=seeds.generator(experiment, "cohort", number))
        asked = max(1, round(self.share * len(roster)))
        places = draw[:asked].sort().values  # so that they stand in the roster's order
        return [roster[int(i)] for i in places]
