# SPDX-License-Identifier: Apache-2.0
"""Questions: what is asked of which arms, by which criterion, as a file says it before any run."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as strict

from fedplan.errors import FedplanError
from fedplan.studies.schema import read_study_values

FEWEST = 5
"""Seeds below which nothing is decided."""
WHOLE = ConfigDict(extra="forbid")
"""A field that nobody knows is an error."""


class QuestionError(FedplanError):
    """A question that does not fit, was not committed, or was changed after its runs."""


@strict(frozen=True, config=WHOLE)
class Arm:
    """Settings over the question's study; `start` names the arm whose last world it begins with."""

    set: dict[str, Any] = field(default_factory=dict[str, Any])
    start: str = ""


@strict(frozen=True, config=WHOLE)
class Asked:
    """One comparison: an arm minus another, which way is better, and the least that matters.

    A `least` below zero asks whether the arm is no worse than by so much. `effect` is the gain that
    power is reckoned for, where it is another one than the pilot's.
    """

    arm: str
    minus: str
    least: float
    claim: str
    better: str = "higher"
    first: bool = False
    effect: float | None = None

    @property
    def name(self) -> str:
        """It in a few letters."""
        return f"{self.arm} minus {self.minus}"


@strict(frozen=True, config=WHOLE)
class Score:
    """A number of a round, as the mean of the last rounds that have it."""

    name: str
    last: int = 1


@strict(frozen=True, config=WHOLE)
class Pilot:
    """What power is reckoned from: the effect looked for, the spread of paired differences."""

    source: str
    effect: float
    spread: float


@strict(frozen=True, config=WHOLE)
class Question:
    """A question with its arms, its comparisons, its criterion, its seeds and its pilot.

    `study` is a file beside it, `set` is laid over that for all arms, and `alpha` is the level of
    all comparisons together. `tells` are other numbers of the last round, by patterns of their
    names: the mean of those that fit is told for each arm, and judged for none.
    """

    asks: str
    study: str
    seeds: tuple[int, ...]
    score: Score
    arms: dict[str, Arm]
    comparisons: tuple[Asked, ...]
    pilot: Pilot
    alpha: float = 0.05
    tells: dict[str, str] = field(default_factory=dict[str, str])
    set: dict[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        if len(set_of := frozenset(self.seeds)) < FEWEST or len(set_of) < len(self.seeds):
            raise QuestionError(f"seeds are {list(self.seeds)}: say {FEWEST} or more, each once")
        if len({each.name for each in self.comparisons}) < len(self.comparisons):
            raise QuestionError("a comparison stands twice: say each once")
        named = [name for each in self.comparisons for name in (each.arm, each.minus)]
        for name in [*named, *(arm.start for arm in self.arms.values() if arm.start)]:
            if name not in self.arms:
                raise QuestionError(f"there is no arm {name!r}; there are {', '.join(self.arms)}")
        if odd := [c.better for c in self.comparisons if c.better not in ("higher", "lower")]:
            raise QuestionError(f"better is {odd[0]!r}: say higher or lower")
        for name in self.arms:
            self.line(name)

    @property
    def compared(self) -> list[str]:
        """The arms that some comparison names, in the order of the file."""
        named = {name for each in self.comparisons for name in (each.arm, each.minus)}
        return [arm for arm in self.arms if arm in named]

    def line(self, arm: str) -> list[str]:
        """An arm after all that it begins with, the earliest first."""
        found = [arm]
        while start := self.arms[found[0]].start:
            if start in found:
                raise QuestionError(f"{arm} begins with itself, by {start}: say another start")
            found.insert(0, start)
        return found

    def needed(self, *, first: bool = False) -> list[str]:
        """The arms that are to be played, each after its start; or those of the deciding corner."""
        asked = [c for c in self.comparisons if c.first or not first]
        wanted = [name for each in asked for name in (each.minus, each.arm)]
        return list(dict.fromkeys(name for each in wanted for name in self.line(each)))

    def changes(self, arm: str) -> dict[str, Any]:
        """All that an arm says over the study; of one that begins with another, its own alone."""
        return {**self.set, **self.arms[arm].set}


@dataclass(frozen=True)
class QuestionFile:
    """A question, the plain values of its study, the files that both stand in, and their digest.

    The digest tells two questions apart by every letter of their files, as they were read.
    """

    question: Question
    said: dict[str, Any]
    files: tuple[Path, ...]
    digest: str

    @property
    def name(self) -> str:
        """What its results are called."""
        return self.files[0].stem


def digest_of(contents: Sequence[bytes]) -> str:
    """A digest of files one after the other, and of where each ends."""
    marks = b"".join(hashlib.sha256(each).digest() for each in contents)
    return hashlib.sha256(marks).hexdigest()[:32]


def read_question(file: Path) -> QuestionFile:
    """The question of a file; whatever does not fit is named."""
    question = question_of(read_study_values(file), str(file))
    files = (file, file.parent / question.study)
    digest = digest_of([each.read_bytes() for each in files])
    return QuestionFile(question, read_study_values(files[1]), files, digest)


def question_of(said: Mapping[str, Any], where: str = "the question") -> Question:
    """A question from plain values."""
    try:
        return TypeAdapter(Question).validate_python(said)
    except ValidationError as error:
        faults = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
        raise QuestionError(f"{where} does not fit:\n  " + "\n  ".join(faults)) from error
