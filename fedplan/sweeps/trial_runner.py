# SPDX-License-Identifier: Apache-2.0
"""Run one trial of a sweep, in this process or in a worker process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Protocol

from fedplan.errors import FedplanError
from fedplan.federation.ledger.status import read_stop_request
from fedplan.federation.ledger.stream import EventStream
from fedplan.reports.privacy_statements import write_privacy_statement
from fedplan.runners.simulation import Simulation
from fedplan.studies.resume import prepare_folder
from fedplan.studies.schema import Study
from fedplan.sweeps.records import TrialResult

LOG_FILE = "processes.log"
"""File in a sweep's folder with the output of its worker processes."""
SHUTDOWN_SECONDS = 20.0
"""Seconds that a worker process has to end after SIGTERM, before it is killed."""


class TrialRunner(Protocol):
    """Runs trials one after the other; call `close` at the end."""

    def run_trial(self, study: Study, folder: Path) -> TrialResult:
        """Run a study in a run folder to its end, or resume it there; errors go into the result."""
        ...

    def close(self) -> None:
        """Release all resources."""
        ...


class InProcessRunner:
    """Runs trials in this process."""

    def run_trial(self, study: Study, folder: Path) -> TrialResult:
        """Run or resume a study in a folder; an Exception becomes an error in the result."""
        start = time.monotonic()
        try:
            prepare_folder(folder, study, resume=True)
            simulation = Simulation(study, folder, events=EventStream(folder))
            stopped = simulation.run().stopped
            if study.privacy is not None:
                write_privacy_statement(folder)
            stop_requested = bool(stopped and read_stop_request(folder))
            return TrialResult(time.monotonic() - start, stopped, stop_requested)
        except Exception as error:
            return _failed_result(error, time.monotonic() - start)

    def close(self) -> None:
        """Do nothing."""


class SubprocessRunner:
    """Runs trials in a worker process, which the first trial starts and later trials use again.

    A worker that dies fails only the present trial; the next trial starts a new worker. `folder`:
    the sweep's folder, where the worker's output goes to LOG_FILE. `command`: the worker's command
    line. Call `close` at the end.
    """

    command: tuple[str, ...] = (sys.executable, "-P", "-m", "fedplan.sweeps.trial_process")

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[str] | None = None

    def run_trial(self, study: Study, folder: Path) -> TrialResult:
        """Run or resume a study in a run folder, in the worker; blocks until the trial has ended.

        Starts a worker if there is none. A worker that dies becomes an error in the result.
        """
        start = time.monotonic()
        if self._process is None:
            path = os.pathsep.join(filter(None, sys.path))
            with (self._folder / LOG_FILE).open("a") as log:
                self._process = subprocess.Popen(  # noqa: S603
                    self.command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env=os.environ | {"PYTHONPATH": path},
                    text=True,
                )
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        request = {"study": study.model_dump(mode="json"), "folder": str(folder)}
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            reply = process.stdout.readline()
        except OSError:
            reply = ""
        if reply:
            return TrialResult(**json.loads(reply))
        code = process.wait()
        self._forget(process)
        message = (
            f"its process ended with exit code {code}: see {self._folder / LOG_FILE}; "
            "exit code -9 often means that the machine ran out of memory"
        )
        return TrialResult(time.monotonic() - start, error=message)

    def close(self) -> None:
        """End the worker with SIGTERM, or kill it after SHUTDOWN_SECONDS.

        The worker's trial can be resumed. Does nothing without a worker.
        """
        if (process := self._process) is None:
            return
        process.terminate()
        try:
            process.wait(SHUTDOWN_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._forget(process)

    def _forget(self, process: subprocess.Popen[str]) -> None:
        """Close the pipes of an ended worker, so that the next trial starts a new one."""
        self._process = None
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(OSError):  # unsent data cannot be flushed
                    pipe.close()


def run_trial_request(line: str) -> str:
    """Run the trial in a JSON line of SubprocessRunner here; return the TrialResult as JSON.

    An invalid study gives a result with an error.
    """
    request = json.loads(line)
    try:
        study = Study.model_validate(request["study"])
    except Exception as error:
        return json.dumps(asdict(_failed_result(error, 0.0)))
    return json.dumps(asdict(InProcessRunner().run_trial(study, Path(request["folder"]))))


def _failed_result(error: Exception, seconds: float) -> TrialResult:
    """Return the result of a trial that failed with `error` after `seconds`.

    For an error other than FedplanError, the message has the error's class, and `traceback` is set.
    """
    if isinstance(error, FedplanError):
        return TrialResult(seconds, error=str(error))
    trace = "".join(traceback.format_exception(error))
    return TrialResult(seconds, error=f"{type(error).__name__}: {error}", traceback=trace)
