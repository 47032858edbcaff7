# SPDX-License-Identifier: Apache-2.0
"""Show the status of a run and its sites in the terminal; watch, follow and stop a run."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from fedplan.data.custom_task import CUSTOM_KIND as OWN_TASK
from fedplan.data.tasks import task_class
from fedplan.errors import FedplanError
from fedplan.federation.record import RoundRecord
from fedplan.federation.run_states import (
    LIVE,
    RunState,
    RunStatus,
    SiteState,
    SiteStatus,
    ask_to_stop,
    read_status,
)
from fedplan.reports.round_lines import (
    HEADING,
    PERSONAL,
    SCORE_LABELS,
    score_note,
    simulation_line,
    sites_line,
)
from fedplan.reports.units import duration, megabytes
from fedplan.studies.run import RunAdvanced, open_run
from fedplan.studies.schema import Study

DEAD = "died"
"""The state of a run whose process is gone without a final status: it was killed."""
UNTOLD = "no status"
"""The state of an unfinished run without a status file, started from Python."""
RED = (DEAD, RunState.FAILED, SiteState.FAILED, SiteState.REFUSED)
YELLOW = (
    *(RunState.STOPPED, SiteState.AWAY, SiteState.APPROVAL),
    *(SiteState.NOT_COME, SiteState.LEFT_OUT),
)
GREEN = (RunState.RUNNING, RunState.DONE, SiteState.ANSWERED)
STATE_STYLES = {
    **dict.fromkeys(RED, "red"),
    **dict.fromkeys(YELLOW, "yellow"),
    **dict.fromkeys(GREEN, "green"),
    SiteState.ASKED: "cyan",
}
ORDER = (*RED[2:], *YELLOW[1:], SiteState.ASKED, SiteState.ANSWERED, SiteState.THERE)
"""The order of sites by state: sites with problems come first."""
POLL_SECONDS = 1.0
"""Seconds between two reads of a run's status."""


