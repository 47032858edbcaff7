# SPDX-License-Identifier: Apache-2.0
"""Files of a sweep's folder: its specification, its finished trials and its failed trials."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from fedplan.storage.files import write_atomic, write_if_changed
from fedplan.studies.schema import ConfigError
from fedplan.sweeps.settings import Setting
from fedplan.sweeps.trials import Trial

SWEEP_FILE, FINISHED_FILE, FAILURES_FILE = "sweep.json", "ended.json", "failures.json"
"""In a sweep's folder: its specification, the finished trials, and the failed ones."""


@dataclass(frozen=True)
class TrialResult:
    """How a trial ended, after `seconds`.

    `stopped` is the reason if it ended before its last round, and `stop_requested` whether a person
    asked for the stop: such a trial is resumed later. A failed trial has an `error`, and a
    traceback in `trace` if the error was unexpected.
    """

    seconds: float = 0.0
    stopped: str = ""
    stop_requested: bool = False
    error: str = ""
    trace: str = ""

    @property
    def finished(self) -> bool:
        """Whether the trial needs no further run."""
        return not self.error and not self.stop_requested


@dataclass(frozen=True)
class SweepSpec:
    """The specification of a sweep: values by field, seeds, and the study digest of each trial."""

    settings: dict[str, list[Any]]
    seeds: list[int]
    runs: dict[str, str]

    @property
    def text(self) -> str:
        """The settings and seeds as on a command line."""
        settings = [
            f"{field}={','.join(map(_value_text, values))}"
            for field, values in self.settings.items()
        ]
        return " ".join([*settings, f"seeds {','.join(map(str, self.seeds))}"])


def make_sweep_spec(
    settings: Sequence[Setting], seeds: Sequence[int], trials: Sequence[Trial]
) -> SweepSpec:
    """Return the specification of a sweep with these trials."""
    values_by_field = {setting.field: list(setting.values) for setting in settings}
    digests = {trial.name: trial.study.full_digest for trial in trials}
    return SweepSpec(values_by_field, list(seeds), digests)


def is_sweep(folder: Path) -> bool:
    """Whether a folder contains a sweep."""
    return (folder / SWEEP_FILE).is_file()


def start_sweep_folder(folder: Path, spec: SweepSpec) -> None:
    """Create the folder of a sweep, or extend an existing sweep, and write the specification.

    Raises ConfigError if the folder has other files, or a sweep that `spec` does not contain:
    values and seeds may be added, but no trial may be changed or removed.
    """
    if (
        folder.is_dir()
        and not is_sweep(folder)
        and any(file.suffix != ".tmp" for file in folder.iterdir())
    ):
        raise ConfigError(f"{folder} is not empty and is not a sweep: name another folder")
    if is_sweep(folder):
        _require_extension(folder, read_sweep_spec(folder), spec)
    folder.mkdir(parents=True, exist_ok=True)
    write_if_changed(folder / SWEEP_FILE, json.dumps(asdict(spec), indent=1) + "\n")


def _require_extension(folder: Path, old: SweepSpec, new: SweepSpec) -> None:
    """Raise ConfigError if a trial of the old specification is changed or missing in the new."""
    changed = [name for name, digest in old.runs.items() if new.runs.get(name, digest) != digest]
    if changed:
        raise ConfigError(
            f"{folder} has a sweep of another study: the study file has changed since "
            f"{changed[0]} was started; undo the change, or name another folder"
        )
    if removed := [name for name in old.runs if name not in new.runs]:
        raise ConfigError(
            f"{folder} has the sweep {old.text}, but {removed[0]} is not in the present one: give "
            "all these settings and seeds again, with more if you like, or name another folder"
        )


def read_sweep_spec(folder: Path) -> SweepSpec:
    """Return the specification of the sweep in a folder; raise ConfigError if unreadable."""
    fields = _read_json(folder / SWEEP_FILE)
    try:
        if any(type(digest) is not str for digest in dict(fields["runs"]).values()):
            raise TypeError("runs must map names to digests")
        return SweepSpec(**fields)
    except (TypeError, ValueError, KeyError) as error:
        raise ConfigError(f"{folder / SWEEP_FILE} cannot be read: {error}") from error


def read_finished(folder: Path) -> dict[str, TrialResult]:
    """Return the results of the finished trials by name; raise ConfigError if unreadable."""
    return _read_results(folder / FINISHED_FILE)


def read_failures(folder: Path) -> dict[str, TrialResult]:
    """Return the results of the failed trials by name; raise ConfigError if unreadable."""
    return _read_results(folder / FAILURES_FILE)


def _read_results(file: Path) -> dict[str, TrialResult]:
    """Return the trial results in a file by name; none if there is no file."""
    try:
        return {name: TrialResult(**fields) for name, fields in _read_json(file).items()}
    except TypeError as error:
        raise ConfigError(
            f"{file} cannot be read: {error}; delete it, and the trials are resumed"
        ) from error


def write_trial_results(folder: Path, results: Mapping[str, TrialResult]) -> None:
    """Write the results of finished trials and of failed trials into the two files of a sweep."""
    finished = {
        name: {"seconds": result.seconds, "stopped": result.stopped}
        for name, result in results.items()
        if result.finished
    }
    failed = {
        name: {"seconds": result.seconds, "error": result.error, "trace": result.trace}
        for name, result in results.items()
        if result.error
    }
    write_atomic(folder / FINISHED_FILE, json.dumps(finished, indent=1) + "\n")
    if failed or (folder / FAILURES_FILE).exists():
        write_atomic(folder / FAILURES_FILE, json.dumps(failed, indent=1) + "\n")


def _read_json(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file, empty without a file; raise ConfigError if unreadable."""
    try:
        value: Any = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{file} cannot be read: it contains no JSON object")
    return cast("dict[str, Any]", value)


def _value_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
