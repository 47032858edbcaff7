# SPDX-License-Identifier: Apache-2.0
"""The status of a run as an operator sees it: how it goes, which site is in trouble, what to do."""

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

from fedplan.data.own import OWN as OWN_TASK
from fedplan.data.tasks import task_class
from fedplan.errors import FedplanError
from fedplan.federation.record import RoundRecord
from fedplan.federation.states import (
    LIVE,
    RunState,
    RunStatus,
    SiteState,
    SiteStatus,
    ask_to_stop,
    read_status,
)
from fedplan.reports.lines import HEADING, OWN, line_of, line_of_sites, unit
from fedplan.reports.units import duration, megabytes
from fedplan.studies.run import WentOn, open_run
from fedplan.studies.schema import Study

DEAD = "ended without a word"
"""The state of a run whose driver is gone and has not said why: it was killed, or the machine."""
UNTOLD = "told by nobody"
"""The state of a run that nobody drove by a command."""
RED = (DEAD, RunState.FAILED, SiteState.FAILED, SiteState.REFUSED)
YELLOW = (
    *(RunState.STOPPED, SiteState.AWAY, SiteState.APPROVAL),
    *(SiteState.NOT_COME, SiteState.LEFT_OUT),
)
GREEN = (RunState.RUNNING, RunState.DONE, SiteState.ANSWERED)
COLOURS = {
    **dict.fromkeys(RED, "red"),
    **dict.fromkeys(YELLOW, "yellow"),
    **dict.fromkeys(GREEN, "green"),
    SiteState.ASKED: "cyan",
}
ORDER = (*RED[2:], *YELLOW[1:], SiteState.ASKED, SiteState.ANSWERED, SiteState.THERE)
"""Sites in trouble come first."""
LOOK = 1.0
"""Seconds between two looks at a run."""


@dataclass(frozen=True)
class RunLook:
    """A run at one moment: what its driver told last, and the round that its folder holds.

    The folder's word goes before the driver's: a driver may have been killed in between.
    """

    folder: Path
    told: RunStatus
    state: str
    round: int

    @property
    def live(self) -> bool:
        """Whether somebody drives it, as far as can be seen from here."""
        return self.state in LIVE

    def json(self) -> dict[str, Any]:
        """It as plain values."""
        return {**self.told.json(), "state": self.state, "round": self.round}

    def __rich__(self) -> RenderableType:
        parts = [self._first(), self._bar(), self._numbers(), Text()]
        if self.told.sites:
            parts += [self._count(), self._table(), Text()]
        return Group(*parts, *(Text(line, style="bold") for line in self._advice()))

    def _first(self) -> RenderableType:
        said = Text.assemble(
            (self.told.study or self.folder.name, "bold"),
            "  ",
            (self.state, f"bold {COLOURS.get(self.state, 'cyan')}"),
            f"  round {self.round} of {self.told.rounds}" if self.told.rounds else "",
            f"  {clients(self.told)}" if self.live and self.told.asked else "",
        )
        if self.told.why:
            said.append(f"\n{self.told.why}", style=COLOURS.get(self.state, ""))
        return said

    def _bar(self) -> Text:
        done = WIDE * self.round // max(1, self.told.rounds)
        colour = COLOURS.get(self.state, "cyan")
        return Text.assemble(("━" * done, colour), ("─" * (WIDE - done), "dim"))

    def _numbers(self) -> Text:
        told = self.told
        words = [f"loss {told.loss:.3f}" if told.loss is not None else ""]
        words += list(told_scores(told))
        words += [f"{duration(told.seconds)} a round" if told.seconds is not None else ""]
        if self.live and told.left is not None:
            words.append(f"{duration(told.left)} left")
        if told.promised:
            words.append(f"epsilon {told.spent or 0.0:.2f} of {told.promised:g}")
        if told.changed:
            words.append(f"told {ago(told.changed)}")
        return Text("   ".join(filter(None, words)))

    def _count(self) -> Text:
        states = Counter(site.state for site in self.told.sites.values())
        when = "" if self.live else " when last told"
        said = Text(f"{len(self.told.sites)} sites{when}: ")
        for place, state in enumerate(sorted(states, key=_place)):
            said.append(", " if place else "")
            said.append(f"{states[state]} {state}", style=COLOURS.get(state, ""))
        return said

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for name in ("site", "state", "since", "round", "MB up", "MB down", "last fault"):
            right = name in ("round", "MB up", "MB down")
            table.add_column(name, justify="right" if right else "left", no_wrap=True)
        shown = sorted(self.told.sites.items(), key=lambda each: (_place(each[1].state), each[0]))
        for name, site in shown[:MOST]:
            table.add_row(*_row(name, site))
        if more := shown[MOST:]:
            table.add_row(f"and {len(more)} more: --json has all")
        return table

    def _advice(self) -> Iterator[str]:
        """What an operator can do now."""
        if waiting := [n for n, s in self.told.sites.items() if s.state == SiteState.APPROVAL]:
            yield f"{', '.join(waiting)}: a person there approves by `fedplan site approve`."
        if self.live:
            yield f"Stop it: fedplan stop {self.folder}"
        elif self.state == RunState.DONE:
            yield f"Check it: fedplan verify {self.folder}"
        elif self.state in (RunState.STOPPED, RunState.FAILED, DEAD):
            yield f"Go on: start it again with --resume; why: fedplan logs {self.folder}"


