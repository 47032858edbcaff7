# SPDX-License-Identifier: Apache-2.0
"""Progress: a run as a person follows it, and stops it."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from fedplan.federation.callbacks import Closed
from fedplan.reports.lines import HEADING, line_of, line_of_sites
from fedplan.reports.operation import Operation, operated
from fedplan.reports.preview import state
from fedplan.reports.units import millions
from fedplan.runners.crews.workers import Workers
from fedplan.runners.simulation import Simulation
from fedplan.studies.schema import Study


def follow(
    study: Study,
    folder: Path,
    *,
    earlier: str = "",
    operation: Operation | None = None,
    workers: Workers | None = None,
) -> None:
    """Run a study, or go on with one, and tell its rounds as they close."""
    with operated(folder, operation or Operation()) as status:
        _follow(Simulation(study, folder, earlier=earlier, status=status, workers=workers))


def _follow(simulation: Simulation) -> None:
    console, study, folder = Console(highlight=False), simulation.study, simulation.folder
    console.print(f"{_opening(simulation, folder)}\n\n[bold]{HEADING}[/bold]")
    bar = Progress(
        TextColumn("round {task.completed}/{task.total}"),
        BarColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )
    with bar:
        shown = bar.add_task(
            "", total=study.train.rounds, completed=simulation.federation.world.round
        )

        try:
            for closed in simulation.rounds():
                bar.update(shown, completed=closed.round)
                console.print(line_of(closed.row, simulation.federation.spent))
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
    done = "" if simulation.stopped else "Done. "
    console.print(f"{done}Check it: fedplan verify {folder}", markup=False)


def follow_flower(
    study: Study, folder: Path, *, server: Path, operation: Operation | None = None
) -> None:
    """Carry a study to the sites of a federation, and tell its rounds as they close."""
    from fedplan.runners.flower.driver import drive
    from fedplan.runners.flower.link import link_in

    console = Console(highlight=False)

    def tell(closed: Closed) -> None:
        console.print(line_of_sites(closed.whole, closed.row))

    console.print(f"{study.name}: study {study.whole[:12]}, in {folder}", markup=False)
    try:
        with operated(folder, operation or Operation()) as status:
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
    sizes = sorted(len(held) for held in rows.values())
    return (
        f"[bold]{escape(simulation.study.name)}[/bold]  {escape(agreement.method.plan.text)}\n"
        f"{millions(sum(p.numel for p in agreement.params))} params, {len(rows)} clients with "
        f"{sizes[0]} to {sizes[-1]} rows, seed {simulation.study.seed}, in {escape(str(folder))}"
        + "".join(f"\n{escape(note)}" for note in simulation.shares.notes)
    )
