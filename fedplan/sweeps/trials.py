# SPDX-License-Identifier: Apache-2.0
"""Trials of a sweep: one study for each combination of settings and each seed."""

from __future__ import annotations

import copy
import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, cast

from fedplan.studies.schema import (
    Study,
    read_study_values,
    resolve_paths,
    study_from_dict,
)
from fedplan.studies.section import ConfigError, parse_toml_value, set_field

SEED = "seed"
"""The field that differs between runs of one group; it is varied by seeds, not by settings."""
MAX_SEEDS = 10_000
"""The most seeds of a sweep."""
MAX_NAME_LENGTH = 120
"""Characters of a folder's name; a longer name is cut, and gets a digest."""
_UNSAFE = re.compile(r"[^\w.=,+-]+", re.ASCII)


@dataclass(frozen=True)
class Setting:
    """A study field by its dotted name, as "train.lr", and the values that a sweep tries.

    The constructor raises ConfigError for the field "seed", and for missing or repeated values.
    """

    field: str
    values: tuple[Any, ...]

    def __post_init__(self) -> None:
        if self.field == SEED:
            raise ConfigError(
                "seed cannot be a setting: give the number of seeds as --seeds 5, or a list as "
                "--seeds 0,3,7"
            )
        if not self.values:
            raise ConfigError(f"{self.field} has no value: give one or more")
        if repeated := [v for i, v in enumerate(self.values) if v in self.values[:i]]:
            raise ConfigError(f"{self.field} has the value {repeated[0]!r} twice: give it once")


def parse_setting(text: str) -> Setting:
    """Parse a text of `--set`, such as `method.name=fedavg,fedper`; ConfigError if malformed."""
    field, equals, values_text = text.partition("=")
    if not equals or not field.strip():
        raise ConfigError(f"--set is {text!r}: write it as section.field=value,value")
    values = split_values(values_text)
    if not all(values):
        raise ConfigError(f"--set {text}: a value is empty; for an empty string write ''")
    return Setting(field.strip(), tuple(map(parse_toml_value, values)))


def parse_settings(
    settings: Mapping[str, Sequence[Any]] | Iterable[str] | None,
) -> tuple[Setting, ...]:
    """Return the settings of a sweep from a mapping or texts of `--set`; ConfigError if invalid."""
    if isinstance(settings, Mapping):
        by_field = cast("Mapping[str, Sequence[Any]]", settings)
        parsed = [Setting(field, tuple(values)) for field, values in by_field.items()]
    else:
        parsed = [parse_setting(text) for text in settings or ()]
    names = [setting.field for setting in parsed]
    if repeated := [name for i, name in enumerate(names) if name in names[:i]]:
        raise ConfigError(f"{repeated[0]} is set twice: give all its values at once, with commas")
    return tuple(parsed)


def parse_seeds(seeds: str | int | Sequence[int], first: int) -> tuple[int, ...]:
    """Return the seeds of a sweep: a number of seeds, counted from `first`, or the seeds of a list.

    Raises ConfigError for no seed, more than MAX_SEEDS, or the same seed twice.

    >>> parse_seeds("3", first=7)
    (7, 8, 9)
    >>> parse_seeds("0,3,7", first=7)
    (0, 3, 7)
    """
    try:
        numbers = [int(each) for each in seeds.split(",")] if isinstance(seeds, str) else seeds
    except ValueError:
        raise ConfigError(
            f"--seeds is {seeds!r}: give the number of seeds, or a list as 0,3,7"
        ) from None
    if isinstance(numbers, int) or (isinstance(seeds, str) and len(numbers) == 1):
        count = numbers if isinstance(numbers, int) else numbers[0]
        numbers = range(first, first + min(count, MAX_SEEDS + 1))
    if not 1 <= len(numbers) <= MAX_SEEDS or len(set(numbers)) < len(numbers):
        raise ConfigError(f"--seeds is {seeds!r}: give 1 to {MAX_SEEDS} seeds, none of them twice")
    return tuple(numbers)


def split_values(text: str) -> list[str]:
    """Split a text at commas outside of quotes and brackets, and strip each piece.

    Raises ConfigError if a quote or bracket is not closed.

    >>> split_values('share(), chain(share(), keep(head))')
    ['share()', 'chain(share(), keep(head))']
    """
    pieces, depth, quote, previous = [""], 0, "", ""
    for char in text:
        if quote:
            quote = "" if char == quote and previous != "\\" else quote
        elif char in "\"'":
            quote = char
        else:
            depth += (char in "([{") - (char in ")]}")
        if char == "," and not depth and not quote:
            pieces.append("")
        else:
            pieces[-1] += char
        previous = char
    if depth or quote:
        raise ConfigError(f"{text}: a quote or a bracket is not closed")
    return [piece.strip() for piece in pieces]


@dataclass(frozen=True)
class Trial:
    """One run of a sweep: its study, and the name of its folder, which tells the settings."""

    name: str
    study: Study


@dataclass(frozen=True)
class BaseStudy:
    """The study that a sweep varies, not validated, and the folder that its paths start from."""

    values: dict[str, Any]
    base_folder: Path

    @property
    def seed(self) -> int:
        """The seed of the unchanged study."""
        return self.with_changes({}).seed

    def with_changes(self, changes: dict[str, Any]) -> Study:
        """Return the study with new values by dotted field; ConfigError if it is invalid."""
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
    trial's name.
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
