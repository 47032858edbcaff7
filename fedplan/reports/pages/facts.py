# SPDX-License-Identifier: Apache-2.0
"""The data of runs for a report, read from their folders once; runs by their seeds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import fsum, isfinite

from fedplan.errors import FedplanError
from fedplan.federation.agreement import Agreement
from fedplan.federation.ledger.history import Metrics
from fedplan.federation.ledger.records import RoundRecord, TurnRecord
from fedplan.language.resolution import Participants, phase_names
from fedplan.methods.phases import PlannedPhases
from fedplan.reports.figures.charts import Series, mean_series
from fedplan.reports.forecasts import Forecast, forecast
from fedplan.reports.groups import group_by_seed
from fedplan.reports.status import RunSnapshot, run_snapshot
from fedplan.reports.study_explanation import full_participation, read_privacy_statement
from fedplan.studies.run import RunReader
from fedplan.studies.run_scores import (
    CLIENT_COLUMNS,
    RunScores,
    ScoreKind,
    ScoreRules,
    score_rules,
)
from fedplan.studies.schema import Study


@dataclass(frozen=True)
class RunFacts:
    """A run as reports see it, read by `read_run_facts`.

    `rounds` are the ledger records of the closed rounds, and `turns` the records of the turns of
    each of these rounds.
    """

    run: RunReader
    snapshot: RunSnapshot
    metrics: Metrics
    rounds: tuple[RoundRecord, ...]
    turns: tuple[tuple[TurnRecord, ...], ...]

    @property
    def study(self) -> Study:
        """The study of the run."""
        return self.run.study

    @property
    def agreement(self) -> Agreement:
        """The agreement of the run's server and clients."""
        return self.run.agreement

    @property
    def privacy_unit(self) -> str:
        """The unit of differential privacy: "client", "example", or "" if it is off."""
        return self.study.privacy.unit if self.study.privacy else ""

    @property
    def client_level_dp(self) -> bool:
        """Whether differential privacy protects clients, so that their turns must not be shown."""
        return self.privacy_unit == "client"

    @cached_property
    def epsilon_spent(self) -> float | None:
        """Epsilon spent so far; None without differential privacy, or if only the sites know it."""
        try:
            return read_privacy_statement(self.run.folder, with_sweep=False).epsilon_spent
        except FedplanError:
            return None

    @cached_property
    def rules(self) -> ScoreRules:
        """How to read the scores of the run from its metrics."""
        return score_rules(self.run)

    @property
    def score(self) -> tuple[str, bool]:
        """The name of the task's main metric, and whether higher is better."""
        return self.rules.metric, self.rules.higher_is_better

    @cached_property
    def scores(self) -> RunScores:
        """The scores of the last evaluated round."""
        return self.rules.of_run(self.metrics)

    def score_series(self, name: str, kind: ScoreKind) -> Series:
        """Return a score by round, with its intervals as a band; no points if not measured."""
        every = ((row["round"], self.rules.of_row(row).find(kind)) for row in self.metrics)
        scores = [(number, score) for number, score in every if score]
        band = tuple(score.interval for _, score in scores if score.interval)
        points = tuple((number, score.value) for number, score in scores)
        return Series(name, points, band if len(band) == len(points) else ())

    def column(self, name: str, *columns: str) -> Series:
        """Return the first of the metrics `columns` with a finite value, by round; may be empty."""
        for column in columns:
            points = [(row["round"], row[column]) for row in self.metrics if column in row]
            if any(isfinite(value) for _, value in points):
                return Series(name, tuple(points))
        return Series(name, ())

    @cached_property
    def client_scores(self) -> dict[str, Series]:
        """The main metric of each client's personal model on its own examples, by client name.

        Of sites that measure only the global model, that. Clients without a measurement are left
        out.
        """
        metric = self.rules.metric
        scores = {
            name: self.column(name, *(column.format(name, metric) for column in CLIENT_COLUMNS))
            for name in self.roster
        }
        return {name: series for name, series in scores.items() if series.points}

    def mean_client_scores(self, name: str) -> Series:
        """Return the mean of `client_scores` by round, as a series called `name`."""
        by_round = dict[float, list[float]]()
        for x, y in (point for series in self.client_scores.values() for point in series.points):
            by_round.setdefault(x, []).append(y)
        return Series(name, tuple((x, fsum(ys) / len(ys)) for x, ys in sorted(by_round.items())))

    @cached_property
    def roster(self) -> dict[str, Mapping[str, str]]:
        """The traits of every known client by name.

        Known are the clients of the study file or the simulated data, and without client-level
        differential privacy also every client that took part.
        """
        names = self.study.clients.names or (
            self.run.clients if self.study.has_central_data else []
        )
        traits: dict[str, Mapping[str, str]] = {
            name: self.study.clients.traits.get(name, {}) for name in names
        }
        if not self.client_level_dp:
            traits |= {turn.client: turn.traits for turns in self.turns for turn in turns}
        return traits

    @cached_property
    def forecast(self) -> Forecast:
        """The forecast of the run's plan; phases begin as planned, or where the ledger has them."""
        agreement, phase_rule = self.agreement, self.agreement.method.phase_rule
        announced = dict[str, int]()
        for record in self.rounds:
            announced.setdefault(record.phase, record.round - 1)
        names = phase_names(agreement.method.plan)
        phases = {name: after for name, after in announced.items() if name in names}
        everyone = full_participation(self.study, agreement.guarantee)
        return forecast(
            agreement.method.plan,
            agreement.params,
            rounds=max(self.study.train.rounds, self.run.round),
            phases=phase_rule.after if isinstance(phase_rule, PlannedPhases) else phases,
            participants=Participants(self.roster, everyone) if self.roster else None,
            wire_cost=agreement.wire_cost,
        )


