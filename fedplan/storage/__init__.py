# SPDX-License-Identifier: Apache-2.0
"""What survives a kill, a full disk and a flipped bit."""

from typing import TYPE_CHECKING

from fedplan.faces import face

if TYPE_CHECKING:
    from fedplan.storage.encryption import Encryption
    from fedplan.storage.journal import Journal
    from fedplan.storage.lines import Lines
    from fedplan.storage.logs import Log, follow_log, read_log
    from fedplan.storage.store import Store

__all__ = ["Encryption", "Journal", "Lines", "Log", "Store", "follow_log", "read_log"]

__getattr__, __dir__ = face(
    __name__,
    {
        "encryption": "Encryption",
        "journal": "Journal",
        "lines": "Lines",
        "logs": "Log follow_log read_log",
        "store": "Store",
    },
)
