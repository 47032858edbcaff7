# SPDX-License-Identifier: Apache-2.0
"""Status file and event log of a run: driver, open round, sites, and an operator's stop."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from math import isfinite
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any
from weakref import ref

from fedplan.errors import FedplanError
from fedplan.federation.callbacks import CommittedRound
from fedplan.federation.error_codes import encode_code, error_code_of
from fedplan.federation.ledger_segments import read_segment
from fedplan.federation.record import TurnRecord
from fedplan.federation.run_states import (
    AT_ONCE,
    LIVE,
    SEVERITY,
    STATUS,
    STOP_REQUEST,
    RunState,
    RunStatus,
    SiteState,
    SiteStatus,
    read_stop_request,
)
from fedplan.federation.timeouts import Timeouts
from fedplan.storage.files import write_atomic
from fedplan.storage.locks import current_process
from fedplan.storage.logs import Log, LogEntry, utc_now

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
"""Fractions of the promised epsilon at which an event is logged."""


class StopRequested(FedplanError):
    """An operator asked to stop the run at once, without its open round."""


EventListener = Callable[[LogEntry], None]
"""Function that is called with each log entry."""


class StatusReporter:
    """Status of a run: kept in `current`, written to a file in the run's `folder`, and logged.

    The driver of a run wraps all rounds in `track_run`, and calls `open_round`, `set_site_state`,
    `record_round` and, while it waits, `heartbeat`. Without a `folder` nothing is written.
    `listeners`: called with each log entry, under client-level DP not with those of sites.
    `stop_text`: why the run stops, else "". Other threads may read `current`.
    """

    def __init__(self, folder: Path | None = None, listeners: Sequence[EventListener] = ()) -> None:
        self.folder, self.listeners = folder, tuple(listeners)
        self.current = RunStatus()
        self.stop_text = ""
        self._log = Log(folder) if folder else None
        # A weak reference: a screen may outlive the run, and would keep its folder locked.
        self._server: ref[Server] | None = None
        self._timeouts = Timeouts()
        self._written, self._progress, self._round_start = 0.0, time.monotonic(), time.monotonic()
        self._dirty = False
        self._round_seconds: list[float] = []
        self._finished = set[str]()
        self._budget_alert = 0.0
        self._lists_sites = True

    @contextmanager
    def track_run(
        self,
        server: Server,
        study: str,
        timeouts: Timeouts | None = None,
        *,
        has_examples: bool = True,
        retried_errors: type[Exception] | tuple[()] = (),
    ) -> Generator[None]:
        """Report a run as running within the body, and then how the run ended.

        `server`: the opened run. `study`: name of the study. `timeouts`: for `healthy`.
        StopRequested in the body is suppressed; other errors are reported and raised again.
        `has_examples`: this machine has training data, so errors are reported by code only, and
        warnings are not logged. `retried_errors`: not reported, since the driver starts again.
        """
        self._start(server, study, timeouts or Timeouts())
        try:
            log = None if has_examples else self._log
            with log.capture_warnings(self.current.run) if log is not None else nullcontext():
                yield
        except StopRequested as error:
            self.stop_text = str(error)
        except Exception as error:
            if not isinstance(error, retried_errors):
                # Texts of other errors than FedplanError may leak data.
                is_ours, name = isinstance(error, FedplanError), type(error).__name__
                text = (str(error) if is_ours else name).partition("\n")[0][:500]
                reason = encode_code(error_code_of(error)) if has_examples else text
                self._end(server, RunState.FAILED, reason)
            raise
        except GeneratorExit:
            self._end(server, RunState.STOPPED, "the iterator over its rounds was closed")
            raise
        except BaseException:
            self._end(server, RunState.STOPPED, "interrupted")
            raise
        if server.global_state.round >= server.rounds:
            self._end(server, RunState.DONE, "")
        else:
            self._end(server, RunState.STOPPED, self.stop_text)

    def set_state(self, state: str) -> None:
        """Set, log and write the state WAITING or RUNNING of a run that is not stopping."""
        if self.current.state not in (state, RunState.STOPPING):
            self._round_start = time.monotonic()
            self._log_event(f"run {state}")
            self._update(state=state)
            self._write()

    def open_round(self, cohort_size: int) -> None:
        """Report that a round with so many clients has begun."""
        self._finished = set[str]()
        self._update(requested=cohort_size, responded=0)
        self._dirty = True
        self._write_if_due()

    def set_problem(self, reason: str) -> None:
        """Set the reason why a live run does not proceed; "" clears it."""
        if self.current.reason != reason and self.current.state in LIVE:
            self._update(reason=reason)
            self._write()

    def set_site_state(self, name: str, state: str, reason: str = "") -> None:
        """Set and log the state of the site `name` (a value of SiteState), and the `reason`.

        Counts a site that finishes the open round, and estimates the time left. Not logged: an
        unchanged state, and with over MAX_LISTED_SITES sites any state outside SEVERITY.
        """
        if state in FINISHED_STATES and self.current.requested:
            self._finished.add(name)
            done = len(self._finished)
            cohort_size = max(done, self.current.requested)
            per_site = (time.monotonic() - self._round_start) / done
            # In the first round, the estimate of a round comes from its sites so far.
            times = self._round_seconds[-MEDIAN_ROUNDS:]
            per_round = median(times) if times else per_site * cohort_size
            later = per_round * max(0, self.current.rounds - self.current.round - 1)
            left = per_site * (cohort_size - done) + later
            self._update(responded=done, requested=cohort_size, seconds_left=left)
        before = self.current.sites.get(name, SiteStatus())
        if self._lists_sites and (before.state, before.reason) == (state, reason):
            return
        if state in (SiteState.REQUESTED, SiteState.RESPONDED):
            self._progress = time.monotonic()
        if self._lists_sites or state in SEVERITY:
            self._log_event(f"site {state}", reason, level=SEVERITY.get(state, "info"), site=name)
        if not self._lists_sites:
            return
        changed = replace(before, state=state, reason=reason, since=utc_now())
        if state == SiteState.RESPONDED:
            changed = replace(changed, round=self.current.round + 1)
        if state in SEVERITY:
            changed = replace(changed, error=reason or state, error_at=changed.since)
        if name not in self.current.sites:  # a copy: another thread may be iterating over it
            self._update(sites=dict(self.current.sites))
        self.current.sites[name] = changed
        self._dirty = True
        self._write_if_due()

    def record_round(self, closed: CommittedRound) -> None:
        """Log the committed round `closed`, update the status, and write the file."""
        self._round_seconds.append(time.monotonic() - self._round_start)
        self._round_start = self._progress = time.monotonic()
        seconds = median(self._round_seconds[-MEDIAN_ROUNDS:])
        record, row = closed.record, closed.row
        scores = {k: v for k, v in row.items() if _is_overall_score(k) and isfinite(v)}
        self._log_event(
            "round closed",
            f"{len(record.aggregated)} updates aggregated, {len(record.rejected)} rejected, "
            f"{record.upload_bytes} bytes uploaded, {record.download_bytes} downloaded",
            round=closed.round,
        )
        self._update(
            round=closed.round,
            rounds=closed.total_rounds,
            requested=0,
            responded=0,
            primary_metric=closed.primary,
            loss=_loss(row),
            scores=scores or self.current.scores,
            round_seconds=seconds,
            seconds_left=seconds * (closed.total_rounds - closed.round),
            sites=_sites_after(self.current.sites, closed) if self._lists_sites else {},
        )
        self._report_budget(closed.round)
        self._write()

    def heartbeat(self) -> None:
        """Write the file every HEARTBEAT_INTERVAL, so that readers see a live driver; call often.

        If an operator asked for a stop, sets the state to stopping; raises StopRequested if at
        once.
        """
        if self.current.state in (RunState.WAITING, RunState.STOPPING):
            self._progress = time.monotonic()
        if (when := self._stop_request()) and self.current.state != RunState.STOPPING:
            text = "at once" if when == AT_ONCE else "after this round"
            self._log_event("run stopping", f"an operator asked to stop {text}")
            self._update(state=RunState.STOPPING)
            self._write()
        if when == AT_ONCE:
            raise StopRequested("an operator asked for it: fedplan stop --now")
        self._write_if_due()

    def stop_reason(self, reason: str = "") -> str:
        """Return and set `stop_text`: why the run stops after this round; "" if the run goes on.

        `reason`: of a callback or early stopping, if any; sets `current.stopped_early`. Else an
        operator's request counts, except after the last round.
        """
        requested = self.current.round < self.current.rounds and self._stop_request()
        self.stop_text = reason or ("an operator asked for it: fedplan stop" if requested else "")
        self._update(stopped_early=bool(reason))
        return self.stop_text

    def notify(self, event: str, text: str, *, level: str = "warning", site: str = "") -> None:
        """Log an event that is not a state of the run, and pass it to the listeners."""
        self._log_event(event, text, level=level, site=site)

    @property
    def healthy(self) -> bool:
        """Whether the run is live, and made progress within the timeouts `updates` + `sites`."""
        limit = self._timeouts.updates + self._timeouts.sites
        return self.current.state in LIVE and time.monotonic() - self._progress < limit

    def _start(self, server: Server, study: str, timeouts: Timeouts) -> None:
        """Set, log and write the status of a run; the first call deletes an old stop request."""
        restarted, self._server = self._server is not None, ref(server)
        self._timeouts, self.stop_text = timeouts, ""
        self._round_seconds, self._round_start = [], time.monotonic()
        self._progress = time.monotonic()
        if self.folder is not None and not restarted:
            (self.folder / STOP_REQUEST).unlink(missing_ok=True)
        last, guarantee = server.last_round(), server.agreement.guarantee
        self._lists_sites, since = len(server.roster) <= MAX_LISTED_SITES, utc_now()
        roster = server.roster if self._lists_sites else ()
        sites = {name: SiteStatus(since=since) for name in roster}
        # Bytes of sites are counted in the open segment of the ledger only.
        reads = sites and (self.folder is not None or self.listeners)
        _, records = read_segment(server.ledger.file) if reads else (None, [])
        turns = [record for record in records if isinstance(record, TurnRecord)]
        self.current = RunStatus(
            study=study,
            run=server.identity.id,
            driver=current_process(),
            started_at=utc_now(),
            state=RunState.RUNNING,
            round=server.global_state.round,
            rounds=server.rounds,
            loss=_loss(last.row if last else {}),
            epsilon=guarantee.epsilon if guarantee else None,
            client_level_dp=server.aggregation.hides_clients,
            sites=_with_traffic(sites, turns),
        )
        self._log_event(
            "run started", f"{server.global_state.round} of {server.rounds} rounds done"
        )
        self._write()

    def _end(self, server: Server, state: str, reason: str) -> None:
        """Set, log and write the final state and reason, unless another server has begun since."""
        if self._server is None or server is not self._server():
            return  # the run was resumed meanwhile, by another server object
        level = "error" if state == RunState.FAILED else "info"
        self._log_event(f"run {state}", reason, level=level)
        self._update(state=state, reason=reason, seconds_left=None)
        self._write()

    def _report_budget(self, number: int) -> None:
        """Set the epsilon spent after round `number`, under DP; log a warning at BUDGET_ALERTS."""
        server = self._server() if self._server else None
        guarantee = server.agreement.guarantee if server else None
        if not (server and guarantee and self.current.epsilon):
            return
        if self.folder is None and not self.listeners:
            return
        guard = server.aggregation.guard
        spent = guard.epsilon_spent if guard else guarantee.forecast_epsilon(number)
        share, last_alert = spent / self.current.epsilon, self._budget_alert
        self._update(epsilon_spent=spent)
        self._budget_alert = max((a for a in BUDGET_ALERTS if share > a - 1e-3), default=0.0)
        if self._budget_alert > last_alert:
            text = f"{self._budget_alert:.0%} of epsilon is spent"
            self._log_event("budget", text, level="warning")

    def _stop_request(self) -> str:
        """Return when an operator asked the run to stop; "" if nobody did."""
        return read_stop_request(self.folder) if self.folder is not None else ""

    def _update(self, **changes: Any) -> None:
        self.current = replace(self.current, **changes)

    def _log_event(
        self, event: str, text: str = "", *, level: str = "info", site: str = "", round: int = 0
    ) -> None:
        """Log an event and a text; call the listeners, except for a site under client-level DP.

        `round`: 0 means the open round for an event of a site, else the last closed round.
        """
        number = round or self.current.round + bool(site)
        entry = LogEntry(utc_now(), level, self.current.run, number, site, event, text)
        if self._log is not None:
            self._log.note(event, text, level=level, run=entry.run, round=number, site=site)
        if not (site and self.current.client_level_dp):
            for listener in self.listeners:
                listener(entry)

    def _write_if_due(self) -> None:
        interval = WRITE_INTERVAL if self._dirty else HEARTBEAT_INTERVAL
        if time.monotonic() - self._written > interval:
            self._write()

    def _write(self) -> None:
        """Write the status file; a failed write is ignored."""
        self._update(updated_at=utc_now())
        self._dirty, self._written = False, time.monotonic()
        if self.folder is not None:
            with suppress(FedplanError):
                write_atomic(self.folder / STATUS, json.dumps(self.current.json(), indent=1) + "\n")


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
