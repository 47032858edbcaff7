# SPDX-License-Identifier: Apache-2.0
"""Sweeps: run a study for all combinations of settings and seeds, in one resumable folder."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue
from statistics import mean
from typing import Any

from fedplan.federation.ledger.status import read_status
from fedplan.storage.files import wrap_disk_errors
from fedplan.storage.locks import locked_folder
from fedplan.studies.schema import ConfigError, Study
from fedplan.sweeps.records import (
    SweepSpec,
    TrialResult,
    make_sweep_spec,
    read_finished,
    start_sweep_folder,
    write_trial_results,
)
from fedplan.sweeps.settings import parse_seeds, parse_settings
from fedplan.sweeps.trial_runner import InProcessRunner, SubprocessRunner, TrialRunner
from fedplan.sweeps.trials import Trial, make_trials, read_base_study


@dataclass(frozen=True)
class Sweep:
    """The outcome of a sweep: the results of the trials that ran, by trial name.

    `folder`: the sweep's folder, with a run folder for each trial. `names`: all trials, also the
    ones that did not run.
    """

    folder: Path
    names: tuple[str, ...]
    results: Mapping[str, TrialResult]

    @property
    def folders(self) -> list[Path]:
        """The run folders of the finished trials."""
        return [self.folder / name for name in self.names if self._result(name).finished]

    @property
    def failures(self) -> dict[str, str]:
        """The error of each failed trial, by name."""
        return {name: r.error for name in self.names if (r := self._result(name)).error}

    @property
    def unfinished(self) -> list[str]:
        """The names of the trials that have yet to be run or resumed, failed ones included."""
        return [name for name in self.names if not self._result(name).finished]

    def _result(self, name: str) -> TrialResult:
        return self.results.get(name, TrialResult(stop_requested=True))


@dataclass(frozen=True)
class SweepEvent:
    """The end of one trial, and the progress of the sweep.

    `name`, `result`: of the trial. `ended` of `total` trials have ended; `seconds_left`: estimated
    time until all have.
    """

    name: str
    result: TrialResult
    ended: int
    total: int
    seconds_left: float

    def json(self) -> dict[str, Any]:
        """Return the event as plain values."""
        return {
            "name": self.name,
            "result": asdict(self.result),
            "ended": self.ended,
            "total": self.total,
            "seconds_left": self.seconds_left,
        }


class SweepProgress:
    """The progress of a running sweep: running trials, counts, and an estimate of the time left.

    `folder`: the sweep's folder. `remaining`: number of trials to run, `parallel` at once. `ended`:
    number of trials that an earlier call has finished. The sweep calls `start_trial` and
    `finish_trial`, from any thread.
    """

    def __init__(self, folder: Path, parallel: int, *, remaining: int, ended: int = 0) -> None:
        self.folder, self.parallel, self.ended = folder, parallel, ended
        self.total, self._waiting = ended + remaining, remaining
        self._running = dict[str, float]()
        self._durations = list[float]()
        self._lock = threading.Lock()

    def start_trial(self, name: str) -> None:
        """Record that a trial has started."""
        with self._lock:
            self._waiting -= 1
            self._running[name] = time.monotonic()

    def finish_trial(self, name: str, result: TrialResult) -> SweepEvent:
        """Record that the running trial `name` has ended with `result`, and return the event.

        Raises KeyError if the trial was not started.
        """
        with self._lock:
            del self._running[name]
            self.ended += 1
            if not result.error:
                self._durations.append(result.seconds)
        return SweepEvent(name, result, self.ended, self.total, self.seconds_left())

    @property
    def running(self) -> list[str]:
        """The names of the running trials."""
        return list(self._running)

    def seconds_left(self) -> float:
        """Estimate the seconds until the last trial ends, from durations and run statuses.

        Reads the status files of running trials. Returns 0 until a trial of this sweep has
        succeeded, or a running trial has reported the duration of its rounds.
        """
        statuses = [read_status(self.folder / name) for name in self.running]
        timed = [s for s in statuses if s is not None and s.round_seconds is not None]
        forecasts = [s.round_seconds * s.rounds for s in timed if s.round_seconds is not None]
        per_trial = mean(self._durations or forecasts or [0.0])
        running = sum(s.seconds_left or 0.0 for s in timed) + per_trial * (
            len(statuses) - len(timed)
        )
        at_once = max(1, min(self.parallel, self.total - self.ended))
        return (self._waiting * per_trial + running) / at_once


def sweep(
    study: Study | Path | str,
    settings: Mapping[str, Sequence[Any]] | Iterable[str] | None = None,
    *,
    folder: Path | str,
    seeds: str | int | Sequence[int] = 1,
    parallel: int = 1,
    on_trial_end: Callable[[SweepEvent], None] = lambda _: None,
    on_start: Callable[[SweepProgress], None] = lambda _: None,
) -> Sweep:
    """Run a study for each combination of settings and each seed, and return all results.

    `study`: a Study or a study file. `settings`: maps fields to values, as `{"method.name":
    ["fedavg", "fedper"]}`, or has texts as `method.name=fedavg,fedper`. `seeds`: a number of seeds,
    counted from the study's own, or a list. Each trial has its own run folder inside `folder`.
    Finished trials are not run again, stopped ones are resumed, and the error of a failed one is
    recorded while the others continue. `parallel`: number of processes that run trials, each with
    the study's threads; 1 runs trials here. `on_start` is called once before the first trial,
    `on_trial_end` after each. Blocks until all trials have ended. Raises ConfigError if an argument
    or a study is invalid, or if the folder has other files, and StoreError if another sweep runs in
    the folder.
    """
    if parallel < 1:
        raise ConfigError(f"parallel is {parallel}: give the number of runs at once, 1 or more")
    base, varied = read_base_study(study), parse_settings(settings)
    numbers = parse_seeds(seeds, base.seed)
    trials = make_trials(base, varied, numbers)
    return run_trials(
        Path(folder),
        trials,
        spec=make_sweep_spec(varied, numbers, trials),
        parallel=parallel,
        on_trial_end=on_trial_end,
        on_start=on_start,
    )


def run_trials(
    folder: Path,
    trials: Sequence[Trial],
    *,
    spec: SweepSpec | None = None,
    parallel: int = 1,
    on_trial_end: Callable[[SweepEvent], None] = lambda _: None,
    on_start: Callable[[SweepProgress], None] = lambda _: None,
) -> Sweep:
    """Run all unfinished trials, each in a subfolder of the trial's name, and return all results.

    Locks the folder against other sweeps, then writes `spec`, if given. A finished trial without a
    subfolder is run again. Results are written after each trial. `parallel`, `on_start` and
    `on_trial_end`: as of `sweep`. Raises ConfigError if the folder has another sweep, StoreError if
    another process has the lock.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        with wrap_disk_errors(f"{folder} cannot be locked", "name another folder"):
            stack.enter_context(locked_folder(folder))
        if spec is not None:
            start_sweep_folder(folder, spec)
        results = {n: r for n, r in read_finished(folder).items() if (folder / n).is_dir()}
        unfinished = [trial for trial in trials if trial.name not in results]
        ended = len(trials) - len(unfinished)
        progress = SweepProgress(folder, parallel, remaining=len(unfinished), ended=ended)
        on_start(progress)
        with closing(_trial_results(folder, unfinished, progress)) as coming:
            for name, result in coming:
                results[name] = result
                write_trial_results(folder, results)
                on_trial_end(progress.finish_trial(name, result))
    return Sweep(folder, tuple(trial.name for trial in trials), results)


