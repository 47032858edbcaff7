# SPDX-License-Identifier: Apache-2.0
"""Progress: a run as a person follows it, and stops it."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

from fedplan.federation.callbacks import Closed
from fedplan.federation.status import Status
from fedplan.reports.lines import HEADING, line_of, line_of_sites, unit
from fedplan.reports.operation import Operation, operated
from fedplan.reports.preview import state
from fedplan.reports.status import clients
from fedplan.reports.units import duration, millions
from fedplan.runners.crews.workers import Workers
from fedplan.runners.simulation import Simulation
from fedplan.studies.schema import Study


class _Clients(ProgressColumn):
    """How many clients of the open round are done, and how long the run has to go at that pace."""

    def __init__(self, status: Status) -> None:
        super().__init__()
        self.status = status

    def render(self, task: Task) -> Text:
        """What the driver of the run tells right now."""
        now = self.status.now
        words = [clients(now)] if now.asked else []
        words += [f"{duration(now.left)} left"] if now.left is not None else []
        return Text("  ".join(words))


def follow(
    study: Study,
    folder: Path,
    *,
    earlier: str = "",
    operation: Operation | None = None,
    workers: Workers | None = None,
    console: Console | None = None,
) -> None:
    """Run a study, or go on with one, and tell its rounds as they close."""
    with operated(folder, operation or Operation()) as status:
        made = Simulation(study, folder, earlier=earlier, status=status, workers=workers)
        _follow(made, console or Console(highlight=False))


def bar_of(status: Status, console: Console) -> Progress:
    """The bar under the rounds, which goes on within one; where nobody looks there is none."""
    return Progress(
        TextColumn("round {task.completed}/{task.total}"),
        BarColumn(),
        _Clients(status),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def _follow(simulation: Simulation, console: Console) -> None:
    study, folder = simulation.study, simulation.folder
    console.print(f"{_opening(simulation, folder)}\n\n[bold]{HEADING}[/bold]")
    primary = simulation.scoring.primary
    with bar_of(simulation.status, console) as bar:
        done = simulation.federation.world.round
        shown = bar.add_task("", total=study.train.rounds, completed=done)
        try:
            for closed in simulation.rounds():
                bar.update(shown, completed=closed.round)
                console.print(line_of(closed.row, simulation.federation.spent, primary=primary))
        except KeyboardInterrupt:
            done = simulation.federation.world.round
            again = f"fedplan run --resume {folder}"
            console.print(f"Stopped in round {done + 1}. Go on: {again}", markup=False)
            raise SystemExit(130) from None
    if simulation.stopped:
        console.print(
            f"Stopped after round {simulation.federation.world.round}: {simulation.stopped}.",
            markup=False,
        )
    if study.privacy is not None:
        console.print(state(folder).text(), markup=False, soft_wrap=True)
    ended = "" if simulation.stopped else "Done. "
    console.print(f"{ended}Check it: fedplan verify {folder}", markup=False)


def follow_flower(
    study: Study,
    folder: Path,
    *,
    server: Path,
    operation: Operation | None = None,
    console: Console | None = None,
) -> None:
    """Carry a study to the sites of a federation, and tell its rounds as they close."""
    from fedplan.runners.flower.driver import drive
    from fedplan.runners.flower.link import link_in

    console, operation = console or Console(highlight=False), operation or Operation()

    console.print(f"{study.name}: study {study.whole[:12]}, in {folder}", markup=False)
    try:
        with operated(folder, operation) as status, bar_of(status, console) as bar:
            shown = bar.add_task("", total=study.train.rounds)

            def tell(closed: Closed) -> None:
                bar.update(shown, completed=closed.round)
                console.print(line_of_sites(closed.whole, closed.row, primary=closed.primary))

            drive(link_in(server), study, folder, [tell], status)
    except KeyboardInterrupt:
        console.print("Stopped. Go on with it: the same command with --resume", markup=False)
        raise SystemExit(130) from None
    if status.stopped:
        console.print(f"Stopped after round {status.now.round}: {status.stopped}.", markup=False)
        return
    console.print(f"Done. Check it: fedplan verify {folder}", markup=False)


def _opening(simulation: Simulation, folder: Path) -> str:
    agreement, rows = simulation.federation.agreement, simulation.shares.train
    sizes, scoring = sorted(len(held) for held in rows.values()), simulation.scoring
    return (
        f"[bold]{escape(simulation.study.name)}[/bold]  {escape(agreement.method.plan.text)}\n"
        f"{millions(sum(p.numel for p in agreement.params))} params, {len(rows)} clients with "
        f"{sizes[0]} to {sizes[-1]} rows, seed {simulation.study.seed}, in {escape(str(folder))}"
        + "".join(f"\n{escape(note)}" for note in simulation.shares.notes)
        + f"\n{unit(scoring.primary, scoring.higher)}"
    )
