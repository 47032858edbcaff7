# SPDX-License-Identifier: Apache-2.0
"""Run a study with progress in the terminal: a line per round, and a bar."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

from fedplan.federation.ledger.events import CommittedRound, Event, RunStarted
from fedplan.federation.ledger.status import RunState, RunStatus
from fedplan.federation.ledger.stream import EventStream
from fedplan.reports.formats import (
    duration,
    millions,
    round_heading,
    score_note,
    simulation_line,
    sites_line,
)
from fedplan.reports.monitoring import start_monitoring
from fedplan.reports.plan_warnings import RunWarning, warnings_text
from fedplan.reports.status import answered_text, write_summary
from fedplan.reports.study_explanation import write_privacy_statement
from fedplan.reports.study_warnings import NOTHING_RUN, refuse_warnings, study_warnings
from fedplan.runners.executors.executor import PoolConfig
from fedplan.runners.simulation import Simulation
from fedplan.studies.experiment import outline_agreement
from fedplan.studies.record import read_data_record
from fedplan.studies.run import read_run
from fedplan.studies.run_scores import CLIENT_TESTS, COMMON_TEST, score_rules
from fedplan.studies.schema import Study


class _ClientsColumn(ProgressColumn):
    """A column of a progress bar: the clients that have answered in the open round, time left."""

    def __init__(self, events: EventStream) -> None:
        super().__init__()
        self.events = events

    def render(self, task: Task) -> Text:
        """Return the text for the current status."""
        now = self.events.status
        texts = [answered_text(now)] if now.requested else []
        texts += [f"{duration(now.seconds_left)} left"] if now.seconds_left is not None else []
        return Text("  ".join(texts))


@contextmanager
def show_rounds(
    events: EventStream, console: Console, total: int, line: Callable[[CommittedRound], str]
) -> Generator[Progress]:
    """Print the `line` of each committed round in the body, below a bar if this is a terminal."""
    bar = Progress(
        TextColumn("round {task.completed}/{task.total}"),
        BarColumn(),
        _ClientsColumn(events),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    task = bar.add_task("", total=total)

    def show(event: Event, status: RunStatus) -> None:
        if isinstance(event, RunStarted | CommittedRound):
            bar.update(task, completed=status.round)
        if isinstance(event, CommittedRound):
            console.print(line(event))

    earlier = events.subscribers
    events.subscribe(show)
    try:
        with bar:
            yield bar
    finally:  # else `line` keeps the run, and the lock on its folder, alive
        events.subscribers = earlier


def run_with_progress(
    study: Study,
    folder: Path,
    *,
    earlier: str = "",
    metrics_port: int | None = None,
    workers: PoolConfig | None = None,
    devices_per_client: int = 1,
    console: Console | None = None,
    strict: bool = False,
) -> list[RunWarning]:
    """Simulate a study in a run folder, or resume the run there; print a line for each round.

    Blocks until the run has ended. `earlier`, `workers` and `devices_per_client` are passed to
    `Simulation`, and `metrics_port` to `start_monitoring`; `console` defaults to stdout. With
    differential privacy, writes and prints the privacy statement. Prints and returns the warnings
    of the run; those that are known before are printed before, and with `strict` raise
    FedplanError. Ctrl-C prints how to resume, and raises SystemExit(130).
    """
    console = console or Console(highlight=False)
    with start_monitoring(folder, metrics_port) as events:
        simulation = Simulation(
            study,
            folder,
            earlier_run=earlier,
            events=events,
            pool_config=workers,
            devices_per_client=devices_per_client,
        )
        federation = simulation.federation
        agreement, total = federation.agreement, study.train.rounds
        sizes = sorted(map(len, simulation.data.train.values()))
        rules = score_rules(read_run(folder))
        common = simulation.data.common_test is not None
        notes = (*simulation.data.notes, score_note(rules, COMMON_TEST if common else CLIENT_TESTS))
        console.print(
            f"[bold]{escape(study.name)}[/bold]  {escape(agreement.method.plan.text)}\n"
            f"{millions(sum(p.numel for p in agreement.params))} params, {len(sizes)} clients with "
            f"{sizes[0]} to {sizes[-1]} examples, seed {study.seed}, in {escape(str(folder))}"
            + "".join(f"\n{escape(note)}" for note in notes)
        )
        warnings = study_warnings(study, agreement, read_data_record(folder))
        _print_warnings(console, warnings)
        refuse_warnings(warnings if strict else (), NOTHING_RUN)
        console.print(f"\n[bold]{round_heading(rules)}[/bold]")

        def line(closed: CommittedRound) -> str:
            return simulation_line(closed.row, rules, federation.epsilon_spent)

        done = federation.global_state.round
        if done >= total:
            console.print(f"All {done} rounds were done before.", markup=False)
        try:
            with show_rounds(events, console, total, line):
                simulation.run()
        except KeyboardInterrupt:
            number = federation.global_state.round + 1
            resume = f"fedplan run --resume {folder}"
            console.print(f"Stopped in round {number}. To continue: {resume}", markup=False)
            raise SystemExit(130) from None
        if simulation.stopped:
            done = federation.global_state.round
            console.print(f"Stopped after round {done}: {simulation.stopped}.", markup=False)
        scores = rules.of_run(federation.server.history)
        for text in (f"Scores after round {scores.round}:", *scores.texts) if scores.scores else ():
            console.print(text, markup=False, soft_wrap=True)
        if study.privacy is not None:
            console.print(write_privacy_statement(folder).text(), markup=False, soft_wrap=True)
        end = "" if simulation.stopped else _end_text(events.status)
        console.print(f"{end}To check it: fedplan verify {folder}", markup=False)
    return _print_warnings(console, write_summary(folder))


def _print_warnings(console: Console, warnings: list[RunWarning]) -> list[RunWarning]:
    """Print and return warnings."""
    for text in warnings_text(warnings):
        console.print(text, soft_wrap=True)
    return warnings


def _end_text(status: RunStatus) -> str:
    """Return the sentence on the end of a run that has had all its rounds."""
    return f"Failed: {status.reason}. " if status.state == RunState.FAILED else "Done. "


def run_flower_with_progress(
    study: Study,
    folder: Path,
    *,
    server: Path,
    metrics_port: int | None = None,
    console: Console | None = None,
    strict: bool = False,
) -> list[RunWarning]:
    """Run a study on the sites of a Flower SuperLink; print a line for each round until the end.

    `folder` is the run's, `server` the federation's (with the SuperLink's address), in a folder
    with certificates that are checked for expiry. `metrics_port`, `console`, `strict` and the
    result are as in `run_with_progress`. Ctrl-C prints how to resume, and raises SystemExit(130).
    """
    from fedplan.runners.flower.superlink import read_superlink, run_on_superlink

    console = console or Console(highlight=False)

    def line(closed: CommittedRound) -> str:
        return sites_line(closed.record, closed.row, score_rules(read_run(folder)))

    console.print(f"{study.name}: study {study.full_digest[:12]}, in {folder}", markup=False)
    warnings = study_warnings(study, outline_agreement(study), read_data_record(folder))
    _print_warnings(console, warnings)
    refuse_warnings(warnings if strict else (), NOTHING_RUN)
    try:
        with (
            start_monitoring(folder, metrics_port, server.absolute().parent) as events,
            show_rounds(events, console, study.train.rounds, line),
        ):
            run_on_superlink(read_superlink(server), study, folder, events)
    except KeyboardInterrupt:
        console.print("Stopped. To continue: run the same command with --resume", markup=False)
        raise SystemExit(130) from None
    end = f"{_end_text(events.status)}To check it: fedplan verify {folder}"
    if events.stop_text:
        end = f"Stopped after round {events.status.round}: {events.stop_text}."
    console.print(end, markup=False)
    return _print_warnings(console, write_summary(folder))
