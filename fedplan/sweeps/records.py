# SPDX-License-Identifier: Apache-2.0
"""Files of a sweep's folder: its specification, its finished trials and its failed trials."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fedplan.storage.files import make_folder, write_atomic, write_if_changed
from fedplan.studies.run import SWEEP_FILE
from fedplan.studies.schema import ConfigError, read_json_object

FINISHED_FILE, FAILURES_FILE = "finished.json", "failures.json"
"""In a sweep's folder: the finished trials, and the failed ones."""


@dataclass(frozen=True)
class TrialResult:
    """How one trial (run of a sweep) ended, after `seconds`.

    `stop_reason`: why the trial ended before its last round, else "". `stop_requested`: whether a
    person asked for that stop; the trial is resumed later. `error`: message of a failed trial, else
    ""; `traceback`: of an unexpected error.
    """

    seconds: float = 0.0
    stop_reason: str = ""
    stop_requested: bool = False
    error: str = ""
    traceback: str = ""

    @property
    def finished(self) -> bool:
        """Whether the trial needs no further run."""
        return not self.error and not self.stop_requested


@dataclass(frozen=True)
class SweepSpec:
    """The specification of a sweep: values by field, seeds, and study digests by trial name."""

    settings: dict[str, list[Any]]
    seeds: list[int]
    runs: dict[str, str]

    @property
    def text(self) -> str:
        """The settings and seeds as on a command line."""
        settings = [
            f"{field}={','.join(v if isinstance(v, str) else json.dumps(v) for v in values)}"
            for field, values in self.settings.items()
        ]
        return " ".join([*settings, f"seeds {','.join(map(str, self.seeds))}"])


def is_sweep(folder: Path) -> bool:
    """Whether a folder contains a sweep."""
    return (folder / SWEEP_FILE).is_file()


def start_sweep_folder(folder: Path, spec: SweepSpec) -> None:
    """Create the folder of a sweep, or extend the sweep in it, and write the specification.

    Raises ConfigError if the folder has other files, or a sweep of which a trial is changed or
    missing in `spec`: values and seeds may be added, but no trial may be changed or removed.
    """
    if is_sweep(folder):
        old = read_sweep_spec(folder)
        if changed := [n for n, digest in old.runs.items() if spec.runs.get(n, digest) != digest]:
            raise ConfigError(
                f"{folder} has a sweep of another study: the study file has changed since "
                f"{changed[0]} was started; undo the change, or name another folder"
            )
        if removed := [name for name in old.runs if name not in spec.runs]:
            raise ConfigError(
                f"{folder} has the sweep {old.text}, but {removed[0]} is not in the present one: "
                "give all these settings and seeds again, with more if you like, or name another "
                "folder"
            )
    elif folder.is_dir() and any(file.suffix != ".tmp" for file in folder.iterdir()):
        raise ConfigError(f"{folder} is not empty and is not a sweep: name another folder")
    make_folder(folder)
    write_if_changed(folder / SWEEP_FILE, json.dumps(asdict(spec), indent=1) + "\n")


def read_sweep_spec(folder: Path) -> SweepSpec:
    """Return the specification of the sweep in a folder; raise ConfigError if unreadable."""
    fields = read_json_object(folder / SWEEP_FILE)
    try:
        if any(type(digest) is not str for digest in dict(fields["runs"]).values()):
            raise TypeError("runs must map names to digests")
        return SweepSpec(**fields)
    except (TypeError, ValueError, KeyError) as error:
        raise ConfigError(f"{folder / SWEEP_FILE} cannot be read: {error}") from error


def read_trial_results(file: Path) -> dict[str, TrialResult]:
    """Return the results in FINISHED_FILE or FAILURES_FILE of a sweep, by trial name.

    Empty without the file. Raises ConfigError if it cannot be read.
    """
    remedy = "delete it, and the trials are resumed"
    try:
        results = read_json_object(file, remedy)
        return {name: TrialResult(**fields) for name, fields in results.items()}
    except TypeError as error:
        raise ConfigError(f"{file} cannot be read: {error}; {remedy}") from error


def write_trial_results(folder: Path, results: Mapping[str, TrialResult]) -> None:
    """Replace FINISHED_FILE and FAILURES_FILE in a sweep's folder.

    `results`: by trial name; a trial that was stopped on request is in neither file.
    """
    finished = {
        name: {"seconds": result.seconds, "stop_reason": result.stop_reason}
        for name, result in results.items()
        if result.finished
    }
    failed = {
        name: {"seconds": result.seconds, "error": result.error, "traceback": result.traceback}
        for name, result in results.items()
        if result.error
    }
    write_atomic(folder / FINISHED_FILE, json.dumps(finished, indent=1) + "\n")
    if failed or (folder / FAILURES_FILE).exists():
        write_atomic(folder / FAILURES_FILE, json.dumps(failed, indent=1) + "\n")
