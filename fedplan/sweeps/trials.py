# SPDX-License-Identifier: Apache-2.0
"""Trials: the studies of a sweep, one for each combination of its settings and each seed."""

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

from fedplan.studies.schema import ConfigError, Study, lay_over, placed, read_said, study_of
from fedplan.sweeps.settings import SEED, Setting

LONGEST = 120
"""Letters of a folder's name; what is longer is cut, and told apart by a digest."""

_ODD = re.compile(r"[^\w.=,+-]+", re.ASCII)


@dataclass(frozen=True)
class Trial:
    """One run of a sweep: the name of its folder, which tells its settings, and its study."""

    name: str
    study: Study


@dataclass(frozen=True)
class Ground:
    """What all runs of a sweep start from: the plain values of a study, and where paths begin."""

    said: dict[str, Any]
    base: Path

    @property
    def seed(self) -> int:
        """The study's own seed."""
        return self.study({}).seed

    def study(self, changes: dict[str, Any]) -> Study:
        """The study with some fields changed, by their dotted names."""
        said = copy.deepcopy(self.said)
        for where, value in changes.items():
            lay_over(said, where, value)
        return placed(study_of(said), self.base)


def ground_of(study: Study | Path | str) -> Ground:
    """The ground of a study, or of the one in a file."""
    if isinstance(study, Study):
        return Ground(study.model_dump(mode="json"), Path.cwd())
    return Ground(read_said(Path(study)), Path(study).parent)


def trials_of(
    ground: Ground, settings: Sequence[Setting], seeds: Iterable[int]
) -> tuple[Trial, ...]:
    """All trials, seed by seed: what is there early compares every setting on a few seeds.

    Every study is read before anything runs: one that does not fit is named.
    """
    fields, chosen = [each.field for each in settings], product(*(each.values for each in settings))
    changes = [dict(zip(fields, values, strict=True)) for values in chosen]
    said = [{**change, SEED: seed} for seed in seeds for change in changes]
    names = _names(said)
    return tuple(
        Trial(name, _fitting(ground, name, each)) for name, each in zip(names, said, strict=True)
    )


def _fitting(ground: Ground, name: str, changes: dict[str, Any]) -> Study:
    try:
        return ground.study(changes)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}").coded(error.code) from error


def _names(said: Sequence[dict[str, Any]]) -> list[str]:
    """A name for each, that a shell takes without quotes."""
    plain = [_ODD.sub("-", _text(each)) for each in said]
    often = Counter(plain)
    return [
        name if often[name] == 1 and len(name) <= LONGEST else _marked(name, each)
        for name, each in zip(plain, said, strict=True)
    ]


def _text(changes: dict[str, Any]) -> str:
    return ",".join(
        f"{field}={value if isinstance(value, str) else _words(value)}"
        for field, value in changes.items()
    )


def _words(value: Any) -> str:
    """A value that is no text, in few letters: `name-fedper` for a table."""
    return re.sub(r'["{}\[\] ]+', "", json.dumps(value)).replace(":", "-").replace(",", "+")


def _marked(name: str, changes: dict[str, Any]) -> str:
    """A name with a digest of what it stands for; the seed stays readable."""
    mark = hashlib.sha256(json.dumps(changes, sort_keys=True).encode()).hexdigest()[:8]
    tail = f"-{mark},{SEED}={changes[SEED]}"
    return name.rpartition(",")[0][: LONGEST - len(tail)] + tail
