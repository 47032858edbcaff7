# SPDX-License-Identifier: Apache-2.0
"""Simulated faults: clients that drop out of a round or reply too late."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedplan import seeds
from fedplan.federation.rounds import RoundState
from fedplan.federation.server import Server
from fedplan.studies.schema import Study


@dataclass(frozen=True)
class Faults:
    """Probabilities that a client of a round drops out, or replies too late to be aggregated."""

    dropped: float = 0.0
    late: float = 0.0

    def draw_fate(self, experiment: str, number: int, client: str) -> str:
        """Draw "dropped", "late" or "answers" for a client in round `number`, by the seed."""
        generator = seeds.generator(experiment, "fate", number, client)
        drawn = torch.rand((), generator=generator, dtype=torch.float64).item()
        if drawn < self.dropped:
            return "dropped"
        return "late" if drawn < self.dropped + self.late else "answers"

    def apply(self, server: Server, round_state: RoundState) -> set[str]:
        """Remove the clients that drop out from a round's cohort, and return the late ones.

        Dropped clients are added to `round_state.rejected`.
        """
        number, experiment = server.global_state.round + 1, server.agreement.experiment
        fates = {name: self.draw_fate(experiment, number, name) for name in round_state.cohort}
        for name in [name for name, fate in fates.items() if fate == "dropped"]:
            del round_state.cohort[name]
            round_state.rejected[name] = "dropped"
        return {name for name, fate in fates.items() if fate == "late"}


def study_faults(study: Study) -> Faults:
    """Return the fault probabilities of a study."""
    return Faults(study.clients.dropout_fraction, study.clients.late_fraction)
