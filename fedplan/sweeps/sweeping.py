# SPDX-License-Identifier: Apache-2.0
"""Sweeps: a study over settings and seeds, a run each, in one folder that can be gone on with."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from statistics import mean
from typing import Any

from fedplan.federation.states import read_status
from fedplan.storage.errors import explained
from fedplan.storage.locks import alone
from fedplan.studies.schema import ConfigError, Study
from fedplan.sweeps.hands import OwnProcess, Runs, ThisProcess
from fedplan.sweeps.records import Asked, End, asked_of, begin, read_ends, write_ends
from fedplan.sweeps.settings import seeds_of, settings_of
from fedplan.sweeps.trials import Trial, ground_of, trials_of


@dataclass(frozen=True)
class Sweep:
    """A sweep as its folder holds it: all of its runs, and how those ended that were played."""

    folder: Path
    names: tuple[str, ...]
    ends: Mapping[str, End]

    @property
    def folders(self) -> list[Path]:
        """The folders of the runs that ended as they should."""
        return [self.folder / name for name in self.names if self._end(name).done]

    @property
    def failures(self) -> dict[str, str]:
        """The runs that failed, each with its error."""
        return {name: e.error for name in self.names if (e := self._end(name)).error}

    @property
    def left(self) -> list[str]:
        """The runs that are to be played or gone on with."""
        return [name for name in self.names if not self._end(name).done]

    def _end(self, name: str) -> End:
        return self.ends.get(name, End(asked=True))


@dataclass(frozen=True)
class News:
    """What is told of a sweep when one of its runs ends: which, how, and how many ended of all.

    `left` are the seconds until the last of them ends, at the pace so far.
    """

    name: str
    end: End
    ended: int
    of: int
    left: float


class Course:
    """A sweep while it is played: which runs are at it, and how long those took that ended."""

    def __init__(self, folder: Path, parallel: int, *, todo: int, ended: int = 0) -> None:
        self.folder, self.parallel, self.ended = folder, parallel, ended
        self.of, self._waiting = ended + todo, todo
        self._running = dict[str, float]()
        self._took = list[float]()
        self._lock = threading.Lock()

    def begun(self, name: str) -> None:
        """Say that a run is at it."""
        with self._lock:
            self._waiting -= 1
            self._running[name] = time.monotonic()

    def over(self, name: str, end: End) -> News:
        """Say that a run ended."""
        with self._lock:
            del self._running[name]
            self.ended += 1
            if not end.error:
                self._took.append(end.seconds)
        return News(name, end, self.ended, self.of, self.left())

    @property
    def running(self) -> list[str]:
        """The runs that are at it."""
        return list(self._running)

    def left(self) -> float:
        """Seconds until the last run ends: by those that ended, and by what open ones say."""
        statuses = [read_status(self.folder / name) for name in self.running]
        told = [s for s in statuses if s is not None and s.seconds is not None]
        whole = [s.seconds * s.rounds for s in told if s.seconds is not None]
        each = mean(self._took or whole or [0.0])
        open_ = sum(s.left or 0.0 for s in told) + each * (len(statuses) - len(told))
        return (self._waiting * each + open_) / max(1, min(self.parallel, self.of - self.ended))


def sweep(
    study: Study | Path | str,
    settings: Mapping[str, Sequence[Any]] | Iterable[str] | None = None,
    *,
    folder: Path | str,
    seeds: str | int | Sequence[int] = 1,
    parallel: int = 1,
    tell: Callable[[News], None] = lambda _: None,
    watch: Callable[[Course], None] = lambda _: None,
) -> Sweep:
    """Run a study for each combination of settings and each seed, a folder each within one folder.

    `settings` are fields with their values: `{"method.name": ["fedavg", "fedper"]}`. `seeds` says
    how many, from the study's own on, or lists them. A run that ended is not run again, and one
    that did not goes on. One that fails is kept apart with its error, and the others go on. With
    `parallel` above 1 so many processes play runs, each with the study's threads. `tell` is told of
    each run that ends, and `watch` is given the course of the sweep before the first one.
    """
    if parallel < 1:
        raise ConfigError(f"parallel is {parallel}: say how many runs at once, 1 or more")
    ground, varied = ground_of(study), settings_of(settings)
    numbers = seeds_of(seeds, ground.seed)
    trials = trials_of(ground, varied, numbers)
    asked = asked_of(varied, numbers, trials)
    return played(Path(folder), trials, asked=asked, parallel=parallel, tell=tell, watch=watch)


def played(
    folder: Path,
    trials: Sequence[Trial],
    *,
    asked: Asked | None = None,
    parallel: int = 1,
    tell: Callable[[News], None] = lambda _: None,
    watch: Callable[[Course], None] = lambda _: None,
) -> Sweep:
    """Play all trials that have not ended, each in a folder under its name.

    What was `asked` is written down once no other sweep is at the folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with _claimed(folder):
        if asked is not None:
            begin(folder, asked)
        # Whoever removed a run's folder wants it anew.
        ends = {n: end for n, end in read_ends(folder).items() if (folder / n).is_dir()}
        todo = [trial for trial in trials if trial.name not in ends]
        course = Course(folder, parallel, todo=len(todo), ended=len(trials) - len(todo))
        watch(course)
        with closing(_ends(folder, todo, course)) as coming:
            for name, end in coming:
                ends[name] = end
                write_ends(folder, ends)
                tell(course.over(name, end))
    return Sweep(folder, tuple(trial.name for trial in trials), ends)


@contextmanager
def _claimed(folder: Path) -> Generator[None]:
    """Keep other sweeps out of a folder."""
    with ExitStack() as held:
        with explained(f"{folder} cannot be claimed", "name another folder"):
            held.enter_context(alone(folder))
        yield


def _ends(folder: Path, trials: Sequence[Trial], course: Course) -> Generator[tuple[str, End]]:
    """Each trial's end, as it comes."""
    if course.parallel == 1 or len(trials) < 2:
        here = ThisProcess()
        for trial in trials:
            course.begun(trial.name)
            yield trial.name, here.play(trial.study, folder / trial.name)
        return
    hands = [OwnProcess(folder) for _ in range(min(course.parallel, len(trials)))]
    free = SimpleQueue[Runs]()
    for hand in hands:
        free.put(hand)

    def play(trial: Trial) -> tuple[str, End]:
        hand = free.get()
        course.begun(trial.name)
        try:
            return trial.name, hand.play(trial.study, folder / trial.name)
        finally:
            free.put(hand)

    with _crew(hands) as pool:
        for each in as_completed([pool.submit(play, trial) for trial in trials]):
            yield each.result()


@contextmanager
def _crew(hands: Sequence[Runs]) -> Generator[ThreadPoolExecutor]:
    """A thread for each hand; whoever leaves early ends the runs that are open."""
    pool = ThreadPoolExecutor(len(hands), thread_name_prefix="sweep")
    try:
        yield pool
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for hand in hands:
            hand.close()
        pool.shutdown()
