# SPDX-License-Identifier: Apache-2.0
"""Events of a run: what its server tells status file, log file, progress, trackers and callbacks.

The driver of a run passes each event to `EventStream.emit` (stream.py), and the stream calls every
subscriber with the event and the run's status after it. To add a subscriber, write a function of
both that picks its events by type, and give it to `EventStream(folder, [subscriber])` or to
`EventStream.subscribe`:

    def beep(event: Event, status: RunStatus) -> None:
        if isinstance(event, RunChanged) and event.state == RunState.FAILED:
            print("\\a", event.reason, "in round", status.round + 1)

A callback is the simpler form for users: a function of `CommittedRound`, which may stop the run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedplan.federation.ledger.history import Metrics, Row
from fedplan.federation.ledger.records import RoundRecord, TurnRecord
from fedplan.federation.ledger.status import SEVERITY, RunState, RunStatus
from fedplan.storage.logs import LogEntry, utc_now


@dataclass(frozen=True)
class RunStarted:
    """A server has opened the run, for the first time or again; `status` is the run's first."""

    status: RunStatus


@dataclass(frozen=True)
class RunChanged:
    """The run has another state, a value of RunState; a final state ends the run."""

    state: str
    reason: str = ""


@dataclass(frozen=True)
class RunStalled:
    """The run does not proceed for a reason; "" if it goes on."""

    reason: str


@dataclass(frozen=True)
class Heartbeat:
    """The server is alive; emitted often while it waits."""


@dataclass(frozen=True)
class RoundStarted:
    """The next round has begun, with requests to so many clients."""

    cohort_size: int


@dataclass(frozen=True)
class ClientChanged:
    """A client has another state, a value of SiteState: requested, responded, failed, ..."""

    client: str
    state: str
    reason: str = ""


@dataclass(frozen=True)
class CommittedRound:
    """A round that the server has evaluated and written to disk, as callbacks receive it.

    `total_rounds`: rounds of the run. `record`, `turns`: the ledger's entries of the round and of
    each client in the round. `scores`: evaluation metrics of the round, empty without evaluation.
    `metrics`: rows of metrics of all rounds so far; the last one is `row`.
    `experiment`: name and seed of the study. `run`: id of the run. `folder`: the run's folder.
    `hides_clients`: client-level DP; then numbers of single clients must not be published.
    `primary`: name of the task's primary metric. `higher_is_better`: whether a higher primary
    metric is better; None if unknown. `directions`: the same of all metrics that the task names.
    """

    total_rounds: int
    record: RoundRecord
    turns: tuple[TurnRecord, ...]
    scores: Mapping[str, Any]
    metrics: Metrics
    experiment: str = ""
    run: str = ""
    folder: Path | None = None
    hides_clients: bool = False
    higher_is_better: bool | None = None
    primary: str = "loss"
    directions: Mapping[str, bool] = field(default_factory=dict[str, bool])

    @property
    def round(self) -> int:
        """Number of the round, from 1."""
        return self.record.round

    @property
    def row(self) -> Row:
        """The round's row of metrics."""
        return self.metrics[-1]


@dataclass(frozen=True)
class Notice:
    """Something that an operator should know, and that changes no state.

    `kind`: a short fixed text, WARNING for a warning of Python's logging. `level`: "info",
    "warning" or "error". `client`: the client of which it tells, if any.
    """

    kind: str
    text: str
    level: str = "warning"
    client: str = ""


WARNING = "note"
"""Kind of a Notice that was a warning of the logger "fedplan"."""

Event = (
    RunStarted
    | RunChanged
    | RunStalled
    | Heartbeat
    | RoundStarted
    | ClientChanged
    | CommittedRound
    | Notice
)
"""Anything that `EventStream.emit` takes."""

Subscriber = Callable[[Event, RunStatus], None]
"""Called with each event, and with the status of the run after it."""

Callback = Callable[[CommittedRound], str | None]
"""Called after each committed round. Return a string to stop the run; it is logged as the reason.
A resumed run calls it again for the last round, so a stateless callback stops at the same place."""


def log_entry(event: Event, status: RunStatus) -> LogEntry | None:
    """Return the log line of an event, given the status after it; None if it is not logged."""
    level, client, number = "info", "", status.round
    match event:
        case RunStarted():
            name, text = "run started", f"{status.round} of {status.rounds} rounds done"
        case RunChanged(state, text):
            name, level = f"run {state}", "error" if state == RunState.FAILED else "info"
        case ClientChanged(client, state, text):
            name, level, number = f"site {state}", SEVERITY.get(state, "info"), status.round + 1
        case CommittedRound(record=record):
            name = "round closed"
            text = (
                f"{len(record.aggregated)} updates aggregated, {len(record.rejected)} rejected, "
                f"{record.upload_bytes} bytes uploaded, {record.download_bytes} downloaded"
            )
        case Notice(name, text, level, client):
            number = 0 if name == WARNING else status.round + bool(client)
        case _:
            return None
    return LogEntry(utc_now(), level, status.run, number, client, name, text)
