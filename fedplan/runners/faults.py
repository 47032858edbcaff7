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
    """Simulated faults of clients, drawn from the experiment's seed for each client and round.

    `dropped` is the probability that a client drops out of a round before training, `late` the
    probability that a client trains but replies too late to be aggregated. `apply` draws a round.
    """

    dropped: float = 0.0
    late: float = 0.0

    def apply(self, server: Server, round_state: RoundState) -> set[str]:
        """Draw the faults of the server's next round, and return the names of late clients.

        Moves dropped clients from `round_state.cohort` to `round_state.rejected`; late clients
        stay in the cohort. The same experiment and round give the same faults.
        """
        number, late = server.global_state.round + 1, set[str]()
        for name in list(round_state.cohort):
            generator = seeds.generator(server.agreement.experiment, "fate", number, name)
            drawn = torch.rand((), generator=generator, dtype=torch.float64).item()
            if drawn < self.dropped:
                del round_state.cohort[name]
                round_state.rejected[name] = "dropped"
            elif drawn < self.dropped + self.late:
                late.add(name)
        return late


def study_faults(study: Study) -> Faults:
    """Return the fault probabilities of a study."""
    return Faults(study.clients.dropout_fraction, study.clients.late_fraction)
