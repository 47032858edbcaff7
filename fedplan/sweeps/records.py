# SPDX-License-Identifier: Apache-2.0
"""Records of a sweep: what it is of, which of its runs ended, and which failed and why."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from fedplan.storage.files import keep_file, put_file
from fedplan.studies.schema import ConfigError
from fedplan.sweeps.settings import Setting
from fedplan.sweeps.trials import Trial

SWEEP, ENDED, FAILURES = "sweep.json", "ended.json", "failures.json"
"""In a sweep's folder: what was asked, the runs that ended, and those that failed."""


@dataclass(frozen=True)
class End:
    """How a run of a sweep ended: after so many seconds, and why before its last round, if it did.

    `error` is why it failed, and `trace` where. One that is `asked` to stop goes on another time.
    """

    seconds: float = 0.0
    stopped: str = ""
    asked: bool = False
    error: str = ""
    trace: str = ""

    @property
    def done(self) -> bool:
        """Whether nothing is left to do of it."""
        return not self.error and not self.asked


@dataclass(frozen=True)
class Asked:
    """What a sweep was asked for: its settings, its seeds, and a digest of each run's study."""

    settings: dict[str, list[Any]]
    seeds: list[int]
    runs: dict[str, str]

    @property
    def text(self) -> str:
        """It as a person typed it."""
        said = [f"{field}={','.join(map(_said, held))}" for field, held in self.settings.items()]
        return " ".join([*said, f"seeds {','.join(map(str, self.seeds))}"])


def asked_of(settings: Sequence[Setting], seeds: Sequence[int], trials: Sequence[Trial]) -> Asked:
    """What a sweep of these trials is asked for."""
    held = {each.field: list(each.values) for each in settings}
    return Asked(held, list(seeds), {trial.name: trial.study.whole for trial in trials})


def is_sweep(folder: Path) -> bool:
    """Whether a folder is that of a sweep."""
    return (folder / SWEEP).is_file()


def begin(folder: Path, asked: Asked) -> None:
    """Write what a folder is of; refuse one that holds anything but a part of this sweep.

    Values and seeds may be added to a sweep: all that ran before is still in it.
    """
    if (
        folder.is_dir()
        and not is_sweep(folder)
        and any(each.suffix != ".tmp" for each in folder.iterdir())
    ):
        raise ConfigError(f"{folder} is not empty and holds no sweep: name another folder")
    if is_sweep(folder):
        _require_within(folder, read_asked_for(folder), asked)
    folder.mkdir(parents=True, exist_ok=True)
    keep_file(folder / SWEEP, json.dumps(asdict(asked), indent=1) + "\n")


def _require_within(folder: Path, old: Asked, new: Asked) -> None:
    changed = [name for name, mark in old.runs.items() if new.runs.get(name, mark) != mark]
    if changed:
        raise ConfigError(
            f"{folder} holds a sweep of another study: {changed[0]} was begun with other words in "
            "its file; take the change back, or name another folder"
        )
    if lost := [name for name in old.runs if name not in new.runs]:
        raise ConfigError(
            f"{folder} holds the sweep {old.text}, and {lost[0]} is not in what is asked now: ask "
            "for all of that again, with more values or seeds if you like, or name another folder"
        )


def read_asked_for(folder: Path) -> Asked:
    """What the sweep in a folder was asked for."""
    said = _read(folder / SWEEP)
    try:
        if any(type(mark) is not str for mark in dict(said["runs"]).values()):
            raise TypeError("runs are names, each with a digest")
        return Asked(**said)
    except (TypeError, ValueError, KeyError) as error:
        raise ConfigError(f"{folder / SWEEP} cannot be read: {error}") from error


def read_ends(folder: Path) -> dict[str, End]:
    """How each run ended that did."""
    return _ends(folder / ENDED)


def read_failures(folder: Path) -> dict[str, End]:
    """The runs that failed, each with its error."""
    return _ends(folder / FAILURES)


def _ends(file: Path) -> dict[str, End]:
    try:
        return {name: End(**said) for name, said in _read(file).items()}
    except TypeError as error:
        raise ConfigError(f"{file} cannot be read: {error}; remove it, and runs go on") from error


def write_ends(folder: Path, ends: Mapping[str, End]) -> None:
    """Write how runs ended: what failed stands apart."""
    done = {
        name: {"seconds": e.seconds, "stopped": e.stopped} for name, e in ends.items() if e.done
    }
    failed = {
        name: {"seconds": e.seconds, "error": e.error, "trace": e.trace}
        for name, e in ends.items()
        if e.error
    }
    put_file(folder / ENDED, json.dumps(done, indent=1) + "\n")
    if failed or (folder / FAILURES).exists():
        put_file(folder / FAILURES, json.dumps(failed, indent=1) + "\n")


def _read(file: Path) -> dict[str, Any]:
    try:
        said: Any = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    if not isinstance(said, dict):
        raise ConfigError(f"{file} cannot be read: it holds no table")
    return cast("dict[str, Any]", said)


def _said(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
