# SPDX-License-Identifier: Apache-2.0
"""Show the status of a run and its sites in the terminal; watch, follow and stop a run."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from fedplan.errors import FedplanError
from fedplan.federation.identity import STUDY, closed_rounds, read_identity
from fedplan.federation.ledger.records import RoundRecord
from fedplan.federation.ledger.status import (
    LIVE,
    RunState,
    RunStatus,
    SiteState,
    ask_to_stop,
    read_status,
    write_status,
)
from fedplan.reports.formats import (
    duration,
    megabytes,
    round_heading,
    score_note,
    simulation_line,
    sites_line,
)
from fedplan.reports.plan_warnings import RunWarning
from fedplan.storage.files import file_size_and_digest
from fedplan.studies.run_scores import RunScores, run_scores, score_rules

DEAD = "died"
"""The state of a run whose process is gone without a final status: it was killed."""
UNTOLD = "no status"
"""The state of an unfinished run without a status file, started from Python."""
RED = (DEAD, RunState.FAILED, SiteState.FAILED, SiteState.REFUSED)
YELLOW = (
    *(RunState.STOPPED, SiteState.AWAY, SiteState.APPROVAL),
    *(SiteState.NOT_CONNECTED, SiteState.NOT_AGGREGATED),
)
GREEN = (RunState.RUNNING, RunState.DONE, SiteState.RESPONDED)
STATE_STYLES = {
    **dict.fromkeys(RED, "red"),
    **dict.fromkeys(YELLOW, "yellow"),
    **dict.fromkeys(GREEN, "green"),
    SiteState.REQUESTED: "cyan",
}
ORDER = (*RED[2:], *YELLOW[1:], SiteState.REQUESTED, SiteState.RESPONDED, SiteState.CONNECTED)
"""The order of sites by state: sites with problems come first."""
POLL_SECONDS = 1.0
"""Seconds between two reads of a run's status."""


@dataclass(frozen=True)
class RunSnapshot:
    """A run at one moment, as read from its folder; print with rich, or call `json`.

    `status` is the last that the run's process wrote; `state` and `round` (the last closed one) are
    up to date even if it was killed since. `scores` are of the last evaluation. `warnings`: as
    `write_summary` wrote them; None if they have to be computed from the folder.
    """

    folder: Path
    status: RunStatus
    state: str
    round: int
    scores: RunScores | None = None
    warnings: tuple[RunWarning, ...] | None = None

    @property
    def live(self) -> bool:
        """Whether the run is in progress, as far as this machine can see."""
        return self.state in LIVE

    def json(self) -> dict[str, Any]:
        """Return the status with the checked state and round, and `run_scores`, as plain values."""
        scores = self.scores.json() if self.scores else None
        checked = {"state": self.state, "round": self.round, "run_scores": scores}
        fields = {**asdict(self.status), **checked}
        del fields["warnings"], fields["study_digest"]  # the command adds the warnings
        return fields

    def __rich__(self) -> RenderableType:
        status, style = self.status, STATE_STYLES.get(self.state, "cyan")
        headline = Text.assemble(
            (status.study or self.folder.name, "bold"),
            "  ",
            (self.state, f"bold {style}"),
            f"  round {self.round} of {status.rounds}" if status.rounds else "",
            f"  {answered_text(status)}" if self.live and status.requested else "",
        )
        if status.reason:
            headline.append(f"\n{status.reason}", style=STATE_STYLES.get(self.state, ""))
        done = BAR_WIDTH * self.round // max(1, status.rounds)
        bar = Text.assemble(("━" * done, style), ("─" * (BAR_WIDTH - done), "dim"))
        scores = [Text(text) for text in self.scores.texts] if self.scores else []
        parts = [headline, bar, *scores, Text("   ".join(self._numbers())), Text()]
        parts += [*self._site_table(), Text()] if status.sites else []
        return Group(*parts, *(Text(line, style="bold") for line in self._advice()))

    def _numbers(self) -> Iterator[str]:
        """Yield texts on loss, times, epsilon and the age of the status, if known."""
        status = self.status
        if status.loss is not None:
            yield f"loss {status.loss:.3f}"
        if status.round_seconds is not None:
            yield f"{duration(status.round_seconds)} per round"
        if self.live and status.seconds_left is not None:
            yield f"{duration(status.seconds_left)} left"
        if status.epsilon:
            yield f"epsilon spent {status.epsilon_spent or 0.0:.4f} of {status.epsilon:g}"
        if status.updated_at:
            yield f"updated {time_ago(status.updated_at)}"

    def _site_table(self) -> tuple[Text, Table]:
        """Return the number of sites by state, and a table of the sites, with problems first."""

        def order(state: str) -> int:
            return ORDER.index(state) if state in ORDER else len(ORDER)

        states = Counter(site.state for site in self.status.sites.values())
        when = "" if self.live else " at the last update"
        counts = Text(f"{len(self.status.sites)} sites{when}: ")
        for place, state in enumerate(sorted(states, key=order)):
            counts.append(", " if place else "")
            counts.append(f"{states[state]} {state}", style=STATE_STYLES.get(state, ""))
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        counts.append("; upload and download are of all rounds")
        for name in ("site", "state", "since", "round", "upload MB", "download MB", "last error"):
            right = name in ("round", "upload MB", "download MB")
            wrap = name == "last error"  # only this column shrinks in a narrow terminal
            table.add_column(name, justify="right" if right else "left", no_wrap=not wrap)
        sites = sorted(self.status.sites.items(), key=lambda each: (order(each[1].state), each[0]))
        for name, site in sites[:MAX_SITES]:
            error = ""
            if site.error and site.error != site.state:  # else the state shows the error already
                error = f"{site.error.partition(' (')[0]}, {time_ago(site.error_at)}"
            state = Text(site.state, style=STATE_STYLES.get(site.state, ""))
            since = time_ago(site.since) if site.since else ""
            traffic = (site.upload_bytes, site.download_bytes)
            sizes = (megabytes(count) if count else "-" for count in traffic)
            table.add_row(Text(name), state, since, str(site.round or "-"), *sizes, Text(error))
        if more := sites[MAX_SITES:]:
            table.add_row(f"and {len(more)} more: --json lists all")
        return counts, table

    def _advice(self) -> Iterator[str]:
        """Yield sentences with the commands that an operator can run next."""
        if waiting := [n for n, s in self.status.sites.items() if s.state == SiteState.APPROVAL]:
            yield f"{', '.join(waiting)}: waiting for `fedplan site approve` at the site."
        if self.live:
            yield f"To stop it: fedplan stop {self.folder}"
        elif self.state == RunState.DONE:
            yield f"To check it: fedplan verify {self.folder}"
        elif self.state in (RunState.STOPPED, RunState.FAILED, DEAD):
            more = not self.status.rounds or self.round < self.status.rounds
            resume = "To continue: run it with --resume. " if more else ""
            yield f"{resume}For the reason: fedplan logs {self.folder}"


