# SPDX-License-Identifier: Apache-2.0
"""Faults: who drops out of a round and who is late, played by a runner, not by the server."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedplan import seeds
from fedplan.federation.rounds import Tally
from fedplan.federation.server import Server
from fedplan.studies.schema import Study


@dataclass(frozen=True)
class Faults:
    """What becomes of clients that are asked: some drop out, and some answer too late to count."""

    dropped: float = 0.0
    late: float = 0.0

    def fate(self, experiment: str, number: int, client: str) -> str:
        """What becomes of one client: it answers, it is late, or it drops out."""
        generator = seeds.generator(experiment, "fate", number, client)
        drawn = torch.rand((), generator=generator, dtype=torch.float64).item()
        if drawn < self.dropped:
            return "dropped"
        return "late" if drawn < self.dropped + self.late else "answers"

    def play(self, server: Server, tally: Tally) -> set[str]:
        """Take those who drop out from a round, and say who is late."""
        number, experiment = server.world.round + 1, server.agreement.experiment
        fates = {name: self.fate(experiment, number, name) for name in tally.cohort}
        for name in [name for name, fate in fates.items() if fate == "dropped"]:
            del tally.cohort[name]
            tally.rejected[name] = "dropped"
        return {name for name, fate in fates.items() if fate == "late"}


def faults_of(study: Study) -> Faults:
    """What a study says of clients that fail."""
    return Faults(study.clients.dropped, study.clients.late)
