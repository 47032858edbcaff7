# SPDX-License-Identifier: Apache-2.0
"""The data of runs for a report, read from their folders once; runs by their seeds."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import fsum, isfinite
from pathlib import Path
from typing import Any, TypeVar

from fedplan.errors import FedplanError, printable
from fedplan.federation.agreement import Agreement
from fedplan.federation.ledger.history import Metrics
from fedplan.federation.ledger.records import RoundRecord, TurnRecord
from fedplan.language.resolution import Participants, phase_names
from fedplan.methods.phases import PlannedPhases
from fedplan.reports.figures.charts import Series, mean_series
from fedplan.reports.forecasts import Forecast, forecast
from fedplan.reports.status import RunSnapshot, run_snapshot
from fedplan.reports.study_explanation import full_participation, read_privacy_statement
from fedplan.studies.run import RunReader
from fedplan.studies.run_scores import CLIENT_COLUMNS, RunScores, ScoreKind, ScoreRules, score_rules
from fedplan.studies.schema import Study, flatten_fields

IGNORED_FIELDS: dict[str, Any] = {
    **dict.fromkeys(("seed", "name", "threads", "device", "deterministic", "timeouts"), True),
    "train": {"activation_cache_mb"},
}
"""Fields in which runs of one group may differ: seed, name, and settings of the machine."""
PLAN_FIELDS = ("method.plan", "method.from_python")
"""Fields that hold a plan; a name has the plan's text instead."""
MAX_PLAN_LENGTH = 40
"""The most characters of a plan in a name, if the names of folders are shorter and distinct."""
UNSET: tuple[Any, ...] = (None, "", [], {})
"""Values of a field that is not set."""
MAX_NAME_LENGTH = 72
"""The most characters of a group's name."""

T = TypeVar("T")
Member = tuple[Study, str, Path]
"""The study of a run, the text of its plan, and its folder."""


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

    @cached_property
    def traffic(self) -> tuple[int, int]:
        """The uploaded and the downloaded bytes of all rounds."""
        rounds = self.rounds
        return sum(r.upload_bytes for r in rounds), sum(r.download_bytes for r in rounds)

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
        return self.study.client_level_dp

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
        scores = dict[str, Series]()
        for name in self.roster:
            columns = (column.format(name, self.rules.metric) for column in CLIENT_COLUMNS)
            if (series := self.column(name, *columns)).points:
                scores[name] = series
        return scores

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
        own, study = self.study.clients, self.study
        names = own.names or (self.run.clients if study.has_central_data else [])
        traits: dict[str, Mapping[str, str]] = {name: own.traits.get(name, {}) for name in names}
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


def study_fields(study: Study) -> dict[str, Any]:
    """Return the fields of a study by dotted name, such as "train.lr", without IGNORED_FIELDS."""
    return flatten_fields(study.model_dump(mode="json", exclude=IGNORED_FIELDS))


def differing_fields(studies: Iterable[Study]) -> list[str]:
    """Return the dotted names of fields that differ; IGNORED_FIELDS are left out."""
    fields = [study_fields(each) for each in studies]
    names = dict.fromkeys(name for each in fields for name in each)
    return [name for name in names if any(f.get(name) != fields[0].get(name) for f in fields)]


def group_by_seed(runs: Iterable[T], member: Callable[[T], Member]) -> list[tuple[str, list[T]]]:
    """Group runs that differ only in their seed, or in IGNORED_FIELDS; return (name, runs) of each.

    Groups are in the order of their first runs; the names are distinct.
    """
    runs_by_fields = dict[str, list[T]]()
    for run in runs:
        key = json.dumps(study_fields(member(run)[0]), sort_keys=True)
        runs_by_fields.setdefault(key, []).append(run)
    groups = list(runs_by_fields.values())
    firsts = [member(min(group, key=lambda run: member(run)[0].seed)) for group in groups]
    names = _names(firsts)
    return list(zip(names, groups, strict=True))


def _names(firsts: Sequence[Member]) -> list[str]:
    """Return distinct names of groups, given the run with the lowest seed of each group."""
    fields = differing_fields(study for study, _, _ in firsts)
    by_plan = any(name in fields for name in PLAN_FIELDS)
    if by_plan and max(len(plan) for _, plan, _ in firsts) > MAX_PLAN_LENGTH:
        for texts in ([s.name for s, _, _ in firsts], [folder.name for _, _, folder in firsts]):
            short = all(len(text) <= MAX_PLAN_LENGTH for text in texts)
            if short and all(texts) and len(set(texts)) == len(texts):
                return [printable(text) for text in texts]
    namings: tuple[Callable[[Member], str], ...] = (
        lambda each: _label(study_fields(each[0]), each[1], fields) or each[0].name,
        lambda each: each[0].name,
        lambda each: each[2].name.rpartition(",seed=")[0] or each[2].name,
        lambda each: str(each[2]),
    )
    for naming in namings:
        texts = [printable(naming(each)) for each in firsts]
        names = [t if len(t) <= MAX_NAME_LENGTH else f"{t[: MAX_NAME_LENGTH - 1]}…" for t in texts]
        if all(names) and len(set(names)) == len(names):
            return names
    return [f"{study.name} ({number})" for number, (study, _, _) in enumerate(firsts, 1)]


def _label(values: Mapping[str, Any], plan: str, differing: Sequence[str]) -> str:
    """Return the differing fields of a study as a label: `fedavg, lr 0.001`.

    Method and plan stand alone; other fields have the last part of their name, or the whole name if
    two end alike. Unset fields are left out, unless no other differs.
    """
    values = {**values, **{name: plan for name in PLAN_FIELDS if values.get(name) not in UNSET}}
    alone = ("method.name", *PLAN_FIELDS)
    ends = [name.rpartition(".")[2] for name in differing]

    def short(name: str) -> str:
        end = name.rpartition(".")[2]
        return end if ends.count(end) == 1 else name

    present = [name for name in differing if values.get(name) not in UNSET]
    if not present:
        return f"{', '.join(map(short, differing))} not set" if differing else ""
    leading = [str(values[name]) for name in alone if name in present]
    settings = [f"{short(name)} {values[name]}" for name in present if name not in alone]
    return ", ".join([*leading, *settings])


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
