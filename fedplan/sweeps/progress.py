# SPDX-License-Identifier: Apache-2.0
"""Terminal output of a running sweep: a line for each trial, and a progress bar."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

from fedplan.errors import FedplanError
from fedplan.reports.formats import duration
from fedplan.sweeps.comparisons import compare
from fedplan.sweeps.records import FAILURES_FILE
from fedplan.sweeps.sweeping import Sweep, SweepEvent, SweepProgress, sweep
from fedplan.sweeps.trials import read_base_study


class _TimeLeftColumn(ProgressColumn):
    """Column with the estimated time left and the names of at most two running trials."""

    max_refresh = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.progress: SweepProgress | None = None

    def render(self, task: Task) -> Text:
        """Return the text of the column; empty before the sweep has set `progress`."""
        if self.progress is None:
            return Text()
        seconds, running = self.progress.seconds_left(), ", ".join(self.progress.running[:2])
        return Text(f"{duration(seconds)} left  {running}" if seconds else running)


def sweep_with_progress(
    study: Path, settings: Iterable[str], *, folder: Path | None, seeds: str, parallel: int
) -> Sweep:
    """Run or resume a sweep, and print a line for each trial and a progress bar to the terminal.

    Raises as `sweep`; Ctrl-C raises SystemExit(130).
    """
    console, time_left = Console(highlight=False, soft_wrap=True), _TimeLeftColumn()
    sweep_folder = folder or Path("sweeps") / read_base_study(study).with_changes({}).name
    count = TextColumn("run {task.completed}/{task.total}")
    with Progress(count, BarColumn(), time_left, console=console, transient=True) as bar:
        bar_task = bar.add_task("", total=None)

        def on_start(progress: SweepProgress) -> None:
            time_left.progress = progress
            ended = f", of which {progress.ended} ended before" if progress.ended else ""
            console.print(f"{progress.total} runs in {sweep_folder}{ended}", markup=False)
            bar.update(bar_task, total=progress.total, completed=progress.ended)

        def on_trial_end(event: SweepEvent) -> None:
            bar.update(bar_task, completed=event.ended)
            console.print(event_line(event), markup=False)

        try:
            result = sweep(
                study, settings, folder=sweep_folder, seeds=seeds, parallel=parallel,
                on_trial_end=on_trial_end, on_start=on_start,
            )  # fmt: skip
        except KeyboardInterrupt:
            console.print("Stopped. The same command resumes the sweep.", markup=False)
            raise SystemExit(130) from None
    for line in choice_lines(result):
        console.print(line, markup=False)
    closing = f"Done. Compare the runs: fedplan compare {result.folder}"
    if result.failures:
        closing = (
            f"{len(result.failures)} of {len(result.names)} runs failed: see "
            f"{result.folder / FAILURES_FILE}; the same command tries them again"
        )
    elif result.unfinished:
        closing = f"{len(result.unfinished)} runs were stopped: the same command resumes them"
    console.print(closing, markup=False)
    return result


def choice_lines(result: Sweep) -> list[str]:
    """Return which setting is best by each score that all runs have, and on which examples."""
    try:
        comparison = compare([result.folder])
    except FedplanError:
        return []
    every = (comparison, *comparison.others)
    return [f"By {each.score}, {each.choice}." for each in every if each.choice]


def event_line(event: SweepEvent) -> str:
    """Return one line about the end of a trial: ` 2/10  seed=1  personal accuracy 0.8  12 s`."""
    result, width = event.result, len(str(event.total))
    first_line = result.error.partition("\n")[0]
    outcome = f"failed: {first_line}" if result.error else duration(result.seconds)
    stopped = f", stopped: {result.stop_reason}" if result.stop_reason else ""
    more = event.seconds_left and event.ended < event.total
    left = f", {duration(event.seconds_left)} left" if more else ""
    scores = event.run_scores.scores if event.run_scores else ()
    text = ", ".join(f"{score.label} {score.number}" for score in scores)
    text = f"{text}  " if text else ""
    return f"{event.ended:{width}}/{event.total}  {event.name}  {text}{outcome}{stopped}{left}"
