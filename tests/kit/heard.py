# SPDX-License-Identifier: Apache-2.0
"""A subscriber of a run's events that keeps the log line of each."""

from __future__ import annotations

from fedplan.federation.ledger.events import Event, log_entry
from fedplan.federation.ledger.status import RunStatus
from fedplan.storage.logs import LogEntry


class Heard(list[LogEntry]):
    """Log lines of all events of a run that subscribers get and that are logged."""

    def __call__(self, event: Event, status: RunStatus) -> None:
        if entry := log_entry(event, status):
            self.append(entry)
