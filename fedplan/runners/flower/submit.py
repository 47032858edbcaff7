# SPDX-License-Identifier: Apache-2.0
"""Submitting: an app is handed to a SuperLink, followed, and handed in again if it was killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fedplan.errors import FedplanError
from fedplan.federation.record import ROUND
from fedplan.storage.lines import read_lines

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}
"""Flower calls home, looks for updates and installs what an app names, unless it is told not to."""

FAULT = "fault.txt"
"""In a run's folder: why its server stopped, if it stopped by itself."""

TRIES = 10
LOOK, SELDOM = 1.0, 15.0
"""Seconds between two looks into the folder, and between two questions to the SuperLink."""

Tell = Callable[[dict[str, Any]], None]


def submit(app: Path, folder: Path, tell: Tell, *, link: str = "", rounds: int = 0) -> None:
    """Run an app of so many rounds to its end, in a folder of the server's machine.

    A server that is killed is started again, and goes on from what the folder holds; not so if it
    stopped by itself, or was killed ten times in one round.
    """
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    told, tries = 0, 0
    while True:
        number, status = _handed_in(app, folder, link), ""
        for status in _statuses(number, link, lambda: len(_rounds(folder)) >= rounds):
            fresh = _rounds(folder)[told:]
            told, tries = told + len(fresh), 0 if fresh else tries
            for line in fresh:
                tell(line)
            if status.startswith("finished:completed"):
                return
        if (folder / FAULT).exists():
            raise FedplanError((folder / FAULT).read_text())
        tries += 1
        if tries >= TRIES:
            raise FedplanError(
                f"the server ended {tries} times in one round ({status}): see flwr log {number}"
            )


def _handed_in(app: Path, folder: Path, link: str) -> str:
    (folder / FAULT).unlink(missing_ok=True)
    said = ("--run-config", f'folder="{folder}"', "--format", "json")
    answer = _flwr("run", str(app), *((link,) if link else ()), *said)
    return str(_json(answer)["run-id"])


def _statuses(number: str, link: str, near: Callable[[], bool]) -> Iterator[str]:
    """How a run stands, again and again until it has ended.

    To ask costs a process that imports Flower: it is asked rarely until the end is near.
    """
    status, asked = "", time.monotonic()
    while not status.startswith("finished"):
        time.sleep(LOOK)
        if time.monotonic() - asked < SELDOM and not near():
            yield status
            continue
        asked = time.monotonic()
        try:
            answer = _flwr(
                "list", *((link,) if link else ()), "--run-id", number, "--format", "json"
            )
            status = str(_json(answer)["runs"][0]["status"])
        except (FedplanError, LookupError) as error:
            # A SuperLink that is down comes back; whoever is impatient stops this command.
            status = f"unknown: {error}"
        yield status


def _rounds(folder: Path) -> list[dict[str, Any]]:
    file = folder / "ledger.jsonl"
    try:
        lines = read_lines(file) if file.exists() else []
    except ValueError:
        return []  # a line that is being written over
    return [line for line in lines if line.get("kind") == ROUND]


def _flwr(*words: str) -> str:
    command = [str(Path(sys.executable).parent / "flwr"), *words]
    try:
        done = subprocess.run(  # noqa: S603
            command, env={**QUIET, **os.environ}, capture_output=True, text=True, check=False
        )
    except OSError as error:
        raise FedplanError(f"flwr cannot be started: {error}; see fedplan[flower]") from error
    if done.returncode:
        raise FedplanError(f"flwr {words[0]}: {(done.stdout + done.stderr).strip()[-600:]}")
    return done.stdout


def _json(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text[text.index("{") :])
    except ValueError as error:
        raise FedplanError(f"flwr says {text.strip()[-300:]!r}") from error
    if found.get("success") is False:
        raise FedplanError(f"flwr: {found.get('error-message')}")
    return found
