# SPDX-License-Identifier: Apache-2.0
"""Files that survive a kill, a full disk and a flipped bit: checkpoints, journals, logs."""

from typing import TYPE_CHECKING

from fedplan.lazy import lazy_exports

if TYPE_CHECKING:
    from fedplan.storage.append_log import AppendLog, CommittedLog
    from fedplan.storage.encryption import Encryption
    from fedplan.storage.journal import Journal
    from fedplan.storage.logs import Log, follow_log, read_log
    from fedplan.storage.store import Store

__all__ = [
    "AppendLog",
    "CommittedLog",
    "Encryption",
    "Journal",
    "Log",
    "Store",
    "follow_log",
    "read_log",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "append_log": "AppendLog CommittedLog",
        "encryption": "Encryption",
        "journal": "Journal",
        "logs": "Log follow_log read_log",
        "store": "Store",
    },
)
