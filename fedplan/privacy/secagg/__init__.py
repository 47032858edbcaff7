# SPDX-License-Identifier: Apache-2.0
"""Secure aggregation (Bonawitz et al., 2017): the server learns only the sum of inputs."""

from typing import TYPE_CHECKING

from fedplan.lazy import lazy_exports

if TYPE_CHECKING:
    from fedplan.privacy.secagg.client import ProtocolClient
    from fedplan.privacy.secagg.crypto import SecAggError
    from fedplan.privacy.secagg.round_progress import DiskProgressStore
    from fedplan.privacy.secagg.server import ProtocolServer, UnmaskedSums
    from fedplan.privacy.secagg.terms import Slot, Terms

__all__ = [
    "DiskProgressStore",
    "SecAggError",
    "ProtocolServer",
    "ProtocolClient",
    "UnmaskedSums",
    "Slot",
    "Terms",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "crypto": "SecAggError",
        "round_progress": "DiskProgressStore",
        "server": "ProtocolServer UnmaskedSums",
        "client": "ProtocolClient",
        "terms": "Slot Terms",
    },
)
