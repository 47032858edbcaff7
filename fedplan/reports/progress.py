# SPDX-License-Identifier: Apache-2.0
"""Run a study with progress in the terminal: a line per round, and a bar."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

from fedplan.federation.callbacks import CommittedRound
from fedplan.federation.status import StatusReporter
from fedplan.reports.monitoring import MonitoringConfig, start_monitoring
from fedplan.reports.privacy_statements import write_privacy_statement
from fedplan.reports.round_lines import HEADING, score_note, simulation_line, sites_line
from fedplan.reports.status import answered_text
from fedplan.reports.units import duration, millions
from fedplan.runners.executors.config import PoolConfig
from fedplan.runners.simulation import Simulation
from fedplan.studies.schema import Study


class _ClientsColumn(ProgressColumn):
    """A column of a progress bar: the clients that have answered in the open round, the time left.

    Reads the current status of the run from `status` whenever the bar is drawn.
    """

    def __init__(self, status: StatusReporter) -> None:
        super().__init__()
        self.status = status

    def render(self, task: Task) -> Text:
        """Return the text for the current status."""
        now = self.status.current
        texts = [answered_text(now)] if now.requested else []
        texts += [f"{duration(now.seconds_left)} left"] if now.seconds_left is not None else []
        return Text("  ".join(texts))


def run_with_progress(
    study: Study,
    folder: Path,
    *,
    earlier: str = "",
    monitoring: MonitoringConfig | None = None,
    workers: PoolConfig | None = None,
    console: Console | None = None,
) -> None:
    """Simulate a study in a run folder, or resume the run there; print a line for each round.

    Blocks until the run has ended. `earlier` is passed to `Simulation`; `monitoring` is off and
    `workers` (worker processes) are none by default; `console` defaults to stdout. Ctrl-C prints
    how to resume, and raises SystemExit(130).
    """
    with start_monitoring(folder, monitoring or MonitoringConfig()) as status:
        simulation = Simulation(
            study, folder, earlier_run=earlier, status=status, pool_config=workers
        )
        _show_progress(simulation, console or Console(highlight=False))


def progress_bar(status: StatusReporter, console: Console) -> Progress:
    """Return a bar of rounds, with the clients of the open round from `status`.

    Use the bar as a context manager. Nothing is shown if the console is no terminal.
    """
    return Progress(
        TextColumn("round {task.completed}/{task.total}"),
        BarColumn(),
        _ClientsColumn(status),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def _show_progress(simulation: Simulation, console: Console) -> None:
    """Run a simulation to the end; print a heading, a line for each round, and how the run ended.

    With differential privacy, writes and prints the privacy statement. Ctrl-C prints how to resume,
    and raises SystemExit(130).
    """
    study, folder, scoring = simulation.study, simulation.folder, simulation.scoring
    agreement = simulation.federation.agreement
    sizes = sorted(map(len, simulation.data.train.values()))
    notes = (*simulation.data.notes, score_note(scoring.primary, scoring.higher_is_better))
    console.print(
        f"[bold]{escape(study.name)}[/bold]  {escape(agreement.method.plan.text)}\n"
        f"{millions(sum(p.numel for p in agreement.params))} params, {len(sizes)} clients with "
        f"{sizes[0]} to {sizes[-1]} examples, seed {study.seed}, in {escape(str(folder))}"
        + "".join(f"\n{escape(note)}" for note in notes)
        + f"\n\n[bold]{HEADING}[/bold]"
    )
    with progress_bar(simulation.status, console) as bar:
        done = simulation.federation.global_state.round
        if done >= study.train.rounds:
            console.print(f"All {done} rounds were done before.", markup=False)
        task = bar.add_task("", total=study.train.rounds, completed=done)
        try:
            for closed in simulation.rounds():
                bar.update(task, completed=closed.round)
                spent = simulation.federation.epsilon_spent
                console.print(simulation_line(closed.row, spent, primary=scoring.primary))
        except KeyboardInterrupt:
            number = simulation.federation.global_state.round + 1
            resume = f"fedplan run --resume {folder}"
            console.print(f"Stopped in round {number}. To continue: {resume}", markup=False)
            raise SystemExit(130) from None
    if simulation.stopped:
        done = simulation.federation.global_state.round
        console.print(f"Stopped after round {done}: {simulation.stopped}.", markup=False)
    if study.privacy is not None:
        console.print(write_privacy_statement(folder).text(), markup=False, soft_wrap=True)
    done = "" if simulation.stopped else "Done. "
    console.print(f"{done}To check it: fedplan verify {folder}", markup=False)


def run_flower_with_progress(
    study: Study,
    folder: Path,
    *,
    server: Path,
    monitoring: MonitoringConfig | None = None,
    console: Console | None = None,
) -> None:
    """Run a study on the sites of a Flower SuperLink; print a line for each round until the end.

    `folder` is the run's, `server` the federation's (with the SuperLink's address); `monitoring` is
    off and `console` is stdout by default. Ctrl-C prints how to resume, and raises SystemExit(130).
    """
    from fedplan.runners.flower.superlink import read_superlink
    from fedplan.runners.flower.superlink_run import run_on_superlink

    console, monitoring = console or Console(highlight=False), monitoring or MonitoringConfig()

    console.print(f"{study.name}: study {study.full_digest[:12]}, in {folder}", markup=False)
    try:
        with start_monitoring(folder, monitoring) as status, progress_bar(status, console) as bar:
            task = bar.add_task("", total=study.train.rounds)

            def show_round(closed: CommittedRound) -> None:
                bar.update(task, completed=closed.round)
                console.print(sites_line(closed.record, closed.row, primary=closed.primary))

            run_on_superlink(read_superlink(server), study, folder, [show_round], status)
    except KeyboardInterrupt:
        console.print("Stopped. To continue: run the same command with --resume", markup=False)
        raise SystemExit(130) from None
    end = f"Done. To check it: fedplan verify {folder}"
    if status.stop_text:
        end = f"Stopped after round {status.current.round}: {status.stop_text}."
    console.print(end, markup=False)
