# SPDX-License-Identifier: Apache-2.0
"""Status file and event log of a running run: its driver, the open round, the state of each site.

Nothing here changes the results of a run, except that an operator may ask it to stop.
"""

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
    ASKED,
    AT_ONCE,
    LIVE,
    SEVERITY,
    STATUS,
    RunState,
    RunStatus,
    SiteState,
    SiteStatus,
    read_stop_request,
)
from fedplan.federation.timeouts import Timeouts
from fedplan.storage.files import write_atomic
from fedplan.storage.logs import Log, LogEntry, utc_now
from fedplan.storage.processes import current_process

if TYPE_CHECKING:
    from fedplan.federation.server import Server

WRITE_INTERVAL, HEARTBEAT_INTERVAL = 0.5, 10.0
"""Seconds between two writes of the status file if sites have changed, and if nothing has. A
committed round is written at once."""
MAX_LISTED_SITES = 2000
"""Most sites that the status file lists; with more, only faults of sites are logged."""
MEDIAN_ROUNDS = 20
"""Number of last rounds whose median time is the estimate for the next."""
FINISHED_STATES = (SiteState.ANSWERED, SiteState.FAILED, SiteState.REFUSED)
"""States of a site that is done with the open round."""
BUDGET_ALERTS = (0.8, 1.0)
"""Fractions of the promised epsilon at which an event is logged."""


class StopRequested(FedplanError):
    """An operator asked to stop the run at once, without its open round."""


EventListener = Callable[[LogEntry], None]
"""Function that is called with each log entry."""