MOST, WIDE = 40, 60
"""Sites that a screen shows, and how wide its bar is."""


def status_of(folder: Path | str) -> RunLook:
    """A run as it now is. Nothing of it is changed, and nobody is asked."""
    folder = Path(folder)
    run, told = open_run(folder), read_status(folder)
    if told is None:
        rounds = run.study.train.rounds
        state = RunState.DONE if run.round >= rounds else UNTOLD
        told = RunStatus(study=run.study.name, rounds=rounds, state=state, round=run.round)
        return RunLook(folder, _known(told, run.study), state, run.round)
    gone = told.state in LIVE and told.driver.alive is False
    return RunLook(folder, _known(told, run.study), DEAD if gone else told.state, run.round)


def _known(told: RunStatus, study: Study) -> RunStatus:
    """A status with the score that the task is known by, which nobody tells before a round."""
    if told.primary:
        return told
    own = study.task.kind == OWN_TASK  # it came from Python, and its study does not say
    return replace(told, primary="loss" if own else task_class(study.task.kind).primary)


def stop_run(folder: Path | str, *, at_once: bool = False) -> RunLook:
    """Ask a run to stop: after its open round, or without it. It can be resumed with its bits."""
    found = status_of(folder)
    if not found.live:
        raise FedplanError(f"{folder} is not running: it is {found.state}; there is none to stop")
    ask_to_stop(Path(folder), at_once=at_once)
    return found


def watch(folder: Path | str) -> Iterator[RunLook]:
    """A run again and again, until nobody drives it."""
    while True:
        yield (found := status_of(folder))
        if not found.live:
            return
        time.sleep(LOOK)


def attach(folder: Path | str, tell: Callable[[str], None]) -> RunLook:
    """Tell the rounds of a run as `fedplan run` does, those that closed and then each new one."""
    folder, after = Path(folder), 0
    if open_run(folder).study.gathered:
        tell(f"{unit(status_of(folder).told.primary)}\n{HEADING}")
    while True:
        found = status_of(folder)
        with suppress(WentOn):
            after = _tell(folder, after, found.told, tell)
        if not found.live and after >= found.round:
            return found
        time.sleep(LOOK)


def _tell(folder: Path, after: int, told: RunStatus, tell: Callable[[str], None]) -> int:
    run = open_run(folder)
    rows = [row for row in run.metrics if row["round"] > after]
    wholes = {record.round: record for record in run.records if isinstance(record, RoundRecord)}
    for row in rows:
        number = int(row["round"])
        spent = told.spent if number == told.round else None
        if run.study.gathered:
            tell(line_of(row, spent, primary=told.primary))
        else:
            tell(line_of_sites(wholes[number], row, primary=told.primary))
    return run.round


def _row(name: str, site: SiteStatus) -> tuple[RenderableType, ...]:
    state = Text(site.state, style=COLOURS.get(site.state, ""))
    return (
        Text(name),
        state,
        ago(site.since) if site.since else "",
        str(site.round or "-"),
        megabytes(site.up) if site.up else "-",
        megabytes(site.down) if site.down else "-",
        Text(_fault(site)),
    )


def _fault(site: SiteStatus) -> str:
    """A site's last fault by its code: what that means is in the log."""
    if not site.fault or site.fault == site.state:
        return ""
    return f"{site.fault.partition(' (')[0]}, {ago(site.fault_at)}"


def clients(told: RunStatus) -> str:
    """How many clients of the open round are done."""
    return f"{told.answered} of {told.asked} clients"


def told_scores(told: RunStatus) -> Iterator[str]:
    """The last scores by whose they are, all of them the one that the task is known by."""
    for kind in ("world", "sites.world", "sites.own"):
        if (value := told.scores.get(f"{kind}.{told.primary}")) is not None:
            yield f"{kind} {told.primary} {value:.3f}"
    for kind in OWN:
        mean, worst = (told.scores.get(f"{kind}{word}") for word in ("mean", "worst"))
        if mean is not None and worst is not None:
            yield f"own {told.primary} {mean:.3f}, worst {worst:.3f}"


def _place(state: str) -> int:
    return ORDER.index(state) if state in ORDER else len(ORDER)


def ago(when: str) -> str:
    """How long ago a time was."""
    seconds = (datetime.now(UTC) - datetime.fromisoformat(when)).total_seconds()
    return f"{duration(max(0.0, seconds))} ago"


def screen() -> Console:
    """A console as wide as the table needs, where there is no terminal that says its width."""
    found = Console(highlight=False)
    return found if found.is_terminal else Console(highlight=False, width=max(100, found.width))
