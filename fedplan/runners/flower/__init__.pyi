# SPDX-License-Identifier: Apache-2.0
# pyright: reportUnusedImport=false
from .apps import study_client_app, study_server_app
from .server import ServerLoop
from .strategy import Partial, partial

__all__ = ["Partial", "ServerLoop", "partial", "study_client_app", "study_server_app"]
