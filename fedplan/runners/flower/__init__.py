# SPDX-License-Identifier: Apache-2.0
"""The Flower runner: the same round between organisations. Only this folder imports flwr."""

from typing import TYPE_CHECKING

from fedplan.faces import face

if TYPE_CHECKING:
    from fedplan.runners.flower.apps import client_of, server_of
    from fedplan.runners.flower.carrier import Carrier
    from fedplan.runners.flower.strategy import Partial, partial

__all__ = ["Carrier", "Partial", "client_of", "partial", "server_of"]

__getattr__, __dir__ = face(
    __name__, {"apps": "client_of server_of", "carrier": "Carrier", "strategy": "Partial partial"}
)
