# SPDX-License-Identifier: Apache-2.0
"""A sweep as a person follows it: a line for each run that ends, and a bar with the time left."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

from fedplan.reports.units import duration
from fedplan.sweeps.records import FAILURES
from fedplan.sweeps.sweeping import Course, News, Sweep, sweep
from fedplan.sweeps.trials import ground_of


class _Left(ProgressColumn):
    """The time left, by what the open runs tell of themselves."""

    max_refresh = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.course: Course | None = None

    def render(self, task: Task) -> Text:
        """It in words."""
        left = self.course.left() if self.course else 0.0
        open_ = ", ".join(self.course.running[:2]) if self.course else ""
        return Text(f"{duration(left)} left  {open_}" if left else open_)


def follow_sweep(
    study: Path, settings: Iterable[str], *, folder: Path | None, seeds: str, parallel: int
) -> Sweep:
    """Run a sweep, or go on with one, and tell its runs as they end."""
    console, left = Console(highlight=False, soft_wrap=True), _Left()
    place = folder or Path("sweeps") / ground_of(study).study({}).name
    words = TextColumn("run {task.completed}/{task.total}")
    with Progress(words, BarColumn(), left, console=console, transient=True) as bar:
        shown = bar.add_task("", total=None)

        def watch(course: Course) -> None:
            left.course = course
            before = f", of which {course.ended} ended before" if course.ended else ""
            console.print(f"{course.of} runs in {place}{before}", markup=False)
            bar.update(shown, total=course.of, completed=course.ended)

        def tell(news: News) -> None:
            bar.update(shown, completed=news.ended)
            console.print(line_of_news(news), markup=False)

        try:
            found = sweep(
                study, settings, folder=place, seeds=seeds, parallel=parallel,
                tell=tell, watch=watch,
            )  # fmt: skip
        except KeyboardInterrupt:
            console.print("Stopped. The same command goes on with it.", markup=False)
            raise SystemExit(130) from None
    console.print(_closing(found), markup=False)
    return found


def line_of_news(news: News) -> str:
    """A run that ended in one line."""
    end, wide = news.end, len(str(news.of))
    how = f"failed: {end.error.partition(chr(10))[0]}" if end.error else duration(end.seconds)
    why = f", stopped: {end.stopped}" if end.stopped else ""
    left = f", {duration(news.left)} left" if news.left and news.ended < news.of else ""
    return f"{news.ended:{wide}}/{news.of}  {news.name}  {how}{why}{left}"


def _closing(found: Sweep) -> str:
    if found.failures:
        return (
            f"{len(found.failures)} of {len(found.names)} runs failed: "
            f"{found.folder / FAILURES} says why; the same command tries them again"
        )
    if found.left:
        return f"{len(found.left)} runs were asked to stop: the same command goes on with them"
    return f"Done. Compare them: fedplan compare {found.folder}"
