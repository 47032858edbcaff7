# SPDX-License-Identifier: Apache-2.0
"""The Flower runner, for real federations. Only this package imports flwr."""

from typing import TYPE_CHECKING

from fedplan.lazy import lazy_exports

if TYPE_CHECKING:
    from fedplan.runners.flower.apps import study_client_app, study_server_app
    from fedplan.runners.flower.server import ServerLoop
    from fedplan.runners.flower.strategy import Partial, partial

__all__ = ["ServerLoop", "Partial", "study_client_app", "partial", "study_server_app"]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "apps": "study_client_app study_server_app",
        "server": "ServerLoop",
        "strategy": "Partial partial",
    },
)
