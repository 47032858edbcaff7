# SPDX-License-Identifier: Apache-2.0
"""Trials of a sweep: one study for each combination of settings and each seed."""

from __future__ import annotations

import copy
import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from fedplan.studies.schema import (
    ConfigError,
    Study,
    read_study_values,
    resolve_paths,
    set_field,
    study_from_dict,
)
from fedplan.sweeps.settings import SEED, Setting

MAX_NAME_LENGTH = 120
"""Characters of a folder's name; a longer name is cut, and gets a digest."""

_UNSAFE = re.compile(r"[^\w.=,+-]+", re.ASCII)


@dataclass(frozen=True)
class Trial:
    """One run of a sweep: its study, and the name of its folder, which has the settings."""

    name: str
    study: Study


@dataclass(frozen=True)
class BaseStudy:
    """The study that a sweep varies: its plain values, and the folder of its relative paths."""

    values: dict[str, Any]
    base_folder: Path

    @property
    def seed(self) -> int:
        """The seed of the unchanged study."""
        return self.with_changes({}).seed

    def with_changes(self, changes: dict[str, Any]) -> Study:
        """Return the study with changed fields, by dotted names as "train.rounds".

        Raises ConfigError if the changed study is invalid.
        """
        values = copy.deepcopy(self.values)
        for field, value in changes.items():
            set_field(values, field, value)
        return resolve_paths(study_from_dict(values), self.base_folder)


def read_base_study(study: Study | Path | str) -> BaseStudy:
    """Return the base study of a Study, or of a study file; raise ConfigError if unreadable."""
    if isinstance(study, Study):
        return BaseStudy(study.model_dump(mode="json"), Path.cwd())
    return BaseStudy(read_study_values(Path(study)), Path(study).parent)


def make_trials(
    base: BaseStudy, settings: Sequence[Setting], seeds: Iterable[int]
) -> tuple[Trial, ...]:
    """Return all trials: every combination of settings with the first seed, then the next.

    In this order, the settings can be compared early on a few seeds. Raises ConfigError with the
    trial's name if one of the studies is invalid.
    """
    fields = [setting.field for setting in settings]
    combinations = product(*(setting.values for setting in settings))
    varied = [dict(zip(fields, values, strict=True)) for values in combinations]
    changes = [{**change, SEED: seed} for seed in seeds for change in varied]
    return tuple(
        Trial(name, _changed_study(base, name, change))
        for name, change in zip(_trial_names(changes), changes, strict=True)
    )


def _changed_study(base: BaseStudy, name: str, changes: dict[str, Any]) -> Study:
    try:
        return base.with_changes(changes)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}").with_code(error.code) from error


def _trial_names(changes: Sequence[dict[str, Any]]) -> list[str]:
    """Return a unique name for each set of changed fields, safe in a shell without quotes."""
    names = [_UNSAFE.sub("-", _changes_text(each)) for each in changes]
    counts = Counter(names)
    return [
        name if counts[name] == 1 and len(name) <= MAX_NAME_LENGTH else _digest_name(name, each)
        for name, each in zip(names, changes, strict=True)
    ]


def _changes_text(changes: dict[str, Any]) -> str:
    return ",".join(
        f"{field}={value if isinstance(value, str) else _value_text(value)}"
        for field, value in changes.items()
    )


def _value_text(value: Any) -> str:
    """Return a short text of a value that is no string: `name-fedper` for {"name": "fedper"}."""
    return re.sub(r'["{}\[\] ]+', "", json.dumps(value)).replace(":", "-").replace(",", "+")


def _digest_name(name: str, changes: dict[str, Any]) -> str:
    """Return a name cut to MAX_NAME_LENGTH, with a digest of the changes before the seed."""
    digest = hashlib.sha256(json.dumps(changes, sort_keys=True).encode()).hexdigest()[:8]
    tail = f"-{digest},{SEED}={changes[SEED]}"
    return name.rpartition(",")[0][: MAX_NAME_LENGTH - len(tail)] + tail
