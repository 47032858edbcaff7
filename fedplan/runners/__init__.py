# SPDX-License-Identifier: Apache-2.0
"""Runners of a federation: a simulation on one machine, and sites connected by Flower."""

from typing import TYPE_CHECKING

from fedplan.lazy import lazy_exports

if TYPE_CHECKING:
    from fedplan.runners.clients import Faults
    from fedplan.runners.local import Federation
    from fedplan.runners.simulation import Simulation

__all__ = ["Faults", "Federation", "Simulation"]

__getattr__, __dir__ = lazy_exports(
    __name__, {"clients": "Faults", "local": "Federation", "simulation": "Simulation"}
)
