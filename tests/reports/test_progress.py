# SPDX-License-Identifier: Apache-2.0
"""Progress within a round: clients done of all, time left from the first on, no bar for a file."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from commands import STUDY
from rich.console import Console

from fedplan.federation.callbacks import CommittedRound
from fedplan.federation.run_states import SiteState, read_status
from fedplan.federation.status import StatusReporter
from fedplan.reports.progress import progress_bar, run_with_progress
from fedplan.runners.simulation import Simulation
from fedplan.studies.schema import read_study


class Heard(StatusReporter):
    """A status that remembers what it was after each client."""

    def set_site_state(self, name: str, state: str, reason: str = "") -> None:
        super().set_site_state(name, state, reason)
        if state == SiteState.RESPONDED:
            self.seen.append(
                (self.current.responded, self.current.requested, self.current.seconds_left)
            )

    def record_round(self, closed: CommittedRound) -> None:
        super().record_round(closed)
        self.rounds.append(
            (self.current.responded, self.current.requested, self.current.primary_metric)
        )


def test_clients_are_counted_and_the_time_left_is_told_from_the_first_on(here: Path) -> None:
    status = Heard(here / "out")
    status.seen, status.rounds = [], []
    Simulation(
        read_study(here / "study.toml", ["clients.dropout_fraction=0"]), here / "out", status=status
    ).run()
    counts = [(done, asked) for done, asked, _ in status.seen]
    assert counts == [(1, 3), (2, 3), (3, 3)] * 3
    lefts = [left for *_, left in status.seen]
    assert all(left is not None and left >= 0 for left in lefts)
    assert lefts[0] > 0 and lefts[-1] == 0, "the last client of the last round is the end"
    assert status.rounds == [(0, 0, "accuracy")] * 3, "no round is open once it is closed"
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
    status, written = StatusReporter(), io.StringIO()
    console = Console(file=written, force_terminal=True, width=100)
    with progress_bar(status, console) as bar:
        bar.add_task("", total=3, completed=1)
        status.open_round(4)
        status._update(rounds=3, round=1)
        status.set_site_state("north", SiteState.RESPONDED)
        bar.refresh()
    assert "1 of 4 clients" in written.getvalue() and "left" in written.getvalue()
    assert STUDY
