# SPDX-License-Identifier: Apache-2.0
"""Secure aggregation (Bonawitz et al., 2017): the server learns only the sum of inputs."""

from typing import TYPE_CHECKING

from fedplan.lazy import lazy_exports

if TYPE_CHECKING:
    from fedplan.secagg.client import ProtocolClient
    from fedplan.secagg.config import SecAggConfig
    from fedplan.secagg.crypto import SecAggError
    from fedplan.secagg.progress import DiskProgressStore
    from fedplan.secagg.round import ClientInput, SecureRound, simulate_secagg_round
    from fedplan.secagg.server import ProtocolServer, UnmaskedSums
    from fedplan.secagg.terms import Slot, Terms

__all__ = [
    "ClientInput",
    "DiskProgressStore",
    "ProtocolClient",
    "ProtocolServer",
    "SecAggConfig",
    "SecAggError",
    "SecureRound",
    "Slot",
    "Terms",
    "UnmaskedSums",
    "simulate_secagg_round",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "client": "ProtocolClient",
        "config": "SecAggConfig",
        "crypto": "SecAggError",
        "progress": "DiskProgressStore",
        "round": "ClientInput SecureRound simulate_secagg_round",
        "server": "ProtocolServer UnmaskedSums",
        "terms": "Slot Terms",
    },
)