def read_run_facts(run: RunReader) -> RunFacts:
    """Read the ledger records, metrics and status of a run; turns of an open round are left out.

    Raises FedplanError if the number of roles in the record of a turn is not the number of params.
    """
    rounds, turns = list[RoundRecord](), list[tuple[TurnRecord, ...]]()
    open_turns = list[TurnRecord]()
    for record in run.records:
        if isinstance(record, RoundRecord):
            rounds.append(record)
            turns.append(tuple(open_turns))
            open_turns = []
        elif len(record.roles) == len(run.params):
            open_turns.append(record)
        else:
            raise FedplanError(
                f"{run.folder}: a turn of round {record.round} has {len(record.roles)} roles for "
                f"{len(run.params)} params, so there is no report; run: fedplan verify {run.folder}"
            )
    return RunFacts(run, run_snapshot(run.folder), run.metrics, tuple(rounds), tuple(turns))


@dataclass(frozen=True)
class SeedGroup:
    """Runs that differ only in their seed, under a name that labels their common line in charts."""

    name: str
    runs: tuple[RunFacts, ...]

    def series(self, of: Callable[[RunFacts], Series]) -> Series:
        """Return the mean of `of(run)` over the runs that have points, with a band of its range."""
        return mean_series(self.name, [series for run in self.runs if (series := of(run)).points])

    def scores(self, kind: ScoreKind) -> Series:
        """Return the mean of a score over the runs that have it."""
        return self.series(lambda facts: facts.score_series("", kind))


def group_runs(runs: Sequence[RunFacts]) -> list[SeedGroup]:
    """Group runs that differ only in their seed, under distinct names, in order of first runs."""
    groups = group_by_seed(
        runs, lambda facts: (facts.study, facts.agreement.method.plan.text, facts.run.folder)
    )
    return [SeedGroup(name, tuple(group)) for name, group in groups]


def run_names(runs: Sequence[RunFacts]) -> list[str]:
    """Return a distinct name for each run: its group's, with seed or folder; "" for one run."""
    if len(runs) == 1:
        return [""]
    group_by_run = {id(run): group for group in group_runs(runs) for run in group.runs}
    names = list[str]()
    for run in runs:
        group = group_by_run[id(run)]
        seed = f", seed {run.study.seed}" if len(group.runs) > 1 else ""
        names.append(f"{group.name}{seed}")
    duplicates = {name for name in names if names.count(name) > 1}
    return [
        f"{name} in {run.run.folder}" if name in duplicates else name
        for name, run in zip(names, runs, strict=True)
    ]
