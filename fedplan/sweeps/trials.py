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
    """One run of a sweep: its study, and the name of its folder, which tells the settings."""

    name: str
    study: Study


@dataclass(frozen=True)
class BaseStudy:
    """The study that a sweep varies, not validated: plain values as nested dicts.

    `base_folder`: the folder that relative paths in the values start from.
    """

    values: dict[str, Any]
    base_folder: Path

    @property
    def seed(self) -> int:
        """The seed of the unchanged study."""
        return self.with_changes({}).seed

    def with_changes(self, changes: dict[str, Any]) -> Study:
        """Return the study with changed fields; this object stays as it is.

        `changes`: new values by dotted field, as "train.rounds". Raises ConfigError if the study is
        invalid.
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
    """Return all trials of a study: all combinations of settings with the first seed, then others.

    In this order, the settings can be compared early on a few seeds. Raises ConfigError with the
    trial's name if one of the studies is invalid.
    """
    fields = [setting.field for setting in settings]
    combinations = product(*(setting.values for setting in settings))
    varied = [dict(zip(fields, values, strict=True)) for values in combinations]
    changes = [{**change, SEED: seed} for seed in seeds for change in varied]
    trials = list[Trial]()
    for name, change in zip(_trial_names(changes), changes, strict=True):
        try:
            trials.append(Trial(name, base.with_changes(change)))
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}").with_code(error.code) from error
    return tuple(trials)


def _trial_names(trial_changes: Sequence[dict[str, Any]]) -> list[str]:
    """Return a unique folder name for each trial's changed fields, such as `train.lr=0.1,seed=1`.

    Names are safe in a shell without quotes. A name that is longer than MAX_NAME_LENGTH or not
    unique is cut, and gets a digest of the changes: `train.lr=0.1-DIGEST,seed=1`.
    """
    names = [
        _UNSAFE.sub("-", ",".join(f"{field}={_value_text(value)}" for field, value in each.items()))
        for each in trial_changes
    ]
    counts = Counter(names)
    for index, (name, each) in enumerate(zip(names, trial_changes, strict=True)):
        if counts[name] > 1 or len(name) > MAX_NAME_LENGTH:
            digest = hashlib.sha256(json.dumps(each, sort_keys=True).encode()).hexdigest()[:8]
            tail = f"-{digest},{SEED}={each[SEED]}"
            names[index] = name.rpartition(",")[0][: MAX_NAME_LENGTH - len(tail)] + tail
    return names


def _value_text(value: Any) -> str:
    """Return a string as it is, and `name-fedper` for {"name": "fedper"}."""
    if isinstance(value, str):
        return value
    return re.sub(r'["{}\[\] ]+', "", json.dumps(value)).replace(":", "-").replace(",", "+")