def _trial_results(
    folder: Path, trials: Sequence[Trial], progress: SweepProgress
) -> Generator[tuple[str, TrialResult]]:
    """Run trials in subfolders of `folder`, and yield (name, result) of each as it ends.

    Trials run here, or in `progress.parallel` processes if there are two trials or more. Closing
    the generator early drops waiting trials and ends the processes.
    """
    if progress.parallel == 1 or len(trials) < 2:
        runner = InProcessRunner()
        for trial in trials:
            progress.start_trial(trial.name)
            yield trial.name, runner.run_trial(trial.study, folder / trial.name)
        return
    runners = [SubprocessRunner(folder) for _ in range(min(progress.parallel, len(trials)))]
    idle = SimpleQueue[TrialRunner]()
    for runner in runners:
        idle.put(runner)

    def run(trial: Trial) -> tuple[str, TrialResult]:
        runner = idle.get()
        progress.start_trial(trial.name)
        try:
            return trial.name, runner.run_trial(trial.study, folder / trial.name)
        finally:
            idle.put(runner)

    pool = ThreadPoolExecutor(len(runners), thread_name_prefix="sweep")
    try:
        for future in as_completed([pool.submit(run, trial) for trial in trials]):
            yield future.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for runner in runners:
            runner.close()
        pool.shutdown()
