# SPDX-License-Identifier: Apache-2.0
"""The grid: courses by heterogeneity and local steps, and warm-ups judged on them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean

from research.kernel.courses import Course, kept
from research.kernel.problem import Setting
from research.kernel.rounds import Pace
from research.kernel.rules import Balance, Bend, Rule, warm_up

HETEROGENEITIES = (0.0, 0.125, 0.25, 0.5, 0.75, 1.0)
STEPS = (1, 2, 5, 10, 20)
TUNED, MEASURED = (0, 1, 2), (10, 11, 12, 13, 14)
"""Seeds that constants are chosen on, and seeds that rules are judged on."""
SHARES: Mapping[type[Bend | Balance], tuple[float, ...]] = {
    Bend: (0.2, 0.1, 0.05, 0.03, 0.02, 0.01),
    Balance: (0.01, 0.005, 0.002, 0.001, 0.0005, 0.0002),
}
"""The constants that are tried."""


@dataclass(frozen=True)
class Cell:
    """The courses of all seeds at one heterogeneity and one number of local steps."""

    heterogeneity: float
    steps: int
    courses: tuple[Course, ...]

    @cached_property
    def errors(self) -> list[float]:
        """The final error by warm-up, as the mean over seeds."""
        return [fmean(each) for each in zip(*(one.errors for one in self.courses), strict=True)]

    @property
    def best(self) -> int:
        """The best fixed warm-up in hindsight, one for all seeds."""
        return self.errors.index(min(self.errors))

    @property
    def gain(self) -> float:
        """The part of FedAvg's error that the best warm-up saves."""
        return 1 - self.errors[self.best] / self.errors[-1]

    def warm_ups(self, rule: Rule) -> list[int]:
        """After how many rounds a rule freezes, seed by seed."""
        return [warm_up(rule, one.kernel, one.pace) for one in self.courses]

    def error(self, rule: Rule) -> float:
        """The final error under a rule, as the mean over seeds."""
        found = zip(self.courses, self.warm_ups(rule), strict=True)
        return fmean(one.errors[done] for one, done in found)

    def excess(self, rule: Rule) -> float:
        """By which part a rule's error lies above that of the best warm-up; below 0 if it beats it."""
        return self.error(rule) / self.errors[self.best] - 1

    def excess_by_seed(self, rule: Rule) -> list[float]:
        """The same against the best warm-up of each seed, which is a harder thing to know."""
        found = zip(self.courses, self.warm_ups(rule), strict=True)
        return [one.errors[done] / min(one.errors) - 1 for one, done in found]


def cells(seeds: Sequence[int], folder: Path) -> Iterator[Cell]:
    """The whole grid, a cell at a time; courses that were played before are in the folder."""
    for heterogeneity in HETEROGENEITIES:
        for steps in STEPS:
            yield cell(heterogeneity, steps, seeds, folder)


def noisy(seeds: Sequence[int], folder: Path) -> Iterator[Cell]:
    """Some cells in which each step looks at a quarter of a client's rows."""
    for heterogeneity in (0.0, 0.25, 0.5, 1.0):
        for steps in (5, 20):
            yield cell(heterogeneity, steps, seeds, folder, batch=Setting.rows // 4)


def cell(
    heterogeneity: float, steps: int, seeds: Sequence[int], folder: Path, batch: int = 0
) -> Cell:
    """One cell."""
    setting, pace = Setting(heterogeneity), Pace(steps)
    made = (kept(setting, pace, seed, folder, batch) for seed in seeds)
    return Cell(heterogeneity, steps, tuple(made))


def joined(one: Cell, other: Cell) -> Cell:
    """A cell with the seeds of both."""
    return Cell(one.heterogeneity, one.steps, (*one.courses, *other.courses))


def differing(grid: Iterable[Cell]) -> list[Cell]:
    """The cells whose clients differ: where they agree, errors are too near 0 for a share of them."""
    return [cell for cell in grid if cell.heterogeneity]


def chosen(grid: Sequence[Cell]) -> dict[type[Bend | Balance], dict[float, float]]:
    """The mean excess of every constant that is tried, by rule."""
    return {
        kind: {share: fmean(c.excess(kind(share)) for c in differing(grid)) for share in shares}
        for kind, shares in SHARES.items()
    }
