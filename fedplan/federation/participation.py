# SPDX-License-Identifier: Apache-2.0
"""Participation: who takes part in a round, drawn from the experiment's name and the round."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedplan import seeds


@dataclass(frozen=True)
class Participation:
    """Who takes part: a share of the roster each round; of those some drop out, some are late."""

    share: float = 1.0
    dropped: float = 0.0
    late: float = 0.0

    def cohort(self, experiment: str, number: int, roster: list[str]) -> list[str]:
        """The clients that are asked in a round, in the roster's order."""
        draw = torch.randperm(len(roster), generator=seeds.generator(experiment, "cohort", number))
        asked = max(1, round(self.share * len(roster)))
        chosen = {roster[int(i)] for i in draw[:asked]}
        return [name for name in roster if name in chosen]

    def fate(self, experiment: str, number: int, client: str) -> str:
        """What becomes of a client that is asked: it answers, it is late, or it drops out."""
        generator = seeds.generator(experiment, "fate", number, client)
        drawn = torch.rand((), generator=generator, dtype=torch.float64).item()
        if drawn < self.dropped:
            return "dropped"
        return "late" if drawn < self.dropped + self.late else "answers"
