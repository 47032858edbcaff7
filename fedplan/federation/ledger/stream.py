# SPDX-License-Identifier: Apache-2.0
"""Event stream of a run: keeps the run's status, and passes each event to files and subscribers."""

from __future__ import annotations

import logging
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from math import isfinite
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING
from weakref import ref

from fedplan.errors import FedplanError
from fedplan.federation.ledger.callbacks import Tracker
from fedplan.federation.ledger.events import (
    WARNING,
    Callback,
    ClientChanged,
    CommittedRound,
    Event,
    Heartbeat,
    Notice,
    RoundStarted,
    RunChanged,
    RunStalled,
    RunStarted,
    Subscriber,
    log_entry,
)
from fedplan.federation.ledger.faults import encode_code, error_code_of
from fedplan.federation.ledger.history import run_failure
from fedplan.federation.ledger.records import TurnRecord
from fedplan.federation.ledger.segments import read_segment
from fedplan.federation.ledger.status import (
    AT_ONCE,
    LIVE,
    SEVERITY,
    STOP_REQUEST,
    RunState,
    RunStatus,
    SiteState,
    SiteStatus,
    read_status,
    read_stop_request,
    write_status,
)
from fedplan.federation.participation import Timeouts
from fedplan.privacy.statement import Statement
from fedplan.storage.journal import client_state_folder
from fedplan.storage.locks import current_process
from fedplan.storage.logs import Log, utc_now

if TYPE_CHECKING:
    from fedplan.federation.server import Server

WRITE_INTERVAL, HEARTBEAT_INTERVAL = 0.5, 10.0
"""Seconds between two writes of the status file if sites have changed, and if nothing has."""
MAX_LISTED_SITES = 2000
"""Most sites that the status file lists; with more, only faults of sites are logged."""
MEDIAN_ROUNDS = 20
"""Number of last rounds whose median time is the estimate for the next."""
FINISHED_STATES = (SiteState.RESPONDED, SiteState.FAILED, SiteState.REFUSED)
"""States of a site that is done with the open round."""
BUDGET_ALERTS = (0.8, 1.0)
"""Fractions of the promised epsilon at which a notice is emitted."""


class StopRequested(FedplanError):
    """An operator asked to stop the run at once, without its open round."""


