# SPDX-License-Identifier: Apache-2.0
"""The record of a run, and the stream of its events."""

from typing import TYPE_CHECKING

from fedplan.lazy import lazy_exports

if TYPE_CHECKING:
    from fedplan.federation.ledger.callbacks import EarlyStopping, Tracker
    from fedplan.federation.ledger.events import CommittedRound
    from fedplan.federation.ledger.stream import EventStream

__all__ = ["CommittedRound", "EarlyStopping", "EventStream", "Tracker"]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "callbacks": "EarlyStopping Tracker",
        "events": "CommittedRound",
        "stream": "EventStream",
    },
)
