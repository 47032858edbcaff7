# SPDX-License-Identifier: Apache-2.0
"""Comparisons: groups of runs that differ only in their seed, each against the first group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import isfinite
from pathlib import Path
from statistics import mean
from typing import Any

from fedplan.errors import FedplanError
from fedplan.reports.groups import group_by_seed
from fedplan.sweeps.results import RunResult, choose_score, find_run_folders, read_run_result
from fedplan.sweeps.run_differences import (
    RoleHistory,
    describe_role_differences,
    describe_study_differences,
    read_role_history,
)
from fedplan.sweeps.statistics import Interval, holm, mean_interval, p_value

FEW_SEEDS = 5
"""With fewer seeds, a comparison has a note that its intervals are wide."""


@dataclass(frozen=True)
class RunGroup:
    """Runs of one study by seed; the label has the settings that differ from the other groups."""

    label: str
    runs: Mapping[int, RunResult]

    @property
    def first(self) -> RunResult:
        """The run of the lowest seed."""
        return self.runs[min(self.runs)]

    def scores(self, name: str) -> dict[int, float]:
        """Return a metric by seed, of the runs that have it."""
        scores = {seed: run.score(name) for seed, run in sorted(self.runs.items())}
        return {seed: score for seed, score in scores.items() if score is not None}

    def mean_of(self, name: str) -> float | None:
        """Return the mean over runs of `up`, `down`, `epsilon`, `rounds` or `seconds`.

        Returns None if a run does not have it.
        """
        values = [getattr(run, name) for run in self.runs.values()]
        return mean(values) if all(value is not None for value in values) else None


@dataclass(frozen=True)
class GroupComparison:
    """A group of runs against the baseline group.

    `score` is the mean score over seeds, and `difference` the mean difference from the baseline
    over the common seeds. `p` is the p-value of the paired t test, and `p_holm` corrected for the
    number of groups. `differences` are sentences on fields and roles. The baseline itself has only
    a score.
    """

    group: RunGroup
    score: Interval
    difference: Interval | None = None
    p: float | None = None
    p_holm: float | None = None
    differences: tuple[str, ...] = ()


@dataclass(frozen=True)
class Comparison:
    """A comparison of groups of runs by the metric `score`; the first row is the baseline.

    `notes` are sentences on runs that were left out and on limits of the statistics.
    """

    score: str
    higher_is_better: bool
    rows: tuple[GroupComparison, ...]
    notes: tuple[str, ...]

    @property
    def baseline(self) -> RunGroup:
        """The group that the others are compared with."""
        return self.rows[0].group

    def markdown(self) -> str:
        """Return the comparison as Markdown: the table, differences in words, and notes."""
        from fedplan.sweeps.tables import comparison_markdown

        return comparison_markdown(self)

    def csv(self) -> str:
        """Return the table as CSV with unrounded numbers."""
        from fedplan.sweeps.tables import comparison_csv

        return comparison_csv(self)

    def json(self) -> dict[str, Any]:
        """Return the comparison as plain values."""
        from fedplan.sweeps.tables import comparison_values

        return comparison_values(self)

    def html(self) -> str:
        """Return the comparison as one HTML page with figures."""
        from fedplan.sweeps.page import comparison_page

        return comparison_page(self)


def compare(places: Sequence[Path | str], *, score: str = "") -> Comparison:
    """Compare the runs in folders of runs and of sweeps.

    Runs that differ only in their seed are one group; the first group is the baseline, and
    differences are paired by seed. `score` is the metric to compare, by default the task's primary
    metric; each run counts with the last round that has it. Runs that are unfinished or cannot be
    read are left out with a note. Raises FedplanError if no run is left, or if not all runs have
    the score.
    """
    folders, notes = find_run_folders(places)
    results = list[RunResult]()
    for folder in folders:
        try:
            result = read_run_result(folder)
        except FedplanError as error:  # for example a run that was killed as it started
            notes.append(f"{folder} cannot be read ({error}): left out")
            continue
        if result.finished:
            results.append(result)
        else:
            rounds = result.study.train.rounds
            notes.append(f"{result.folder} is at round {result.rounds} of {rounds}: left out")
    if not results:
        raise FedplanError(
            "; ".join([*notes, "there is no finished run: resume a run, then compare"])
        )
    return compare_groups(group_results(results), choose_score(score, results), notes)


def group_results(results: Sequence[RunResult]) -> list[RunGroup]:
    """Return groups of the runs that differ only in their seed, in the order of first runs.

    Raises FedplanError if a group has two runs of one seed.
    """
    groups = group_by_seed(results, lambda each: (each.study, each.plan, each.folder))
    return [RunGroup(label, _runs_by_seed(runs)) for label, runs in groups]


def _runs_by_seed(runs: Sequence[RunResult]) -> dict[int, RunResult]:
    by_seed = dict[int, RunResult]()
    for run in runs:
        if (other := by_seed.setdefault(run.study.seed, run)) is not run:
            raise FedplanError(
                f"{run.folder} and {other.folder} have the same study and seed: name one of them"
            )
    return by_seed


def compare_groups(groups: Sequence[RunGroup], score: str, notes: Sequence[str] = ()) -> Comparison:
    """Compare each group with the first one by a score that all runs have.

    `notes` come first in the notes of the comparison.
    """
    baseline = groups[0]
    baseline_scores, differences = baseline.scores(score), _DifferenceReader(baseline.first)
    rows = list[GroupComparison]()
    for group in groups:
        scores = group.scores(score)
        row = GroupComparison(group, mean_interval(list(scores.values())))
        if group is not baseline:
            common = [seed for seed in scores if seed in baseline_scores]
            paired = [scores[seed] - baseline_scores[seed] for seed in common]
            row = replace(
                row,
                difference=mean_interval(paired) if paired else None,
                p=p_value(paired) if paired else None,
                differences=tuple(differences.describe(group.first)),
            )
        rows.append(row)
    corrected = holm([row.p for row in rows])
    rows = [replace(row, p_holm=p) for row, p in zip(rows, corrected, strict=True)]
    higher_is_better = baseline.first.higher_is_better(score)
    return Comparison(score, higher_is_better, tuple(rows), (*notes, *_seed_notes(rows)))


@dataclass(frozen=True)
class _DifferenceReader:
    """Describes differences of runs from a baseline run, whose ledger is read at most once."""

    baseline: RunResult

    @cached_property
    def _baseline_roles(self) -> RoleHistory:
        return read_role_history(self.baseline.folder)

    def describe(self, other: RunResult) -> list[str]:
        """Return sentences on fields, plan and roles of a run that differ from the baseline.

        Roles of clients are left out if one of the runs has client-level DP.
        """
        baseline = self.baseline
        sentences = describe_study_differences(baseline.study, other.study)
        if other.plan == baseline.plan:
            return sentences
        sentences.append(f"the plan is {other.plan}, not {baseline.plan}")
        if baseline.study.client_level_dp or other.study.client_level_dp:
            return sentences
        other_roles = read_role_history(other.folder)
        return sentences + describe_role_differences(self._baseline_roles, other_roles)


def _seed_notes(rows: Sequence[GroupComparison]) -> list[str]:
    """Return notes on few seeds, diverged runs, and seeds without a pair in the baseline."""
    notes = list[str]()
    counts = [rows[0].score.count, *(r.difference.count for r in rows[1:] if r.difference)]
    if min(counts) == 1:
        notes.append(
            "one seed: there is no interval, and a difference may be chance; run more seeds"
        )
    if 2 in counts:
        notes.append("two seeds: the interval reaches 12.7 standard errors to each side, so wide "
                     "that it says almost nothing")  # fmt: skip
    if any(2 < count < FEW_SEEDS for count in counts):
        notes.append(f"fewer than {FEW_SEEDS} seeds: intervals are wide, by Student's t")
    for row in rows:
        if not isfinite(row.score.mean):
            notes.append(f"{row.group.label}: a run diverged, so that its score is not a number")
    for row in rows[1:]:
        pairs = row.difference.count if row.difference else 0
        if pairs < row.score.count:
            notes.append(
                f"{row.group.label}: {pairs} of {row.score.count} seeds are in the first group "
                "too, and only these are paired"
            )
    return notes
