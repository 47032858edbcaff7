# SPDX-License-Identifier: Apache-2.0
"""Hands: who plays a run of a sweep, this process or one of its own."""

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
from fedplan.federation.states import read_asked
from fedplan.reports.preview import state
from fedplan.runners.door import run_study
from fedplan.studies.schema import Study
from fedplan.sweeps.records import End

LOG = "processes.log"
"""In a sweep's folder: what its processes printed."""
PATIENCE = 20.0
"""Seconds that a process has to end its run in order, once it is told to."""


class Runs(Protocol):
    """Plays one run after the other."""

    def play(self, study: Study, folder: Path) -> End:
        """Run a study in a folder, or go on with it there, to its end."""
        ...

    def close(self) -> None:
        """Let go of whatever is open."""
        ...


class ThisProcess:
    """This process plays: nothing is started for it."""

    def play(self, study: Study, folder: Path) -> End:
        """Run a study; whatever is wrong with one is no reason to stop the others."""
        began = time.monotonic()
        try:
            stopped = run_study(study, folder, resume=True).stopped
            if study.privacy is not None:
                state(folder)
            asked = bool(stopped and read_asked(folder))
            return End(time.monotonic() - began, stopped, asked)
        except Exception as error:
            return _failed(error, time.monotonic() - began)

    def close(self) -> None:
        """Nothing is open."""


class OwnProcess:
    """A process of its own plays: one that dies takes no other run with it."""

    command: tuple[str, ...] = (sys.executable, "-P", "-m", "fedplan.sweeps.child")

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[str] | None = None

    def play(self, study: Study, folder: Path) -> End:
        """Have it run a study; one that dies is an error, and another one is started."""
        began, process = time.monotonic(), self._alive()
        assert process.stdin is not None and process.stdout is not None
        said = {"study": study.model_dump(mode="json"), "folder": str(folder)}
        try:
            process.stdin.write(json.dumps(said) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except OSError:
            answer = ""
        if answer:
            return End(**json.loads(answer))
        code = process.wait()
        self._let_go(process)
        words = (
            f"its process ended by itself (code {code}): {self._folder / LOG} may say why; "
            "a machine without memory left kills with -9"
        )
        return End(time.monotonic() - began, error=words)

    def close(self) -> None:
        """End it as Ctrl-C does: its run can be gone on with."""
        if (process := self._process) is None:
            return
        process.terminate()
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._let_go(process)

    def _let_go(self, process: subprocess.Popen[str]) -> None:
        self._process = None
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(OSError):  # what was not yet sent is not sent
                    pipe.close()

    def _alive(self) -> subprocess.Popen[str]:
        if self._process is None:
            path = os.pathsep.join(filter(None, sys.path))
            with (self._folder / LOG).open("a") as log:
                self._process = subprocess.Popen(  # noqa: S603
                    self.command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env=os.environ | {"PYTHONPATH": path},
                    text=True,
                )
        return self._process


def answered(line: str) -> str:
    """What a process of its own answers to a line that it was sent."""
    said = json.loads(line)
    try:
        study = Study.model_validate(said["study"])
    except Exception as error:
        return json.dumps(asdict(_failed(error, 0.0)))
    return json.dumps(asdict(ThisProcess().play(study, Path(said["folder"]))))


def _failed(error: Exception, seconds: float) -> End:
    """An error of ours by its words; another one by its kind too, and where it came from."""
    words = str(error) if isinstance(error, FedplanError) else f"{type(error).__name__}: {error}"
    ours = isinstance(error, FedplanError)
    trace = "" if ours else "".join(traceback.format_exception(error))
    return End(seconds, error=words, trace=trace)
