# SPDX-License-Identifier: Apache-2.0
"""Sweeps: run a study for all combinations of settings and seeds, in one resumable folder."""

from __future__ import annotations

import signal
import time
import traceback
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from fedplan.errors import FedplanError
from fedplan.federation.aggregation.protocol import TensorsAndJson
from fedplan.federation.ledger.status import read_status, read_stop_request
from fedplan.federation.ledger.stream import EventStream
from fedplan.reports.study_explanation import write_privacy_statement
from fedplan.runners.executors.processes import ProcessTransport
from fedplan.runners.simulation import Simulation
from fedplan.storage.files import make_folder, wrap_disk_errors
from fedplan.storage.locks import locked_folder
from fedplan.studies.resume import prepare_folder
from fedplan.studies.run import read_run
from fedplan.studies.run_scores import RunScores, run_scores
from fedplan.studies.schema import Study
from fedplan.studies.section import ConfigError
from fedplan.sweeps.records import (
    FINISHED_FILE,
    SweepSpec,
    TrialResult,
    read_trial_results,
    start_sweep_folder,
    write_trial_results,
)
from fedplan.sweeps.trials import Trial, make_trials, parse_seeds, parse_settings, read_base_study
from fedplan.tensors.named import Tensors

LOG_FILE = "processes.log"
"""File in a sweep's folder with the output of its worker processes."""


@dataclass(frozen=True)
class Sweep:
    """The outcome of a sweep: the names of all trials, and the results of those that ran."""

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
    """The end of one trial of a sweep, its scores unless it failed, and the sweep's progress."""

    name: str
    result: TrialResult
    ended: int
    total: int
    seconds_left: float
    run_scores: RunScores | None = None

    def json(self) -> dict[str, Any]:
        """Return the event as plain values."""
        return asdict(self)


class SweepProgress:
    """The progress of a sweep: names of `running` trials, counts, and an estimate of the time left.

    `remaining`: number of trials to run, `parallel` at once. `ended`: number of trials that an
    earlier call has finished. Another thread may read it.
    """

    def __init__(self, folder: Path, parallel: int, *, remaining: int, ended: int = 0) -> None:
        self.folder, self.parallel, self.ended = folder, parallel, ended
        self.total, self._waiting = ended + remaining, remaining
        self.running: tuple[str, ...] = ()
        self._durations = list[float]()

    def start_trial(self, name: str) -> None:
        """Record that a trial has started."""
        self._waiting -= 1
        self.running = (*self.running, name)

    def finish_trial(
        self, name: str, result: TrialResult, scores: RunScores | None = None
    ) -> SweepEvent:
        """Record that the running trial `name` has ended with `result`, and return the event."""
        self.running = tuple(each for each in self.running if each != name)
        self.ended += 1
        if not result.error:
            self._durations.append(result.seconds)
        return SweepEvent(name, result, self.ended, self.total, self.seconds_left(), scores)

    def seconds_left(self) -> float:
        """Estimate the seconds until the last trial ends; 0 until a trial or a round has ended."""
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
    spec = SweepSpec(
        {setting.field: list(setting.values) for setting in varied},
        list(numbers),
        {trial.name: trial.study.full_digest for trial in trials},
    )
    return run_trials(
        Path(folder),
        trials,
        spec=spec,
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
    """Run all unfinished trials, each in a subfolder of its name, as of `sweep`.

    Locks the folder, then writes `spec`, if given. A finished trial without a subfolder is run
    again. Raises ConfigError if the folder has another sweep, StoreError if another process has the
    lock.
    """
    make_folder(folder)
    with ExitStack() as stack:
        with wrap_disk_errors(f"{folder} cannot be locked", "name another folder"):
            stack.enter_context(locked_folder(folder))
        if spec is not None:
            start_sweep_folder(folder, spec)
        finished = read_trial_results(folder / FINISHED_FILE)
        results = {name: result for name, result in finished.items() if (folder / name).is_dir()}
        unfinished = [trial for trial in trials if trial.name not in results]
        ended = len(trials) - len(unfinished)
        progress = SweepProgress(folder, parallel, remaining=len(unfinished), ended=ended)
        on_start(progress)
        with closing(_trial_results(folder, unfinished, progress)) as coming:
            for name, result in coming:
                results[name] = result
                write_trial_results(folder, results)
                scores = None
                if not result.error:
                    with suppress(FedplanError):  # an unreadable run must not end the sweep
                        scores = run_scores(read_run(folder / name))
                on_trial_end(progress.finish_trial(name, result, scores))
    return Sweep(folder, tuple(trial.name for trial in trials), results)


class TrialHandler:
    """Runs trials in a worker process; SIGTERM stops a trial so that it can be resumed."""

    def __init__(self) -> None:
        signal.signal(signal.SIGTERM, signal.default_int_handler)

    def reply(self, message: dict[str, Any], tensors: Tensors) -> TensorsAndJson:
        """Run the study in `message` in its folder; return the TrialResult's fields."""
        study = Study.model_validate(message["study"])
        return {}, asdict(run_trial(study, Path(message["folder"])))


def _trial_results(
    folder: Path, trials: Sequence[Trial], progress: SweepProgress
) -> Generator[tuple[str, TrialResult]]:
    """Run trials in subfolders of `folder`, and yield (name, result) of each as it ends.

    Trials run here, or in `progress.parallel` processes if there are two trials or more; a process
    that dies fails its trial. Closing the generator early ends the processes.
    """
    if progress.parallel == 1 or len(trials) < 2:
        for trial in trials:
            progress.start_trial(trial.name)
            yield trial.name, run_trial(trial.study, folder / trial.name)
        return
    count = min(progress.parallel, len(trials))
    idle, waiting = list(range(count)), list(reversed(trials))
    running = dict[int, tuple[str, float]]()
    with closing(ProcessTransport(count, TrialHandler, folder / LOG_FILE)) as transport:
        while waiting or running:
            while waiting and idle:
                number, trial = idle.pop(), waiting.pop()
                study, place = trial.study.model_dump(mode="json"), str(folder / trial.name)
                progress.start_trial(trial.name)
                running[number] = trial.name, time.monotonic()
                send = transport.send if number in transport.pids else transport.start
                send(number, {"study": study, "folder": place})
            for number, reply in transport.receive(timeout=1.0):
                name, start = running.pop(number)
                idle.append(number)
                fields: dict[str, Any] = {"seconds": time.monotonic() - start}
                if reply is not None:
                    fields |= reply[1]
                else:
                    fields["error"] = (
                        f"its process ended with exit code {transport.exit_codes[number]}: see "
                        f"{folder / LOG_FILE}; exit code -9 often means that the machine ran out "
                        "of memory"
                    )
                yield name, TrialResult(**fields)


def run_trial(study: Study, folder: Path) -> TrialResult:
    """Run or resume a study in a folder, in this process; an Exception becomes a result's error."""
    start = time.monotonic()
    try:
        prepare_folder(folder, study, resume=True)
        stopped = Simulation(study, folder, events=EventStream(folder)).run().stopped
        if study.privacy is not None:
            write_privacy_statement(folder)
        stop_requested = bool(stopped and read_stop_request(folder))
        return TrialResult(time.monotonic() - start, stopped, stop_requested)
    except FedplanError as error:
        return TrialResult(time.monotonic() - start, error=str(error))
    except Exception as error:
        message, trace = f"{type(error).__name__}: {error}", traceback.format_exc()
        return TrialResult(time.monotonic() - start, error=message, traceback=trace)
