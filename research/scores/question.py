# SPDX-License-Identifier: Apache-2.0
"""The question: tasks, seeds, training, and the criterion, as a file says it before any run."""

from __future__ import annotations

import hashlib
import subprocess
import tomllib
from dataclasses import dataclass
from pathlib import Path

FILE = Path(__file__).parents[1] / "questions" / "scores" / "question.toml"


@dataclass(frozen=True)
class Training:
    """How every run of the oracle trains: the same rows in the same order, whatever is trained.

    The head is trained alone for `warm` steps, and then again with the blocks, for `steps`; where all
    blocks or all but one are trained, for `steps_without`.
    """

    rows: int
    tests: int
    tokens: int
    batch: int
    warm: int
    warm_rate: float
    steps: int
    steps_without: int
    rate: float
    head_rate: float


@dataclass(frozen=True)
class Criterion:
    """What a rank correlation must reach, and by how much it must lie above each control's."""

    least: float
    margin: float


@dataclass(frozen=True)
class Question:
    """All that is settled before the runs; `digest` tells two of them apart by every letter."""

    asks: str
    model: str
    tasks: tuple[str, ...]
    seeds: tuple[int, ...]
    looks: int
    few: int
    training: Training
    criterion: Criterion
    digest: str


def read_question(file: Path = FILE) -> Question:
    """The question of a file."""
    said = tomllib.loads(file.read_text())
    del said["pilot"]
    return Question(
        **{key: said[key] for key in ("asks", "model", "looks", "few")},
        tasks=tuple(said["tasks"]),
        seeds=tuple(said["seeds"]),
        training=Training(**said["training"]),
        criterion=Criterion(**said["criterion"]),
        digest=hashlib.sha256(file.read_bytes()).hexdigest()[:32],
    )


def commit_of(file: Path = FILE) -> str:
    """The commit that the question stands in as it is now; one that is in none is refused."""
    git = ("git", "-C", str(file.parent))
    log = subprocess.run(
        [*git, "log", "-1", "--format=%H", "--", file.name], capture_output=True, text=True
    )
    commit = log.stdout.strip()
    shown = subprocess.run([*git, "show", f"{commit}:./{file.name}"], capture_output=True)
    if not commit or shown.stdout != file.read_bytes():
        raise ValueError(f"{file} is not committed as it stands: commit it, then run")
    return commit
