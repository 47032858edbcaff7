# SPDX-License-Identifier: Apache-2.0
"""Courses: one problem at one pace, with what every warm-up would have come to in the end."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from research.kernel.frozen import Split, split
from research.kernel.problem import Setting, draw, start
from research.kernel.profile import lowest, restricted
from research.kernel.rounds import Batches, Drift, Pace, path


@dataclass(frozen=True)
class Course:
    """A run without a freeze, and the end of every run that freezes after 0, 1, ... rounds.

    `ends` has one more than there are rounds: the last is of the run that never freezes. Like
    `profile`, they are shares of what the start's loss lies above the reference. `kernel` and
    `value` hold the drift of each round.
    """

    setting: Setting
    pace: Pace
    seed: int
    reference: float
    height: float
    profile: tuple[float, ...]
    ends: tuple[Split, ...]
    kernel: tuple[Drift, ...]
    value: tuple[Drift, ...]

    @property
    def errors(self) -> list[float]:
        """The final error by warm-up."""
        return [each.error for each in self.ends]


def course(setting: Setting, pace: Pace, seed: int, batch: int = 0) -> Course:
    """Play a course once; the frozen stages follow in closed form.

    With a batch, steps before the freeze see so many rows; the frozen stage is then the mean over
    all batches, which is that of full gradients, since each step is affine in the value.
    """
    batches = Batches(batch, np.random.default_rng(200 + seed)) if batch else None
    problem = draw(setting, seed)
    begun = start(problem, seed, setting.rank)
    reference = lowest(problem, begun.query, begun.key)
    height = restricted(problem, begun.query, begun.key).loss(begun.value) - reference
    played = path(problem, begun, pace, batches)
    profile, ends = list[float](), list[Split]()
    for done, weights in enumerate((begun, *(each.weights for each in played))):
        left = restricted(problem, weights.query, weights.key)
        profile.append((left.profile - reference) / height)
        found = split(
            left,
            weights.value,
            steps=pace.steps,
            rate=pace.rate,
            rounds=pace.rounds - done,
            reference=reference,
        )
        ends.append(Split(found.bias / height, found.drift / height, found.rest / height))
    return Course(
        setting,
        pace,
        seed,
        reference,
        height,
        tuple(profile),
        tuple(ends),
        tuple(each.kernel for each in played),
        tuple(each.value for each in played),
    )


def kept(setting: Setting, pace: Pace, seed: int, folder: Path, batch: int = 0) -> Course:
    """A course from a folder of those that were played before; played now if it is not there."""
    asked = json.dumps([asdict(setting), asdict(pace), seed, *([batch] if batch else [])])
    file = folder / f"{hashlib.sha256(asked.encode()).hexdigest()[:16]}.json"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        made = json.dumps(asdict(course(setting, pace, seed, batch)))
        # Whole or not there: a run that is stopped leaves no half of a course.
        file.with_suffix(".part").write_text(made)
        file.with_suffix(".part").rename(file)
    return _read(json.loads(file.read_text()))


def _read(said: dict[str, Any]) -> Course:
    return Course(
        Setting(**said["setting"]),
        Pace(**said["pace"]),
        said["seed"],
        said["reference"],
        said["height"],
        tuple(said["profile"]),
        tuple(Split(**each) for each in said["ends"]),
        tuple(Drift(**each) for each in said["kernel"]),
        tuple(Drift(**each) for each in said["value"]),
    )
