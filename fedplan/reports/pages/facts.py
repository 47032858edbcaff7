# SPDX-License-Identifier: Apache-2.0
"""Facts: what a report tells of one run, read from its folder once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import fsum, isfinite

from fedplan.data.own import OWN
from fedplan.data.tasks import task_class
from fedplan.errors import FedplanError
from fedplan.federation.agreement import Agreement
from fedplan.federation.history import Metrics
from fedplan.federation.participation import Participation
from fedplan.federation.record import RoundRecord, TurnRecord
from fedplan.language.crowds import Crowd, phases_in
from fedplan.methods.phases import Planned
from fedplan.reports.figures.series import Series
from fedplan.reports.forecasts import forecast
from fedplan.reports.status import RunLook, status_of
from fedplan.reports.views import Forecast
from fedplan.studies.run import Run
from fedplan.studies.schema import Study
from fedplan.studies.stage import participation_of

WORLD = ("world.", "sites.world.")
"""What the names of the world's scores begin with: on a common test, or on rows of clients."""
SHARES = ("accuracy", "f1", "precision", "recall", "auc")
"""How the names begin of scores that are shares, so that a higher one is better."""


@dataclass(frozen=True)
class RunFacts:
    """A run as a report tells of it: its numbers and its records by round, and who is hidden."""

    run: Run
    look: RunLook
    metrics: Metrics
    rounds: tuple[RoundRecord, ...]
    turns: tuple[tuple[TurnRecord, ...], ...]

    @property
    def study(self) -> Study:
        """The study that it is a run of."""
        return self.run.study

    @property
    def agreement(self) -> Agreement:
        """What both of its ends agreed on."""
        return self.run.agreement

    @property
    def hidden(self) -> str:
        """Whose presence is hidden in it: that of a client, of an example, or nobody's."""
        return self.study.privacy.unit if self.study.privacy else ""

    @property
    def hides_clients(self) -> bool:
        """Whether nobody may learn from a report who was there."""
        return self.hidden == "client"

    @cached_property
    def score(self) -> tuple[str, bool]:
        """The name of the score that it is known by, and whether a higher one is better.

        A task of the caller's own does not say it: then it is a share that was measured, or the
        loss.
        """
        if self.study.task.kind != OWN:
            task = task_class(self.study.task.kind)
            return task.primary, task.higher
        named = {name.rpartition(".")[2] for row in self.metrics for name in row if "." in name}
        shares = sorted(name for name in named if name.startswith(SHARES))
        return (shares[0], True) if shares else ("loss", False)

    def column(self, name: str, *columns: str) -> Series:
        """The first of some columns that has numbers, over the rounds, under a name."""
        for column in columns:
            points = [(row["round"], row[column]) for row in self.metrics if column in row]
            if any(isfinite(value) for _, value in points):
                return Series(name, tuple(points))
        return Series(name, ())

    def world_scores(self, name: str) -> Series:
        """The world's score over the rounds."""
        return self.column(name, *(f"{head}{self.score[0]}" for head in WORLD))

    @cached_property
    def client_scores(self) -> dict[str, Series]:
        """Each client's own model on its own rows, where that was measured."""
        score = self.score[0]
        kinds = ("clients.{}.{}", "sites.by.{}.own.{}", "sites.by.{}.world.{}")
        found = {
            name: self.column(name, *(kind.format(name, score) for kind in kinds))
            for name in self.roster
        }
        return {name: series for name, series in found.items() if series.points}

    def own_scores(self, name: str, *, worst: bool = False) -> Series:
        """How clients' own models score on their own rows: their mean, or the worst of them."""
        held = dict[float, list[float]]()
        for series in self.client_scores.values():
            for x, y in series.points:
                held.setdefault(x, []).append(y)
        if worst:
            edge = min if self.score[1] else max
            return Series(name, tuple((x, edge(ys)) for x, ys in sorted(held.items())))
        return Series(name, tuple((x, fsum(ys) / len(ys)) for x, ys in sorted(held.items())))

    @cached_property
    def roster(self) -> dict[str, Mapping[str, str]]:
        """Every client that there may be, with what it says of itself."""
        named = self.study.clients.names or (self.run.clients if self.study.gathered else [])
        found: dict[str, Mapping[str, str]] = {
            name: self.study.clients.traits.get(name, {}) for name in named
        }
        if not self.hides_clients:
            found |= {turn.client: turn.traits for held in self.turns for turn in held}
        return found

    @cached_property
    def forecast(self) -> Forecast:
        """What its plan was to do, by shapes alone, as `explain` says it before a run."""
        agreement, guarantee = self.agreement, self.agreement.guarantee
        drawn = guarantee is not None and guarantee.unit == "client" and guarantee.rate is not None
        everyone = participation_of(self.study) == Participation() and not drawn
        return forecast(
            agreement.method.plan,
            agreement.params,
            rounds=max(self.study.train.rounds, self.run.round),
            phases=self._phases(),
            crowd=Crowd(self.roster, everyone=everyone) if self.roster else None,
            fare=agreement.fare,
        )

    def _phases(self) -> dict[str, int]:
        """After which round each phase is announced: as was planned, or else as it happened."""
        announce = self.agreement.method.announce
        if isinstance(announce, Planned):
            return dict(announce.after)
        first = dict[str, int]()
        for record in self.rounds:
            first.setdefault(record.phase, record.round - 1)
        known = phases_in(self.agreement.method.plan)
        return {name: after for name, after in first.items() if name in known}


def facts_of(run: Run) -> RunFacts:
    """All that a report tells of a run."""
    rounds, turns, held = list[RoundRecord](), list[tuple[TurnRecord, ...]](), list[TurnRecord]()
    for record in run.records:
        if isinstance(record, RoundRecord):
            rounds.append(record)
            turns.append(tuple(held))
            held = []
        elif len(record.roles) == len(run.params):
            held.append(record)
        else:
            raise FedplanError(
                f"{run.folder}: round {record.round} has a turn of {len(record.roles)} roles for "
                f"{len(run.params)} params, so nothing is told: fedplan verify {run.folder}"
            )
    return RunFacts(run, status_of(run.folder), run.metrics, tuple(rounds), tuple(turns))
