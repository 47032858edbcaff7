# SPDX-License-Identifier: Apache-2.0
"""Progress within a round: clients done of all, time left from the first on, no bar for a file."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from commands import STUDY
from rich.console import Console

from fedplan.federation.ledger.events import (
    ClientChanged,
    CommittedRound,
    Event,
    RoundStarted,
    RunStarted,
)
from fedplan.federation.ledger.status import RunStatus, SiteState, read_status
from fedplan.federation.ledger.stream import EventStream
from fedplan.reports.progress import run_with_progress, show_rounds
from fedplan.runners.simulation import Simulation
from fedplan.studies.schema import read_study


class Seen:
    """A subscriber that remembers the status after each client and round."""

    def __init__(self) -> None:
        self.clients = list[tuple[int, int, float | None]]()
        self.rounds = list[tuple[int, int, str]]()

    def __call__(self, event: Event, status: RunStatus) -> None:
        if isinstance(event, ClientChanged) and event.state == SiteState.RESPONDED:
            self.clients.append((status.responded, status.requested, status.seconds_left))
        if isinstance(event, CommittedRound):
            self.rounds.append((status.responded, status.requested, status.primary_metric))


def test_clients_are_counted_and_the_time_left_is_told_from_the_first_on(here: Path) -> None:
    seen = Seen()
    study = read_study(here / "study.toml", ["clients.dropout_fraction=0"])
    Simulation(study, here / "out", events=EventStream(here / "out", [seen])).run()
    counts = [(done, asked) for done, asked, _ in seen.clients]
    assert counts == [(1, 3), (2, 3), (3, 3)] * 3
    lefts = [left for *_, left in seen.clients]
    assert all(left is not None and left >= 0 for left in lefts)
    assert lefts[0] > 0 and lefts[-1] == 0, "the last client of the last round is the end"
    assert seen.rounds == [(0, 0, "accuracy")] * 3, "no round is open once it is closed"
    told = read_status(here / "out")
    assert told is not None and told.primary_metric == "accuracy"


@pytest.mark.parametrize("terminal", [True, False])
def test_a_bar_is_drawn_for_a_terminal_and_for_nobody_else(here: Path, terminal: bool) -> None:
    written = io.StringIO()
    console = Console(file=written, force_terminal=terminal, width=100, highlight=False)
    run_with_progress(
        read_study(here / "study.toml", ["train.rounds=1"]), here / "out", console=console
    )
    assert ("\x1b[" in written.getvalue()) == terminal
    assert (
        "clients" in written.getvalue()
        and "Scores are accuracy: higher is better." in written.getvalue()
    )


def test_the_bar_says_what_the_status_says() -> None:
    events, written = EventStream(), io.StringIO()
    console = Console(file=written, force_terminal=True, width=100)
    with show_rounds(events, console, 3, lambda closed: f"round {closed.round}") as bar:
        events.emit(RunStarted(RunStatus(rounds=3, round=1)))
        assert bar.tasks[0].completed == 1, "a resumed run, of sites as well"
        events.emit(RoundStarted(4))
        events.emit(ClientChanged("north", SiteState.RESPONDED))
        bar.refresh()
    assert "1 of 4 clients" in written.getvalue() and "left" in written.getvalue()
    assert STUDY
