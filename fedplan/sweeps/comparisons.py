# SPDX-License-Identifier: Apache-2.0
"""Comparisons: groups of runs that differ only in their seed, each against the first group."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from io import StringIO
from math import fsum, isfinite
from pathlib import Path
from statistics import mean
from typing import Any, get_args

from fedplan.data.metrics import metric_direction
from fedplan.errors import FedplanError, printable
from fedplan.privacy.accounting.budget import Unit
from fedplan.reports.figures.drawing import spreadsheet_safe
from fedplan.reports.formats import TRAFFIC_LABELS, duration, megabytes
from fedplan.reports.pages.facts import group_by_seed
from fedplan.studies.run_scores import GLOBAL_PREFIXES, SPREAD_PREFIXES, ScoreKind, score_text
from fedplan.sweeps.results import (
    ON_VALIDATION,
    RoleHistory,
    RunResult,
    choose_scores,
    describe_role_differences,
    describe_study_differences,
    find_run_folders,
    read_role_history,
    read_run_result,
)
from fedplan.sweeps.statistics import Interval, format_p_value, holm, mean_interval, p_value

FEW_SEEDS = 5
"""With fewer seeds, a comparison has a note that its intervals are wide."""
EMPTY_CELL = ""
"""Text of a table cell without a value."""


@dataclass(frozen=True)
class RunGroup:
    """The runs of one study that differ only in their seed, by seed; at least one."""

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
        """Return the mean of a number such as `upload_bytes`; None if it is None for any run."""
        values = [getattr(run, name) for run in self.runs.values()]
        return mean(values) if all(value is not None for value in values) else None

    def mean_score(self, kind: ScoreKind) -> Interval | None:
        """Return the mean over runs of a score of their last evaluation; None if one lacks it."""
        scores = [run.scores.find(kind) for run in self.runs.values()]
        values = [score.value for score in scores if score]
        return mean_interval(values) if len(values) == len(scores) else None


@dataclass(frozen=True)
class GroupComparison:
    """One group of runs, compared with the baseline group, which itself has only a score.

    `score` is the mean over the group's seeds, `difference` that over the common seeds. `p` is of
    the paired t test, `p_holm` corrected for the number of groups; None if not defined.
    """

    group: RunGroup
    score: Interval
    difference: Interval | None = None
    p: float | None = None
    p_holm: float | None = None
    differences: tuple[str, ...] = ()


@dataclass(frozen=True)
class Comparison:
    """A comparison of groups of runs by the metric `score`; see `compare`.

    `rows`: one for each group; the first is the baseline. `notes`: sentences on runs that were left
    out and on limits of the statistics. `others`: the same groups by further scores, if no single
    one matters for all plans.
    """

    score: str
    higher_is_better: bool
    rows: tuple[GroupComparison, ...]
    notes: tuple[str, ...]
    others: tuple[Comparison, ...] = ()

    @property
    def baseline(self) -> RunGroup:
        """The group that the others are compared with."""
        return self.rows[0].group

    def markdown(self) -> str:
        """Return the comparison as Markdown: the tables, differences in words, and notes."""
        parts = [markdown_table(names, cells) for names, cells in self.tables]
        if different := [row for row in self.rows if row.differences]:
            lines = [f"- **{row.group.label}**: {'; '.join(row.differences)}." for row in different]
            parts += [f"Differences from {self.baseline.label}:\n", *lines, ""]
        notes = (*self.notes, *self.table_explanations)
        parts += [f"Note: {printable(note)}." for note in notes]
        return "\n".join(parts) + "\n"

    @property
    def table_explanations(self) -> list[str]:
        """Sentences, without a period, that explain the columns of the tables."""
        texts = list[str]()
        for each in (self, *self.others):
            better = "higher" if each.higher_is_better else "lower"
            examples = each.score_examples
            on = f", on {examples}" if examples else ""
            texts.append(f"{each.score} is of the last round that has it{on}; {better} is better")
            texts[-1] += f"; {each.choice}" if each.choice else ""
        texts.append("± is half the width of the 95 % confidence interval over seeds (Student's t)")
        if len(self.rows) > 1:
            texts[-1] += (
                f"; 'minus {self.baseline.label}' is the mean difference paired by seed, with an "
                "interval for each row by itself; p is of the paired t test, corrected for all "
                "rows of the table (Holm)"
            )
        return texts

    @property
    def choice(self) -> str:
        """Which group has the best mean, and on which examples it is so; "" for a single group."""
        means = {row.group.label: row.score.mean for row in self.rows if isfinite(row.score.mean)}
        if len(means) < 2:
            return ""
        best = (max if self.higher_is_better else min)(means.values())
        labels = [label for label, mean in means.items() if mean == best]
        have, chosen = "has" if len(labels) == 1 else "have", ""
        if self.score.startswith(ON_VALIDATION):
            chosen = ", chosen on validation"
        elif self.score.startswith((*SPREAD_PREFIXES, *GLOBAL_PREFIXES)):
            chosen = ", chosen on the test: optimistic"
        return f"{' and '.join(labels)} {have} the best mean{chosen}"

    @property
    def score_examples(self) -> str:
        """On which examples the score is, if all runs have it on the same; else ""."""
        if self.score.startswith(ON_VALIDATION):
            return "validation examples"
        if self.score.startswith(SPREAD_PREFIXES):
            return "each client's own test examples"
        if not self.score.startswith(GLOBAL_PREFIXES):
            return ""
        runs = [run for row in self.rows for run in row.group.runs.values()]
        examples = {s.examples for run in runs if (s := run.scores.find("global"))}
        return examples.pop() if len(examples) == 1 else ""

    @property
    def side_scores(self) -> dict[ScoreKind, str]:
        """Kinds and names of the runs' further scores, which stand beside the compared one."""
        scores = [s for row in self.rows for s in row.group.first.scores.scores]
        labels = {s.kind: s.label for s in scores if s.column != self.score}
        return {kind: labels[kind] for kind in get_args(ScoreKind) if kind in labels}

    @property
    def tables(self) -> list[tuple[list[str], list[list[str]]]]:
        """The names of columns and the cells of each table; those of `others` have no costs."""
        tables = [(self.column_names, [self.row_cells(row) for row in self.rows])]
        width = 5 if len(self.rows) > 1 else 3
        for other in self.others:
            cells = [other.row_cells(row)[:width] for row in other.rows]
            tables.append((other.column_names[:width], cells))
        return tables

    @property
    def column_names(self) -> list[str]:
        """The names of the table's columns."""
        paired = [f"minus {self.baseline.label}", "p (Holm)"] if len(self.rows) > 1 else []
        epsilon = ["epsilon"] if self._has_epsilon else []
        sides = self.side_scores.values()
        return ["runs", "seeds", self.score, *paired, *sides, *TRAFFIC_LABELS, *epsilon,
                "rounds", "time"]  # fmt: skip

    def row_cells(self, row: GroupComparison) -> list[str]:
        """Return the cells of a group's row in the table, in the order of `column_names`."""
        group, difference = row.group, row.difference.text() if row.difference else EMPTY_CELL
        up, down, seconds = map(group.mean_of, ("upload_bytes", "download_bytes", "seconds"))
        epsilon, rounds = group.mean_of("epsilon_spent"), group.mean_of("rounds")
        epsilon_cell = f"{epsilon:.3g}" if epsilon is not None else EMPTY_CELL
        sides = [group.mean_score(kind) for kind in self.side_scores]
        return [
            group.label,
            str(row.score.count),
            row.score.text(),
            *([difference, format_p_value(row.p_holm)] if len(self.rows) > 1 else []),
            *(side.text() if side else EMPTY_CELL for side in sides),
            megabytes(int(up)) if up is not None else EMPTY_CELL,
            megabytes(int(down)) if down is not None else EMPTY_CELL,
            *([epsilon_cell] if self._has_epsilon else []),
            f"{rounds:g}",
            duration(seconds) if seconds is not None else EMPTY_CELL,
        ]

    @property
    def _has_epsilon(self) -> bool:
        return any(row.group.mean_of("epsilon_spent") is not None for row in self.rows)

    def csv(self) -> str:
        """Return the tables as CSV, with a line for each group and metric; unknown values are "".

        Numbers are not rounded, sizes in bytes, times in seconds. An interval is three columns: the
        mean, and both ends.
        """
        rows = list[dict[str, Any]]()
        tables = self.json()
        every = (tables, *tables["others"])
        for metric, values in ((each["metric"], row) for each in every for row in each["groups"]):
            intervals = {name: values.pop(name) for name in ("score", "difference")}
            intervals |= values.pop("scores")
            del values["runs"], values["differences"]
            for name, interval in intervals.items():
                mean, low, high = interval.values() if interval else (None, None, None)
                values |= {name: mean, f"{name}_low": low, f"{name}_high": high}
            label = spreadsheet_safe(values.pop("label"))
            rows.append({"label": label, "metric": metric, **values})
        output = StringIO()
        columns = dict.fromkeys(name for row in rows for name in row)
        writer = csv.DictWriter(output, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return output.getvalue()

    def json(self) -> dict[str, Any]:
        """Return the comparison as plain values; numbers that are not finite become None."""

        def finite(number: float | None) -> float | None:
            return number if number is not None and isfinite(number) else None

        def ends(interval: Interval | None) -> dict[str, float | None] | None:
            names = ("mean", "low", "high")
            return {name: finite(getattr(interval, name)) for name in names} if interval else None

        means = ("upload_bytes", "download_bytes", "epsilon_spent", "rounds", "seconds")
        groups = [
            {
                "label": row.group.label,
                "seeds": row.score.count,
                "score": ends(row.score),
                "scores": {k: ends(row.group.mean_score(k)) for k in self.side_scores},
                "difference": ends(row.difference),
                "p": row.p,
                "p_holm": row.p_holm,
                **{name: row.group.mean_of(name) for name in means},
                "runs": [
                    {"seed": n, "folder": str(run.folder), "score": finite(run.score(self.score))}
                    for n, run in sorted(row.group.runs.items())
                ],
                "differences": list(row.differences),
            }
            for row in self.rows
        ]
        return {
            "metric": self.score,
            "higher_is_better": self.higher_is_better,
            "baseline": self.baseline.label,
            "groups": groups,
            "choice": self.choice,
            "notes": list(self.notes),
            "others": [other.json() for other in self.others],
        }

    def html(self) -> str:
        """Return the comparison as one HTML page with figures."""
        from fedplan.sweeps.page import comparison_page

        return comparison_page(self)


def compare(places: Sequence[Path | str], *, score: str = "") -> Comparison:
    """Compare finished runs, grouped by everything but their seed, with the first group.

    `places`: folders of runs and of sweeps. The first group is the baseline; differences are paired
    by seed. `score`: the metric to compare; by default the score that matters for the plans
    (`choose_scores`), with a further table if plans differ in that. The value of a run is that of
    the last round with the metric. Runs that are unfinished or unreadable are left
    out with a note. Raises FedplanError if a place is neither run nor sweep, if no run is left, if
    two runs of a group have one seed, or if not all runs have the score.
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
    groups = group_results(results)
    first, *others = choose_scores(score, results)
    comparison = compare_groups(groups, first, notes)
    further = tuple(compare_groups(groups, other) for other in others)
    # The notes of all tables in one list, each once.
    every = dict.fromkeys(note for each in (comparison, *further) for note in each.notes)
    return replace(comparison, others=further, notes=tuple(every))


def group_results(results: Sequence[RunResult]) -> list[RunGroup]:
    """Return groups of the runs that differ only in their seed, in the order of first runs.

    Raises FedplanError if a group has two runs of one seed.
    """
    groups = list[RunGroup]()
    for label, runs in group_by_seed(results, lambda each: (each.study, each.plan, each.folder)):
        by_seed = dict[int, RunResult]()
        for run in runs:
            if (other := by_seed.setdefault(run.study.seed, run)) is not run:
                raise FedplanError(
                    f"{run.folder} and {other.folder} have the same study and seed: name one of "
                    "them"
                )
        groups.append(RunGroup(label, by_seed))
    return groups


def compare_groups(groups: Sequence[RunGroup], score: str, notes: Sequence[str] = ()) -> Comparison:
    """Compare each group with the first one by a score that all runs have."""
    baseline = groups[0]
    # So that the ledger of the baseline is read at most once, and only if it is needed.
    baseline_scores, read_roles = baseline.scores(score), cache(read_role_history)
    rows = list[GroupComparison]()
    for group in groups:
        scores = group.scores(score)
        row = GroupComparison(group, mean_interval(list(scores.values())))
        if group is not baseline:
            common = [seed for seed in scores if seed in baseline_scores]
            paired = [scores[seed] - baseline_scores[seed] for seed in common]
            sentences = _describe_differences(baseline.first, group.first, read_roles)
            row = replace(
                row,
                difference=mean_interval(paired) if paired else None,
                p=p_value(paired) if paired else None,
                differences=tuple(sentences),
            )
        rows.append(row)
    corrected = holm([row.p for row in rows])
    rows = [replace(row, p_holm=p) for row, p in zip(rows, corrected, strict=True)]
    higher_is_better = baseline.first.higher_is_better(score)
    if metric_direction(score, baseline.first.directions) is None:
        notes = (*notes, f"{score} says no direction: a higher value counts as better")
    notes = (*notes, *_seed_notes(rows), *_score_notes(rows, score), *_privacy_notes(groups))
    return Comparison(score, higher_is_better, tuple(rows), notes)


def _describe_differences(
    baseline: RunResult, other: RunResult, read_roles: Callable[[Path], RoleHistory]
) -> list[str]:
    """Return sentences on the fields, plan and roles in which a run differs from the baseline run.

    Roles are compared only if the plans differ and neither run has client-level DP.
    """
    sentences = describe_study_differences(baseline.study, other.study)
    if other.plan == baseline.plan:
        return sentences
    sentences.append(f"the plan is {other.plan}, not {baseline.plan}")
    if baseline.study.client_level_dp or other.study.client_level_dp:
        return sentences
    roles = read_roles(baseline.folder), read_roles(other.folder)
    return sentences + describe_role_differences(*roles)


def _privacy_notes(groups: Sequence[RunGroup]) -> list[str]:
    """Return a sentence for each unit of privacy, with the sum of all runs' epsilon."""
    runs = [run for group in groups for run in group.runs.values()]
    notes = list[str]()
    for unit in get_args(Unit):
        private = [
            (run.epsilon_spent, run.study.privacy.delta)
            for run in runs
            if run.study.privacy
            and run.study.privacy.unit == unit
            and run.epsilon_spent is not None
        ]
        if len(private) > 1:
            epsilon, delta = map(fsum, zip(*private, strict=True))
            notes.append(
                f"the {len(private)} runs with {unit}-level differential privacy cost epsilon "
                f"{epsilon:.4g} at delta {delta:.3g} together (plain addition): whoever chooses "
                "one of them by private examples has used all of them, and scores without noise "
                "(evaluate.noise_multiplier) are not covered"
            )
    return notes


def _seed_notes(rows: Sequence[GroupComparison]) -> list[str]:
    """Return sentences on few seeds, diverged runs, and seeds without a pair in the baseline."""
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


def _score_notes(rows: Sequence[GroupComparison], score: str) -> list[str]:
    """Return sentences on scores of models with untrained params, and on scores without a test."""
    notes = list[str]()
    for row in rows if score.startswith(GLOBAL_PREFIXES) else ():
        if kinds := row.group.first.rules.untrained:
            notes.append(
                f"{row.group.label}: {score} is of a model whose {kinds} was never trained, since "
                "each client keeps its own"
            )
    for row in rows:
        lows, highs = (row.group.scores(f"{score}_{end}").values() for end in ("low", "high"))
        if ends := [*lows, *highs]:
            low, high = map(score_text, (min(ends), max(ends)))
            notes.append(
                f"{row.group.label}: bins or noise leave {score} of its runs anywhere from {low} "
                f"to {high}, beside the interval over seeds"
            )
    for row in rows[1:]:
        if row.difference and row.difference.mean == 0 and row.difference.half_width == 0:
            notes.append(f"{row.group.label}: {score} is the same in every pair, so there is no p")
    return notes


def markdown_table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; bars in cells are escaped, and line breaks become spaces."""
    cells = [[" ".join(cell.replace("|", "\\|").split()) for cell in row] for row in (names, *rows)]
    lines = [f"| {' | '.join(row)} |" for row in cells]
    return "\n".join([lines[0], "|---" * len(names) + "|", *lines[1:], ""])