class StatusReporter:
    """Keeps the status of a run in `current`, writes it to the run's folder, and logs events.

    Without a `folder` nothing is written. `listeners` get each log entry, except entries of single
    sites under client-level DP. `stop_text` is the reason if the run is to stop.
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
        """Report a run as running within the body, and then how it ended.

        StopRequested ends the body silently; other errors are reported and raised again.
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
                why = encode_code(error_code_of(error)) if has_examples else _first_line(error)
                self._end(server, RunState.FAILED, why)
            raise
        except GeneratorExit:
            self._end(server, RunState.STOPPED, "nobody asks for its next round")
            raise
        except BaseException:
            self._end(server, RunState.STOPPED, "interrupted")
            raise
        if server.global_state.round >= server.rounds:
            self._end(server, RunState.DONE, "")
        else:
            self._end(server, RunState.STOPPED, self.stop_text)

    def set_state(self, state: str) -> None:
        """Set the run's state to waiting or running, unless it is stopping."""
        if self.current.state not in (state, RunState.STOPPING):
            self._round_start = time.monotonic()
            self._log_event(f"run {state}")
            self._update(state=state)
            self._write()

    def open_round(self, cohort_size: int) -> None:
        """Report that a round with so many clients has begun."""
        self._finished = set[str]()
        self._update(requested=cohort_size, answered=0)
        self._dirty = True
        self._write_if_due()

    def _count_finished(self, name: str) -> None:
        """Count a site as done with the open round, and estimate the seconds to the run's end."""
        self._finished.add(name)
        done = len(self._finished)
        cohort_size = max(done, self.current.requested)
        per_site = (time.monotonic() - self._round_start) / done
        # In the first round, the estimate of a round comes from its sites so far.
        times = self._round_seconds[-MEDIAN_ROUNDS:]
        per_round = median(times) if times else per_site * cohort_size
        later = per_round * max(0, self.current.rounds - self.current.round - 1)
        left = per_site * (cohort_size - done) + later
        self._update(answered=done, requested=cohort_size, left=left)

    def set_problem(self, why: str) -> None:
        """Set the reason why a live run does not proceed; "" clears it."""
        if self.current.why != why and self.current.state in LIVE:
            self._update(why=why)
            self._write()

    def set_site_state(self, name: str, state: str, why: str = "") -> None:
        """Set and log the state of a site, with a reason; an unchanged state is ignored."""
        if state in FINISHED_STATES and self.current.requested:
            self._count_finished(name)
        before = self.current.sites.get(name, SiteStatus())
        if self._lists_sites and (before.state, before.why) == (state, why):
            return
        if state in (SiteState.ASKED, SiteState.ANSWERED):
            self._progress = time.monotonic()
        if self._lists_sites or state in SEVERITY:
            self._log_event(f"site {state}", why, level=SEVERITY.get(state, "info"), site=name)
        if not self._lists_sites:
            return
        changed = replace(before, state=state, why=why, since=utc_now())
        if state == SiteState.ANSWERED:
            changed = replace(changed, round=self.current.round + 1)
        if state in SEVERITY:
            changed = replace(changed, fault=why or state, fault_at=changed.since)
        if name not in self.current.sites:  # a copy: another thread may be iterating over it
            self._update(sites=dict(self.current.sites))
        self.current.sites[name] = changed
        self._dirty = True
        self._write_if_due()

    def record_round(self, closed: CommittedRound) -> None:
        """Report a committed round: log it, update scores, times and sites, and write the file."""
        self._round_seconds.append(time.monotonic() - self._round_start)
        self._round_start = self._progress = time.monotonic()
        seconds = median(self._round_seconds[-MEDIAN_ROUNDS:])
        record, row = closed.record, closed.row
        scores = {k: v for k, v in row.items() if _is_overall_score(k) and isfinite(v)}
        loss = row.get("loss")
        self._log_event(
            "round closed",
            f"{len(record.counted)} counted, {len(record.rejected)} not, "
            f"{record.up} bytes up, {record.down} down",
            round=closed.round,
        )
        self._update(
            round=closed.round,
            rounds=closed.total_rounds,
            requested=0,
            answered=0,
            primary=closed.primary,
            loss=loss if loss is not None and isfinite(loss) else None,
            scores=scores or self.current.scores,
            seconds=seconds,
            left=seconds * (closed.total_rounds - closed.round),
            sites=_sites_after(self.current.sites, closed) if self._lists_sites else {},
        )
        self._report_budget(closed.round)
        self._write()

    def heartbeat(self) -> None:
        """Report that the driver is alive, and note an operator's request to stop.

        Raises StopRequested if the run is to stop at once.
        """
        if self.current.state in (RunState.WAITING, RunState.STOPPING):
            self._progress = time.monotonic()
        if (when := self._stop_request()) and self.current.state != RunState.STOPPING:
            self._log_event("run stopping", f"asked to: {when}")
            self._update(state=RunState.STOPPING)
            self._write()
        if when == AT_ONCE:
            raise StopRequested("an operator asked for it: fedplan stop --now")
        self._write_if_due()

    def stop_reason(self, reason: str = "") -> str:
        """Return why the run stops after this round: `reason`, or an operator's request, or "".

        Keeps it in `stop_text`.
        """
        requested = self.current.round < self.current.rounds and self._stop_request()
        self.stop_text = reason or ("an operator asked for it: fedplan stop" if requested else "")
        self._update(ruled=bool(reason))
        return self.stop_text

    def notify(self, event: str, text: str, *, level: str = "warning", site: str = "") -> None:
        """Log an event that is not a state of the run, and pass it to the listeners."""
        self._log_event(event, text, level=level, site=site)

    @property
    def healthy(self) -> bool:
        """Whether the run is live and made progress within its timeouts."""
        limit = self._timeouts.updates + self._timeouts.sites
        return self.current.state in LIVE and time.monotonic() - self._progress < limit

    @property
    def _has_readers(self) -> bool:
        """Whether there is a status file or a listener."""
        return self.folder is not None or bool(self.listeners)

    def _start(self, server: Server, study: str, timeouts: Timeouts) -> None:
        """Set the status of a run that begins or resumes, log it, and write the file.

        Deletes an old stop request, unless this reporter has tracked a run before.
        """
        restarted, self._server = self._server is not None, ref(server)
        self._timeouts, self.stop_text = timeouts, ""
        self._round_seconds, self._round_start = [], time.monotonic()
        self._progress = time.monotonic()
        if self.folder is not None and not restarted:
            (self.folder / ASKED).unlink(missing_ok=True)
        last, guarantee = server.last_round(), server.agreement.guarantee
        self._lists_sites, since = len(server.roster) <= MAX_LISTED_SITES, utc_now()
        roster = server.roster if self._lists_sites else ()
        sites = {name: SiteStatus(since=since) for name in roster}
        # Bytes of sites are counted in the open segment of the ledger only.
        _, records = read_segment(server.ledger.file) if self._has_readers and sites else (None, [])
        turns = [record for record in records if isinstance(record, TurnRecord)]
        self.current = RunStatus(
            study=study,
            run=server.identity.id,
            driver=current_process(),
            began=utc_now(),
            state=RunState.RUNNING,
            round=server.global_state.round,
            rounds=server.rounds,
            loss=_loss(last.row if last else {}),
            promised=guarantee.epsilon if guarantee else None,
            hidden=server.aggregation.hides_clients,
            sites=_with_traffic(sites, turns),
        )
        self._log_event(
            "run begun", f"round {server.global_state.round} of {server.rounds} is closed"
        )
        self._write()

    def _end(self, server: Server, state: str, why: str) -> None:
        """Set the final state of a run, log it, and write the file."""
        if self._server is None or server is not self._server():
            return  # the run was resumed meanwhile, by another server object
        level = "error" if state == RunState.FAILED else "info"
        self._log_event(f"run {state}", why, level=level)
        self._update(state=state, why=why, left=None)
        self._write()

    def _report_budget(self, number: int) -> None:
        """Set the epsilon spent after round `number`, and log when it passes BUDGET_ALERTS."""
        server = self._server() if self._server else None
        guarantee = server.agreement.guarantee if server else None
        if (
            server is None
            or guarantee is None
            or not self.current.promised
            or not self._has_readers
        ):
            return
        guard = server.aggregation.guard
        spent = guard.epsilon_spent if guard else guarantee.forecast_epsilon(number)
        share, last_alert = spent / self.current.promised, self._budget_alert
        self._update(spent=spent)
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
        """Log an event, and pass it to the listeners unless it reveals a site under client DP."""
        number = round or self.current.round + bool(site)
        entry = LogEntry(utc_now(), level, self.current.run, number, site, event, text)
        if self._log is not None:
            self._log.note(event, text, level=level, run=entry.run, round=number, site=site)
        if not (site and self.current.hidden):
            for listener in self.listeners:
                listener(entry)

    def _write_if_due(self) -> None:
        interval = WRITE_INTERVAL if self._dirty else HEARTBEAT_INTERVAL
        if time.monotonic() - self._written > interval:
            self._write()

    def _write(self) -> None:
        """Write the status file; a failed write is ignored."""
        self._update(changed=utc_now())
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