@dataclass(frozen=True)
class RunSnapshot:
    """A run at one moment: the last status of its process, its state, and its last closed round.

    `state` and `round` are checked against the folder, as the process may have been killed after
    its last status.
    """

    folder: Path
    status: RunStatus
    state: str
    round: int

    @property
    def live(self) -> bool:
        """Whether the run is in progress, as far as this machine can see."""
        return self.state in LIVE

    def json(self) -> dict[str, Any]:
        """Return the status with the checked state and round as plain values."""
        return {**self.status.json(), "state": self.state, "round": self.round}

    def __rich__(self) -> RenderableType:
        parts = [self._headline(), self._bar(), self._numbers(), Text()]
        if self.status.sites:
            parts += [self._site_counts(), self._table(), Text()]
        return Group(*parts, *(Text(line, style="bold") for line in self._advice()))

    def _headline(self) -> RenderableType:
        """Return study, state, round and clients of the open round, then the reason of a stop."""
        headline = Text.assemble(
            (self.status.study or self.folder.name, "bold"),
            "  ",
            (self.state, f"bold {STATE_STYLES.get(self.state, 'cyan')}"),
            f"  round {self.round} of {self.status.rounds}" if self.status.rounds else "",
            f"  {answered_text(self.status)}" if self.live and self.status.requested else "",
        )
        if self.status.why:
            headline.append(f"\n{self.status.why}", style=STATE_STYLES.get(self.state, ""))
        return headline

    def _bar(self) -> Text:
        """Return a bar of the closed rounds."""
        done = BAR_WIDTH * self.round // max(1, self.status.rounds)
        style = STATE_STYLES.get(self.state, "cyan")
        return Text.assemble(("━" * done, style), ("─" * (BAR_WIDTH - done), "dim"))

    def _numbers(self) -> Text:
        """Return loss, scores, seconds per round, time left, epsilon and age of the status."""
        status = self.status
        texts = [f"loss {status.loss:.3f}" if status.loss is not None else ""]
        texts += list(score_texts(status))
        texts += [f"{duration(status.seconds)} per round" if status.seconds is not None else ""]
        if self.live and status.left is not None:
            texts.append(f"{duration(status.left)} left")
        if status.promised:
            texts.append(f"epsilon spent {status.spent or 0.0:.2f} of {status.promised:g}")
        if status.changed:
            texts.append(f"updated {time_ago(status.changed)}")
        return Text("   ".join(filter(None, texts)))

    def _site_counts(self) -> Text:
        """Return the number of sites in each state."""
        states = Counter(site.state for site in self.status.sites.values())
        when = "" if self.live else " at the last update"
        counts = Text(f"{len(self.status.sites)} sites{when}: ")
        for place, state in enumerate(sorted(states, key=_state_order)):
            counts.append(", " if place else "")
            counts.append(f"{states[state]} {state}", style=STATE_STYLES.get(state, ""))
        return counts

    def _table(self) -> Table:
        """Return a table with a row per site, sites with problems first."""
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for name in ("site", "state", "since", "round", "upload MB", "download MB", "last error"):
            right = name in ("round", "upload MB", "download MB")
            wrap = name == "last error"  # only this column shrinks in a narrow terminal
            table.add_column(name, justify="right" if right else "left", no_wrap=not wrap)
        sites = sorted(
            self.status.sites.items(), key=lambda each: (_state_order(each[1].state), each[0])
        )
        for name, site in sites[:MAX_SITES]:
            table.add_row(*_row(name, site))
        if more := sites[MAX_SITES:]:
            table.add_row(f"and {len(more)} more: --json lists all")
        return table

    def _advice(self) -> Iterator[str]:
        """Yield the commands that an operator can run next."""
        if waiting := [n for n, s in self.status.sites.items() if s.state == SiteState.APPROVAL]:
            yield f"{', '.join(waiting)}: waiting for `fedplan site approve` at the site."
        if self.live:
            yield f"To stop it: fedplan stop {self.folder}"
        elif self.state == RunState.DONE:
            yield f"To check it: fedplan verify {self.folder}"
        elif self.state in (RunState.STOPPED, RunState.FAILED, DEAD):
            yield f"To continue: run it with --resume. For the reason: fedplan logs {self.folder}"


MAX_SITES, BAR_WIDTH = 40, 60
"""The most sites in the table, and the width of the bar in characters."""


def run_snapshot(folder: Path | str) -> RunSnapshot:
    """Read the current status of a run from its folder, without changing it or calling the run.

    A run without a status file is done or has no status; one whose process is gone has died.
    """
    folder = Path(folder)
    run, status = open_run(folder), read_status(folder)
    if status is None:
        rounds = run.study.train.rounds
        state = RunState.DONE if run.round >= rounds else UNTOLD
        status = RunStatus(study=run.study.name, rounds=rounds, state=state, round=run.round)
        return RunSnapshot(folder, _with_primary(status, run.study), state, run.round)
    died = status.state in LIVE and status.driver.alive is False
    return RunSnapshot(
        folder, _with_primary(status, run.study), DEAD if died else status.state, run.round
    )


def _with_primary(status: RunStatus, study: Study) -> RunStatus:
    """Return a status with the name of the task's main metric, which is unset before a round.

    It is the loss for a task given from Python, whose study does not name a metric.
    """
    if status.primary:
        return status
    custom = study.task.kind == OWN_TASK
    return replace(status, primary="loss" if custom else task_class(study.task.kind).primary)


def stop_run(folder: Path | str, *, at_once: bool = False) -> RunSnapshot:
    """Request a run to stop after its open round, or `at_once` without it; return its snapshot.

    The run can be resumed with bit-identical results. Raises FedplanError if it is not running.
    """
    snapshot = run_snapshot(folder)
    if not snapshot.live:
        raise FedplanError(f"{folder} is not running, its state is: {snapshot.state}")
    ask_to_stop(Path(folder), at_once=at_once)
    return snapshot


