# SPDX-License-Identifier: Apache-2.0
"""Results: what the files hold, as rank correlations of readings with the oracle."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

from research.scores.question import Question

OUT = Path(__file__).parents[1] / "results" / "scores"
BLOCKS = 12
CONSTANT = 1e-4
"""Scores whose largest is above the least by no more than this part of it are all the same."""
CONTROLS = ("the last", "the first", "the middle")


@dataclass(frozen=True)
class Found:
    """A task of a seed: each reading, and the gain of each block by oracle, if all is there."""

    task: str
    seed: int
    readings: Mapping[str, list[float]]
    gains: Mapping[str, list[float]]
    losses: Mapping[str, tuple[float, float]]


def read_results(asked: Question, folder: Path = OUT) -> list[Found]:
    """What was played of a question, and of no other."""
    files = [folder / f"{task}-{seed}.json" for task in asked.tasks for seed in asked.seeds]
    said = [json.loads(file.read_text()) for file in files if file.exists()]
    return [_found(each) for each in said if each["question"] == asked.digest]


def _found(said: dict[str, Any]) -> Found:
    runs = said["runs"]
    gains = {
        "alone": _gains(runs, "head", "alone", -1),
        "without": _gains(runs, "all", "without", 1),
    }
    readings = {**said["readings"], **of_place()}
    told = {name: (run["loss"], run["score"]) for name, run in runs.items()}
    held = {name: each for name, each in gains.items() if each}
    return Found(said["task"], said["seed"], readings, held, told)


def _gains(runs: Mapping[str, Mapping[str, float]], base: str, kind: str, sign: int) -> list[float]:
    names = [f"{kind} {block}" for block in range(BLOCKS)]
    if not {base, *names} <= runs.keys():
        return []
    return [sign * (runs[name]["loss"] - runs[base]["loss"]) for name in names]


def of_place() -> dict[str, list[float]]:
    """Controls that look at nothing: which blocks a depth alone would choose."""
    places = [float(block) for block in range(BLOCKS)]
    middle = (BLOCKS - 1) / 2
    return dict(
        zip(
            CONTROLS,
            (places, [-p for p in places], [-abs(p - middle) for p in places]),
            strict=True,
        )
    )


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Spearman's; none where scores are all the same."""
    if any(constant(each) for each in (one, other)):
        return None
    first, second = _ranks(one), _ranks(other)
    middle = (len(one) - 1) / 2
    both = sum((a - middle) * (b - middle) for a, b in zip(first, second, strict=True))
    sizes = [sum((a - middle) ** 2 for a in each) for each in (first, second)]
    return both / (sizes[0] * sizes[1]) ** 0.5


def constant(scores: Sequence[float]) -> bool:
    """Whether a reading tells no block from another."""
    return max(scores) - min(scores) <= CONSTANT * max(map(abs, scores))


def _ranks(scores: Sequence[float]) -> list[float]:
    """Places from 0 on; equal scores share the mean of theirs."""
    return [
        sum(other < score for other in scores) + (sum(other == score for other in scores) - 1) / 2
        for score in scores
    ]


@dataclass(frozen=True)
class Correlation:
    """A reading against an oracle on a task, seed by seed."""

    reading: str
    task: str
    by_seed: tuple[float, ...]

    @property
    def mean(self) -> float:
        return fmean(self.by_seed)


def correlations(found: Sequence[Found], oracle: str) -> Iterator[Correlation]:
    """All that can be told; a constant reading has none."""
    tasks = list(dict.fromkeys(each.task for each in found))
    for task in tasks:
        here = [each for each in found if each.task == task and oracle in each.gains]
        for reading in here[0].readings if here else ():
            told = [rank_correlation(each.readings[reading], each.gains[oracle]) for each in here]
            kept = tuple(each for each in told if each is not None)
            if len(kept) == len(told):
                yield Correlation(reading, task, kept)


def agreement(found: Sequence[Found], task: str, oracle: str) -> float | None:
    """How far two seeds agree about the gains of a task, as the mean over pairs of seeds."""
    here = [each.gains[oracle] for each in found if each.task == task and oracle in each.gains]
    told = [rank_correlation(one, other) for one, other in combinations(here, 2)]
    kept = [each for each in told if each is not None]
    return fmean(kept) if kept else None


@dataclass(frozen=True)
class Verdict:
    """A reading under the criterion: on which tasks it informs, and `met`, `missed`, `undecided`."""

    reading: str
    mean: float
    informs: tuple[str, ...]
    word: str


def verdicts(asked: Question, found: Sequence[Found]) -> list[Verdict]:
    """Each reading, the best first; nothing is decided before every seed of every task is there."""
    told = list(correlations(found, "alone"))
    means = {
        name: fmean(each.mean for each in told if each.reading == name)
        for name in dict.fromkeys(each.reading for each in told)
    }
    control = max((means[name] for name in CONTROLS if name in means), default=0.0)
    made = list[Verdict]()
    for name, mean in means.items():
        informs = tuple(
            each.task for each in told if each.reading == name and _informs(asked, found, each)
        )
        leads = mean - control >= asked.criterion.margin
        word = "met" if informs == asked.tasks and leads else "missed"
        made.append(Verdict(name, mean, informs, word if _whole(asked, found) else "undecided"))
    return sorted(made, key=lambda each: -each.mean)


def _whole(asked: Question, found: Sequence[Found]) -> bool:
    played = [each for each in found if "alone" in each.gains]
    return len(played) == len(asked.tasks) * len(asked.seeds)


def _informs(asked: Question, found: Sequence[Found], each: Correlation) -> bool:
    """Whether a reading carries information on a task, all of whose seeds are there and agree."""
    least, agreed = asked.criterion.least, agreement(found, each.task, "alone")
    whole = len(each.by_seed) == len(asked.seeds) and agreed is not None and agreed >= least
    return whole and each.mean >= least and min(each.by_seed) > 0