def _first_line(error: Exception) -> str:
    """Return the first line of a FedplanError; of others the class name, as texts may leak data."""
    text = str(error) if isinstance(error, FedplanError) else type(error).__name__
    return text.partition("\n")[0][:500]


def _with_traffic(
    sites: Mapping[str, SiteStatus], turns: Sequence[TurnRecord]
) -> dict[str, SiteStatus]:
    """Return the sites with bytes and last round of these turns added."""
    updated = dict(sites)
    for turn in turns:
        if (site := updated.get(turn.client)) is not None:
            up, down = site.up + turn.up, site.down + turn.down
            updated[turn.client] = replace(site, up=up, down=down, round=turn.round)
    return updated


def _sites_after(sites: Mapping[str, SiteStatus], closed: CommittedRound) -> dict[str, SiteStatus]:
    """Return the sites after a committed round: traffic, and who was counted or rejected."""
    updated = _with_traffic(sites, closed.turns)
    for name in closed.record.counted:
        site = updated.get(name, SiteStatus())
        since = site.since if site.state == SiteState.ANSWERED else utc_now()
        updated[name] = replace(site, state=SiteState.ANSWERED, why="", since=since)
    for name, why in closed.record.rejected.items():
        site = updated.get(name, SiteStatus())
        updated[name] = replace(site, fault=why[:300], fault_at=utc_now())
        if site.state in (SiteState.ASKED, SiteState.ANSWERED, SiteState.THERE):
            out = {"state": SiteState.LEFT_OUT, "why": why[:300], "since": utc_now()}
            updated[name] = replace(updated[name], **out)
    participants = {*closed.record.counted, *closed.record.rejected}
    for name, site in updated.items():
        # Sites that were asked for scores only.
        if site.state == SiteState.ASKED and name not in participants:
            updated[name] = replace(site, state=SiteState.THERE, since=utc_now())
    return updated