class StatusFile:
    """Subscriber that writes the status file in `folder`; a failed write is ignored.

    News of the run are written at once, those of clients every WRITE_INTERVAL, and a heartbeat
    every HEARTBEAT_INTERVAL, so that readers see a live driver.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._written, self._changed = 0.0, False

    def __call__(self, event: Event, status: RunStatus) -> None:
        """Write the status if it is due."""
        self._changed |= isinstance(event, RoundStarted | ClientChanged)
        interval = WRITE_INTERVAL if self._changed else HEARTBEAT_INTERVAL
        if isinstance(event, RunStarted | RunChanged | RunStalled | CommittedRound):
            interval = 0.0
        if isinstance(event, Notice) or time.monotonic() - self._written < interval:
            return
        self._changed, self._written = False, time.monotonic()
        with suppress(FedplanError):
            write_status(self.folder, status)


class EventStream:
    """Events of a run, which the run's driver emits: each goes to all subscribers, in order.

    The driver wraps all rounds in `track_run`, emits events, and calls `heartbeat` while it waits.
    First the `status` of the run takes up an event, then log file and status file in `folder` are
    written (None: no files), then `subscribers` are called, and after a committed round the
    `callbacks`. Under client-level DP subscribers get no event of a single client. `stop_text`: why
    the run stops, else "". Other threads may read `status`, and emit a Notice.
    """

    def __init__(self, folder: Path | None = None, subscribers: Sequence[Subscriber] = ()) -> None:
        self.folder, self.subscribers = folder, tuple(subscribers)
        self.callbacks: tuple[Callback, ...] = ()
        self.status: RunStatus = RunStatus()
        self.stop_text = ""
        self._log = Log(folder) if folder else None
        self._status_file = StatusFile(folder) if folder else None
        # A weak reference: a screen may outlive the run, and would keep its folder locked.
        self._server: ref[Server] | None = None
        self._timeouts = Timeouts()
        self._progress = self._round_start = time.monotonic()
        self._round_seconds: list[float] = []
        self._finished = set[str]()
        self._budget_alert = 0.0
        self._lists_sites = True

    def subscribe(self, subscriber: Subscriber) -> None:
        """Call a subscriber with each further event."""
        self.subscribers += (subscriber,)

    def emit(self, event: Event) -> None:
        """Take up an event in the status, and pass it on unless it says nothing new.

        After a committed round, calls the callbacks and sets `stop_text`.
        """
        if not self._take_up(event):
            return
        if self._log is not None and (entry := log_entry(event, self.status)) is not None:
            self._log.append(entry)
        if self._status_file is not None:
            self._status_file(event, self.status)
        of_client = isinstance(event, ClientChanged) or (
            isinstance(event, Notice) and (event.client or event.kind == WARNING)
        )
        if not (of_client and self.status.client_level_dp):
            for subscriber in self.subscribers:
                subscriber(event, self.status)
        if isinstance(event, CommittedRound):
            spent, epsilon = self.status.epsilon_spent, self.status.epsilon
            share, last_alert = spent / epsilon if spent and epsilon else 0.0, self._budget_alert
            self._budget_alert = max((a for a in BUDGET_ALERTS if share > a - 1e-3), default=0.0)
            if self._budget_alert > last_alert:
                self.emit(Notice("budget", f"{self._budget_alert:.0%} of epsilon is spent"))
            self.call_back(event)

    def call_back(self, closed: CommittedRound | None) -> None:
        """Call all callbacks with a committed round, if any, and set `stop_text`.

        A resumed run calls this with its last round. A reason to stop after the last round is
        ignored.
        """
        reasons = [callback(closed) for callback in self.callbacks] if closed else []
        is_last = closed is not None and closed.round >= closed.total_rounds
        self.stop_reason("" if is_last else str(next(filter(None, reasons), "")))

    def stop_reason(self, reason: str = "") -> str:
        """Return and set `stop_text`: why the run stops after this round; "" if the run goes on.

        `reason`: of a callback or early stopping, if any; sets `status.stopped_early`. Else an
        operator's request counts, except after the last round.
        """
        requested = self.status.round < self.status.rounds and self._stop_request()
        self.stop_text = reason or ("an operator asked for it: fedplan stop" if requested else "")
        self.status = replace(self.status, stopped_early=bool(reason))
        return self.stop_text

    def heartbeat(self) -> None:
        """Emit a Heartbeat, and look for an operator's request to stop; call often.

        If there is one, emits the state stopping; raises StopRequested if the stop is at once.
        """
        if (when := self._stop_request()) and self.status.state != RunState.STOPPING:
            text = "at once" if when == AT_ONCE else "after this round"
            self.emit(RunChanged(RunState.STOPPING, f"an operator asked to stop {text}"))
        if when == AT_ONCE:
            raise StopRequested("an operator asked for it: fedplan stop --now")
        self.emit(Heartbeat())

    def _stop_request(self) -> str:
        return read_stop_request(self.folder) if self.folder is not None else ""

    @property
    def healthy(self) -> bool:
        """Whether the run is live, not stalled, and made progress within `updates` + `sites`."""
        limit, is_stalled = self._timeouts.updates + self._timeouts.sites, bool(self.status.reason)
        is_live = self.status.state in LIVE and not is_stalled
        return is_live and time.monotonic() - self._progress < limit

    @contextmanager
    def track_run(
        self,
        server: Server,
        study: str,
        timeouts: Timeouts | None = None,
        *,
        has_examples: bool = True,
    ) -> Generator[None]:
        """Emit that a run has started, and after the body how the run ended; close the trackers.

        `server`: the opened run. `study`: name of the study. `timeouts`: for `healthy`.
        StopRequested in the body is suppressed; other errors are reported and raised again.
        `has_examples`: this machine has training data, so errors are reported by code only, and
        warnings are not logged.
        """
        if self.folder is not None and self._server is None:
            (self.folder / STOP_REQUEST).unlink(missing_ok=True)
        self._server, self._timeouts, self.stop_text = ref(server), timeouts or Timeouts(), ""
        self._round_seconds, self._lists_sites = [], len(server.roster) <= MAX_LISTED_SITES
        callbacks = self.callbacks
        self.emit(RunStarted(self._first_status(server, study)))

        def end(state: str, reason: str) -> None:
            if self._server is not None and self._server() is server:  # else resumed meanwhile
                self.emit(RunChanged(state, reason))

        def end_normally() -> None:
            if server.global_state.round < server.rounds:
                return end(RunState.STOPPED, self.stop_text)
            # Whether anybody's update was aggregated is a secret of client-level privacy.
            failure = "" if server.aggregation.hides_clients else run_failure(server.history)
            end(RunState.FAILED if failure else RunState.DONE, failure)

        try:
            with nullcontext() if has_examples else self._capture_warnings():
                yield
        except StopRequested as error:
            self.stop_text = str(error)
            end_normally()
        except Exception as error:
            # Texts of other errors than FedplanError may leak data.
            is_ours, name = isinstance(error, FedplanError), type(error).__name__
            text = (str(error) if is_ours else name).partition("\n")[0][:500]
            end(RunState.FAILED, encode_code(error_code_of(error)) if has_examples else text)
            raise
        except GeneratorExit:
            end(RunState.STOPPED, "the iterator over its rounds was closed")
            raise
        except BaseException:
            end(RunState.STOPPED, "interrupted")
            raise
        else:
            end_normally()
        finally:  # after the end is reported: a tracker may fail to close
            for callback in callbacks:
                if isinstance(callback, Tracker):
                    callback.close()

    def _first_status(self, server: Server, study: str) -> RunStatus:
        """Return the status of a run that this process opens."""
        sites = {name: SiteStatus(since=utc_now()) for name in server.roster if self._lists_sites}
        # Bytes of sites are counted in the open segment of the ledger only.
        reads = sites and (self.folder is not None or self.subscribers)
        _, records = read_segment(server.ledger.file) if reads else (None, [])
        turns = [record for record in records if isinstance(record, TurnRecord)]
        guarantee, earlier = server.agreement.guarantee, RunStatus()
        with suppress(FedplanError):  # a damaged file is written anew
            status = read_status(self.folder) if self.folder is not None else None
            if status is not None and status.run == server.identity.id:
                earlier = status  # the run is resumed
        return RunStatus(
            study=study,
            run=server.identity.id,
            driver=current_process(),
            started_at=earlier.started_at or utc_now(),
            state=RunState.RUNNING,
            round=server.global_state.round,
            rounds=server.rounds,
            primary_metric=earlier.primary_metric,
            loss=_loss(server.history[-1] if server.history else {}),
            scores=earlier.scores,
            round_seconds=earlier.round_seconds,
            epsilon=guarantee.epsilon if guarantee else None,
            client_level_dp=server.aggregation.hides_clients,
            sites=_with_traffic(sites, turns),
        )

    @contextmanager
    def _capture_warnings(self) -> Generator[None]:
        """Emit warnings and errors of the Python logger "fedplan" as notices during the body.

        The warnings are still printed as before.
        """
        stream, source = self, logging.getLogger("fedplan")

        class NoticeHandler(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                stream.emit(Notice(WARNING, record.getMessage(), record.levelname.lower()))

        # Without handlers Python prints warnings by its last resort: keep that.
        last = logging.lastResort if not source.hasHandlers() else None
        handlers = [NoticeHandler(logging.WARNING), *([last] if last else [])]
        for handler in handlers:
            source.addHandler(handler)
        try:
            yield
        finally:
            for handler in handlers:
                source.removeHandler(handler)

    def _take_up(self, event: Event) -> bool:
        """Update the status by an event; return whether subscribers should get the event."""
        now, status = time.monotonic(), self.status
        match event:
            case RunStarted(first):
                self._progress = self._round_start = now
                self.status = first
            case RunChanged(state, reason) if state in LIVE:
                # A run that is stopping stays so until it ends.
                if status.state in (state, RunState.STOPPING):
                    return False
                self._round_start = now if state != RunState.STOPPING else self._round_start
                self.status = replace(status, state=state)
            case RunChanged(state, reason):
                self.status = replace(status, state=state, reason=reason, seconds_left=None)
            case RunStalled(reason):
                if status.reason == reason or status.state not in LIVE:
                    return False
                self.status = replace(status, reason=reason)
            case Heartbeat():
                if status.state in (RunState.WAITING, RunState.STOPPING):
                    self._progress = now
            case RoundStarted(cohort_size):
                self._finished = set[str]()
                self.status = replace(status, requested=cohort_size, responded=0)
            case ClientChanged():
                return self._take_up_client(event)
            case CommittedRound():
                self._take_up_round(event)
            case Notice():
                pass
        return True

    def _take_up_client(self, event: ClientChanged) -> bool:
        """Set the state of a client, count one that finishes the round, and estimate the time left.

        Returns False for an unchanged state, and with over MAX_LISTED_SITES sites for any state
        outside SEVERITY.
        """
        name, state, reason = event.client, event.state, event.reason
        if state in FINISHED_STATES and self.status.requested:
            self._finished.add(name)
            done = len(self._finished)
            cohort_size = max(done, self.status.requested)
            per_site = (time.monotonic() - self._round_start) / done
            # In the first round, the estimate of a round comes from its sites so far.
            times = self._round_seconds[-MEDIAN_ROUNDS:]
            per_round = median(times) if times else per_site * cohort_size
            later = per_round * max(0, self.status.rounds - self.status.round - 1)
            left = per_site * (cohort_size - done) + later
            self.status = replace(
                self.status, responded=done, requested=cohort_size, seconds_left=left
            )
        before = self.status.sites.get(name, SiteStatus())
        if self._lists_sites and (before.state, before.reason) == (state, reason):
            return False
        if state in (SiteState.REQUESTED, SiteState.RESPONDED):
            self._progress = time.monotonic()
        if not self._lists_sites:
            return state in SEVERITY
        changed = replace(before, state=state, reason=reason, since=utc_now())
        if state == SiteState.RESPONDED:
            changed = replace(changed, round=self.status.round + 1)
        if state in SEVERITY:
            changed = replace(changed, error=reason or state, error_at=changed.since)
        if name not in self.status.sites:  # a copy: another thread may be iterating over it
            self.status = replace(self.status, sites=dict(self.status.sites))
        self.status.sites[name] = changed
        return True

    def _take_up_round(self, closed: CommittedRound) -> None:
        """Update the status by a committed round: scores, times, privacy loss and sites."""
        now, row = time.monotonic(), closed.row
        self._round_seconds.append(now - self._round_start)
        self._round_start = self._progress = now
        seconds = median(self._round_seconds[-MEDIAN_ROUNDS:])
        scores = {k: v for k, v in row.items() if _is_overall_score(k) and isfinite(v)}
        self.status = replace(
            self.status,
            round=closed.round,
            rounds=closed.total_rounds,
            requested=0,
            responded=0,
            primary_metric=closed.primary,
            loss=_loss(row),
            scores=scores or self.status.scores,
            round_seconds=seconds,
            seconds_left=seconds * (closed.total_rounds - closed.round),
            sites=_sites_after(self.status.sites, closed) if self._lists_sites else {},
        )
        server = self._server() if self._server else None
        guarantee = server.agreement.guarantee if server else None
        has_readers = self.folder is not None or self.subscribers
        if server and guarantee and self.status.epsilon and has_readers:
            self.status = replace(self.status, epsilon_spent=self._epsilon_spent(server, closed))

    def _epsilon_spent(self, server: Server, closed: CommittedRound) -> float:
        """Return the run's epsilon after a round; with example-level DP the largest of a client.

        If the accounts are at the sites, that of a client that took part in all rounds.
        """
        guard, guarantee = server.aggregation.guard, server.agreement.guarantee
        assert guarantee is not None
        if guard is not None:
            return guard.epsilon_spent
        accounts = server.folder / "privacy"
        if not accounts.is_dir():
            return guarantee.forecast_epsilon(closed.round)
        folders = [accounts]
        if before := self.status.epsilon_spent:  # only the round's clients have new charges
            names = (client_state_folder(server.folder, each.client).name for each in closed.turns)
            folders = [accounts / name for name in names]
        statements = (Statement.of(guarantee, server.rounds, folder) for folder in folders)
        return max([before or 0.0, *(each.epsilon_spent for each in statements)])


def _loss(row: Mapping[str, float]) -> float | None:
    return row["loss"] if isfinite(row.get("loss", float("nan"))) else None


def _is_overall_score(name: str) -> bool:
    """Return whether a metric is a score over all clients, by its name."""
    head, *rest = name.split(".")
    depth = 2 if head == "sites" and rest[0] in ("global", "personal") else 1
    return len(rest) == depth and rest[-1] != "examples"


def _with_traffic(
    sites: Mapping[str, SiteStatus], turns: Sequence[TurnRecord]
) -> dict[str, SiteStatus]:
    """Return a copy of the sites with the bytes and last round of these turns added."""
    updated = dict(sites)
    for turn in turns:
        if (site := updated.get(turn.client)) is not None:
            updated[turn.client] = replace(
                site,
                upload_bytes=site.upload_bytes + turn.upload_bytes,
                download_bytes=site.download_bytes + turn.download_bytes,
                round=turn.round,
            )
    return updated


def _sites_after(sites: Mapping[str, SiteStatus], closed: CommittedRound) -> dict[str, SiteStatus]:
    """Return a copy of the sites, with traffic and new states of clients in the round `closed`."""
    updated = _with_traffic(sites, closed.turns)
    for name in closed.record.aggregated:
        site = updated.get(name, SiteStatus())
        since = site.since if site.state == SiteState.RESPONDED else utc_now()
        updated[name] = replace(site, state=SiteState.RESPONDED, reason="", since=since)
    for name, reason in closed.record.rejected.items():
        site = updated.get(name, SiteStatus())
        updated[name] = replace(site, error=reason[:300], error_at=utc_now())
        if site.state in (SiteState.REQUESTED, SiteState.RESPONDED, SiteState.CONNECTED):
            updated[name] = replace(
                updated[name],
                state=SiteState.NOT_AGGREGATED,
                reason=reason[:300],
                since=utc_now(),
            )
    participants = {*closed.record.aggregated, *closed.record.rejected}
    for name, site in updated.items():
        # Sites that were asked for scores only.
        if site.state == SiteState.REQUESTED and name not in participants:
            updated[name] = replace(site, state=SiteState.CONNECTED, since=utc_now())
    return updated