MAX_SITES, BAR_WIDTH = 40, 60
"""The most sites in the table, and the width of the bar in characters."""


def run_snapshot(folder: Path | str) -> RunSnapshot:
    """Read the current status of a run from its folder; neither folder nor run is changed.

    A run without a status file (started from Python) is in state "done", "failed" or "no status"; a
    run in progress of which the process is gone is in state "died". Raises FedplanError if there is
    no run.
    """
    folder = Path(folder)
    status = read_status(folder)
    if status is not None and (written := _written_snapshot(folder, status)) is not None:
        return written
    from fedplan.studies.run import read_run  # loads torch

    # Again: to load torch takes seconds, in which a run may end.
    run, status = read_run(folder), read_status(folder)
    if status is None:
        rounds, state, reason = run.study.train.rounds, UNTOLD, ""
        if run.round >= rounds:
            reason = run.failure
            state = RunState.FAILED if reason else RunState.DONE
        status = RunStatus(
            study=run.study.name, rounds=rounds, state=state, reason=reason, round=run.round
        )
    elif status.state in LIVE and status.driver.alive is False:
        # Whatever it waited for, nobody tries again.
        state, status = DEAD, replace(status, reason="")
    else:
        state = status.state
    scores = run_scores(run)
    status = replace(status, primary_metric=scores.metric)  # unset before round 1
    return RunSnapshot(folder, status, state, run.round, scores)


def snapshot_warnings(snapshot: RunSnapshot) -> Sequence[RunWarning]:
    """Return the warnings of a run: those of the snapshot, or else read from the run's folder."""
    if snapshot.warnings is not None:
        return snapshot.warnings
    from fedplan.reports.run_warnings import read_run_warnings  # loads torch

    return read_run_warnings(snapshot.folder)


