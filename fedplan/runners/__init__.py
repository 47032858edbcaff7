# SPDX-License-Identifier: Apache-2.0
"""What carries the rounds: one process, a worker at a site, Flower."""

from typing import TYPE_CHECKING

from fedplan.faces import face

if TYPE_CHECKING:
    from fedplan.runners.faults import Faults
    from fedplan.runners.local import Federation
    from fedplan.runners.simulation import Simulation

__all__ = ["Faults", "Federation", "Simulation"]

__getattr__, __dir__ = face(
    __name__, {"faults": "Faults", "local": "Federation", "simulation": "Simulation"}
)
