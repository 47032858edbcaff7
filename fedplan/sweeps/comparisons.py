# SPDX-License-Identifier: Apache-2.0
"""Comparisons: groups of runs that differ only in seed, each against the first, seed by seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isfinite
from pathlib import Path
from statistics import mean
from typing import Any

from fedplan.errors import FedplanError
from fedplan.reports.groups import seed_groups
from fedplan.sweeps.differences import (
    Faring,
    faring_of,
    role_words,
    study_words,
)
from fedplan.sweeps.results import RunResult, result_of, runs_in, score_named
from fedplan.sweeps.statistics import Interval, holm, interval, p_value

FEW = 5
"""Seeds below which an interval says little."""


@dataclass(frozen=True)
class RunGroup:
    """Runs of one study over seeds; the label says what tells it from the other groups."""

    label: str
    runs: Mapping[int, RunResult]

    @property
    def first(self) -> RunResult:
        """The run of its lowest seed."""
        return self.runs[min(self.runs)]

    def scores(self, name: str) -> dict[int, float]:
        """A score by seed."""
        found = {seed: run.score(name) for seed, run in sorted(self.runs.items())}
        return {seed: score for seed, score in found.items() if score is not None}

    def number(self, name: str) -> float | None:
        """The mean of what each run came to: `up`, `down`, `epsilon`, `rounds` or `seconds`."""
        told = [getattr(run, name) for run in self.runs.values()]
        return mean(told) if all(each is not None for each in told) else None


@dataclass(frozen=True)
class Contrast:
    """A group against the first one: the score, the difference by seed, and what differs.

    `p` is of the paired t test, and `corrected` the same for as many comparisons as there are.
    """

    group: RunGroup
    score: Interval
    difference: Interval | None = None
    p: float | None = None
    corrected: float | None = None
    words: tuple[str, ...] = ()


@dataclass(frozen=True)
class Comparison:
    """Groups of runs, the first of which the others are compared with, by one score."""

    score: str
    higher: bool
    rows: tuple[Contrast, ...]
    notes: tuple[str, ...]

    @property
    def base(self) -> RunGroup:
        """The group that the others are compared with."""
        return self.rows[0].group

    def markdown(self) -> str:
        """It as Markdown: a table, what differs, and what to be careful with."""
        from fedplan.sweeps.tables import markdown

        return markdown(self)

    def csv(self) -> str:
        """Its table as CSV, numbers as they are."""
        from fedplan.sweeps.tables import csv_text

        return csv_text(self)

    def json(self) -> dict[str, Any]:
        """It as plain values."""
        from fedplan.sweeps.tables import plain

        return plain(self)

    def html(self) -> str:
        """It as one page, with figures of all groups."""
        from fedplan.sweeps.page import page

        return page(self)


def compare(places: Sequence[Path | str], *, score: str = "") -> Comparison:
    """Compare runs: folders of runs, and of sweeps with all of their runs.

    Runs that differ only in seed are one group, and the first group is what the others are compared
    with, seed by seed. The score is the one that the task is known by, of the common test if there
    is one, or the number of a round that is named; of each run the last round that has it counts.
    """
    folders, notes = runs_in(places)
    results = list[RunResult]()
    for folder in folders:
        try:
            each = result_of(folder)
        except FedplanError as error:  # as a kill in its first moments leaves it
            notes.append(f"{folder} cannot be read ({error}): left out")
            continue
        if each.over:
            results.append(each)
        else:
            rounds = each.study.train.rounds
            notes.append(f"{each.folder} is at round {each.rounds} of {rounds}: left out")
    if not results:
        raise FedplanError(
            "; ".join([*notes, "there is no run that ended: go on with one, then compare"])
        )
    return contrasted(grouped(results), score_named(score, results), notes)


def grouped(results: Sequence[RunResult]) -> list[RunGroup]:
    """Runs by all that they differ in but the seed, in the order in which they came."""
    told = seed_groups(results, lambda each: (each.study, each.plan, each.folder))
    return [RunGroup(label, _by_seed(runs)) for label, runs in told]


def _by_seed(runs: Sequence[RunResult]) -> dict[int, RunResult]:
    held = dict[int, RunResult]()
    for each in runs:
        if (before := held.setdefault(each.study.seed, each)) is not each:
            raise FedplanError(
                f"{each.folder} and {before.folder} are one study with one seed: name one of them"
            )
    return held


def contrasted(groups: Sequence[RunGroup], score: str, notes: Sequence[str] = ()) -> Comparison:
    """Each group against the first one, by a score that all of their runs have."""
    base = groups[0]
    kept, words = base.scores(score), _Words(base.first)
    rows = list[Contrast]()
    for group in groups:
        own = group.scores(score)
        paired = [own[seed] - kept[seed] for seed in own if seed in kept]
        first = group is base
        rows.append(
            Contrast(
                group,
                interval(list(own.values())),
                interval(paired) if paired and not first else None,
                p_value(paired) if paired and not first else None,
                words=() if first else tuple(words.of(group.first)),
            )
        )
    fixed = [
        Contrast(r.group, r.score, r.difference, r.p, p, r.words)
        for r, p in zip(rows, holm([r.p for r in rows]), strict=True)
    ]
    cautions = (*notes, *_cautions(fixed))
    return Comparison(score, base.first.higher(score), tuple(fixed), cautions)


@dataclass(frozen=True)
class _Words:
    """What tells runs from one of them, whose ledger is read once."""

    base: RunResult

    @cached_property
    def _faring(self) -> Faring:
        return faring_of(self.base.folder)

    def of(self, other: RunResult) -> list[str]:
        base, said = self.base, study_words(self.base.study, other.study)
        if other.plan == base.plan:
            return said
        said.append(f"the plan is {other.plan}, not {base.plan}")
        if base.study.hides_clients or other.study.hides_clients:
            return said  # what single clients did is told of nobody who is hidden
        return said + role_words(self._faring, faring_of(other.folder))


def _cautions(rows: Sequence[Contrast]) -> list[str]:
    """What a reader must know of so few seeds, or of seeds that do not pair."""
    found = list[str]()
    counts = [rows[0].score.count, *(r.difference.count for r in rows[1:] if r.difference)]
    if min(counts) == 1:
        found.append(
            "one seed: there is no interval, and a difference may be chance; run more seeds"
        )
    if 2 in counts:
        found.append("two seeds: the interval is 12.7 standard errors wide to each side, so wide "
                     "that it tells almost nothing")  # fmt: skip
    if any(2 < count < FEW for count in counts):
        found.append(f"fewer than {FEW} seeds: intervals are wide, by Student's t")
    for row in rows:
        if not isfinite(row.score.mean):
            found.append(f"{row.group.label}: a run diverged, and its score is no number")
    for row in rows[1:]:
        pairs = row.difference.count if row.difference else 0
        if pairs < row.score.count:
            found.append(
                f"{row.group.label}: {pairs} of {row.score.count} seeds stand in the first group "
                "too, and only those are paired"
            )
    return found