def write_summary(folder: Path) -> list[RunWarning]:
    """Return the warnings of a run, and write them and its scores into the status of its end.

    `run_snapshot` then needs neither ledger nor torch. Writes nothing if the run has no status
    file, or is in progress.
    """
    from fedplan.reports.run_warnings import read_warnings  # loads torch
    from fedplan.studies.run import read_run

    warnings, status = read_warnings(folder), read_status(folder)
    if status is not None and status.state not in LIVE:
        with suppress(FedplanError):  # as of a full disk: it only saves time
            scores = run_scores(read_run(folder)).json()
            fields = [each.json() for each in warnings]
            digest = _study_digest(folder)
            write_status(
                folder, replace(status, run_scores=scores, warnings=fields, study_digest=digest)
            )
    return [each.of_run(folder) for each in warnings]


def _study_digest(folder: Path) -> str:
    return str(file_size_and_digest(folder / STUDY)[1])


def _written_snapshot(folder: Path, status: RunStatus) -> RunSnapshot | None:
    """Return the snapshot of a run that has ended by its summary; None if that is missing or old.

    Reads the status file, the study file, the run's identity and the names of checkpoints only.
    """
    if status.state in LIVE or status.warnings is None or status.run_scores is None:
        return None
    try:
        same_run = read_identity(folder).id == status.run
        if not same_run or status.study_digest != _study_digest(folder):
            return None
        scores = RunScores.from_json(status.run_scores)
        warnings = tuple(RunWarning(**each).of_run(folder) for each in status.warnings)
    except (TypeError, KeyError, ValueError, IndexError, AttributeError, OSError, FedplanError):
        return None
    if status.round != closed_rounds(folder):
        return None
    status = replace(status, primary_metric=scores.metric)  # unset before round 1
    return RunSnapshot(folder, status, status.state, status.round, scores, warnings)


def stop_run(folder: Path | str, *, at_once: bool = False) -> RunSnapshot:
    """Ask a run in progress to stop after its open round; do not wait for the stop.

    Returns the snapshot before the stop. `at_once` drops the open round, which a resumed run
    repeats from the start. Raises FedplanError if the run is not in progress.
    """
    snapshot = run_snapshot(folder)
    if not snapshot.live:
        raise FedplanError(f"{folder} is not running, its state is: {snapshot.state}")
    ask_to_stop(Path(folder), at_once=at_once)
    return snapshot


def watch(folder: Path | str) -> Iterator[RunSnapshot]:
    """Yield a snapshot of a run every second; the last one is no longer in progress."""
    while True:
        yield (snapshot := run_snapshot(folder))
        if not snapshot.live:
            return
        time.sleep(POLL_SECONDS)


def follow_run(folder: Path | str, show: Callable[[str], None]) -> RunSnapshot:
    """Pass the line of each closed round to `show`, as `fedplan run` prints it, until the run ends.

    Starts with round 1, after a heading if the run is a simulation. Blocks while the run is in
    progress, and returns the last snapshot. Raises FedplanError if there is no run.
    """
    from fedplan.studies.run import RunAdvanced, read_run

    folder, after = Path(folder), 0
    run = read_run(folder)
    if run.study.has_central_data:
        rules = score_rules(run)
        score = rules.of_row(run.last_scores).find("global")
        show(f"{score_note(rules, score.examples if score else '')}\n{round_heading(rules)}")
    while True:
        snapshot = run_snapshot(folder)
        status = snapshot.status
        with suppress(RunAdvanced):  # a round was closed while the folder was read: read again
            run = read_run(folder)
            rules = score_rules(run)
            records = {each.round: each for each in run.records if isinstance(each, RoundRecord)}
            for row in (row for row in run.metrics if row["round"] > after):
                number = int(row["round"])
                if run.study.has_central_data:
                    spent = status.epsilon_spent if number == status.round else None
                    show(simulation_line(row, rules, spent))
                else:
                    show(sites_line(records[number], row, rules))
            after = run.round
        if not snapshot.live and after >= snapshot.round:
            return snapshot
        time.sleep(POLL_SECONDS)


def answered_text(status: RunStatus) -> str:
    """Return how many clients of the open round have answered: `2 of 3 clients`."""
    return f"{status.responded} of {status.requested} clients"


def time_ago(when: str) -> str:
    """Return the time since an ISO time with a time zone: `4 s ago`; 0.0 s for a future time."""
    seconds = (datetime.now(UTC) - datetime.fromisoformat(when)).total_seconds()
    return f"{duration(max(0.0, seconds))} ago"


def make_console() -> Console:
    """Return a console for status tables, at least 100 wide if the output is no terminal."""
    console = Console(highlight=False)
    width = None if console.is_terminal else max(100, console.width)
    return Console(highlight=False, width=width)