def watch(folder: Path | str) -> Iterator[RunSnapshot]:
    """Yield a snapshot of a run every second until it is no longer in progress."""
    while True:
        yield (snapshot := run_snapshot(folder))
        if not snapshot.live:
            return
        time.sleep(POLL_SECONDS)


def follow_run(folder: Path | str, show: Callable[[str], None]) -> RunSnapshot:
    """Pass the line of each closed round, and of each new one, to `show` until the run ends.

    Returns the last snapshot. The lines are those of `fedplan run`.
    """
    folder, after = Path(folder), 0
    if open_run(folder).study.has_central_data:
        show(f"{score_note(run_snapshot(folder).status.primary)}\n{HEADING}")
    while True:
        snapshot = run_snapshot(folder)
        with suppress(RunAdvanced):
            after = _show_rounds(folder, after, snapshot.status, show)
        if not snapshot.live and after >= snapshot.round:
            return snapshot
        time.sleep(POLL_SECONDS)


def _show_rounds(folder: Path, after: int, status: RunStatus, show: Callable[[str], None]) -> int:
    """Pass the lines of closed rounds past round `after` to `show`; return the last round."""
    run = open_run(folder)
    rows = [row for row in run.metrics if row["round"] > after]
    records = {record.round: record for record in run.records if isinstance(record, RoundRecord)}
    for row in rows:
        number = int(row["round"])
        spent = status.spent if number == status.round else None
        if run.study.has_central_data:
            show(simulation_line(row, spent, primary=status.primary))
        else:
            show(sites_line(records[number], row, primary=status.primary))
    return run.round


def _row(name: str, site: SiteStatus) -> tuple[RenderableType, ...]:
    """Return the cells of a site in the table of sites."""
    state = Text(site.state, style=STATE_STYLES.get(site.state, ""))
    return (
        Text(name),
        state,
        time_ago(site.since) if site.since else "",
        str(site.round or "-"),
        megabytes(site.up) if site.up else "-",
        megabytes(site.down) if site.down else "-",
        Text(_last_error(site)),
    )


def _last_error(site: SiteStatus) -> str:
    """Return the code and age of a site's last error, empty if its state shows it already."""
    if not site.fault or site.fault == site.state:
        return ""
    return f"{site.fault.partition(' (')[0]}, {time_ago(site.fault_at)}"


def answered_text(status: RunStatus) -> str:
    """Return how many clients of the open round have answered: `2 of 3 clients`."""
    return f"{status.answered} of {status.requested} clients"


def score_texts(status: RunStatus) -> Iterator[str]:
    """Yield the last scores of the task's main metric: global, personal mean and worst client."""
    for prefix, label in SCORE_LABELS.items():
        if (value := status.scores.get(f"{prefix}.{status.primary}")) is not None:
            yield f"{label.format(status.primary)} {value:.3f}"
    for prefix in PERSONAL:
        mean, worst = (
            status.scores.get(f"{prefix}{status.primary}{end}") for end in ("", "_worst")
        )
        if mean is not None and worst is not None:
            yield f"personal {status.primary} {mean:.3f}, worst client {worst:.3f}"


def _state_order(state: str) -> int:
    """Return the place of a site's state in the table; unknown states come last."""
    return ORDER.index(state) if state in ORDER else len(ORDER)


def time_ago(when: str) -> str:
    """Return the time since an ISO time: `4 s ago`."""
    seconds = (datetime.now(UTC) - datetime.fromisoformat(when)).total_seconds()
    return f"{duration(max(0.0, seconds))} ago"


def make_console() -> Console:
    """Return a console for status tables, at least 100 wide if the output is no terminal."""
    console = Console(highlight=False)
    if console.is_terminal:
        return console
    return Console(highlight=False, width=max(100, console.width))
