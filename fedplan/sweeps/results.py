# SPDX-License-Identifier: Apache-2.0
"""Results: what a run came to, read from its folder, and the score that it is known by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from fedplan.data.own import OWN, Own
from fedplan.data.tasks import task_class
from fedplan.errors import FedplanError
from fedplan.federation.callbacks import LOWER, SPREADS
from fedplan.federation.history import Metrics
from fedplan.federation.server import STUDY
from fedplan.federation.states import RunState, read_status
from fedplan.federation.trackers import DRAWN, SINGLE
from fedplan.reports.preview import stated
from fedplan.studies.run import Run, looked_at, open_run
from fedplan.studies.schema import Study
from fedplan.sweeps.records import is_sweep, read_asked_for, read_failures

OF_CLIENTS = ("personal.mean", "sites.spread.own.mean")
"""Scores of clients' own models, by the task's own measure."""


@dataclass(frozen=True)
class RunResult:
    """What one run came to: its numbers by round, all bytes of all clients, and what it spent.

    `seconds` are those of its rounds, at the median of the last of them; None if nobody told.
    """

    folder: Path
    study: Study
    plan: str
    rounds: int
    over: bool
    metrics: Metrics
    seconds: float | None
    epsilon: float | None
    told: str = ""

    @property
    def up(self) -> int | None:
        """The bytes that all clients sent."""
        return self._sum("up")

    @property
    def down(self) -> int | None:
        """The bytes that all clients received."""
        return self._sum("down")

    def _sum(self, way: str) -> int | None:
        """Bytes of all; where clients are hidden they would tell how many were drawn."""
        return None if self.study.hides_clients else int(sum(row[way] for row in self.metrics))

    @cached_property
    def told_of(self) -> list[dict[str, float]]:
        """The numbers of each round that may be told: where clients are hidden, none of theirs."""
        if not self.study.privacy:
            return list(self.metrics)
        aside = (*SINGLE, *DRAWN) if self.study.hides_clients else SINGLE
        return [{k: v for k, v in row.items() if not k.startswith(aside)} for row in self.metrics]

    def score(self, name: str) -> float | None:
        """A number of the last round that has it."""
        return next((row[name] for row in reversed(self.told_of) if name in row), None)

    def curve(self, name: str) -> list[tuple[int, float]]:
        """A number by round, of those that have it."""
        return [(int(row["round"]), row[name]) for row in self.told_of if name in row]

    @property
    def primary(self) -> str:
        """The name of the score that its task is known by, as the run told it."""
        kind = self.study.task.kind
        return self.told or (Own.primary if kind == OWN else task_class(kind).primary)

    def higher(self, name: str) -> bool:
        """Whether more of a score is better; how clients lie is told in the task's own score."""
        if not name.startswith(SPREADS):
            return not name.endswith(LOWER)
        kind = self.study.task.kind
        return not self.primary.endswith(LOWER) if kind == OWN else task_class(kind).higher


def result_of(folder: Path) -> RunResult:
    """What the run in a folder came to, as far as it is."""
    return looked_at(folder, _result)


def _result(run: Run) -> RunResult:
    told = read_status(run.folder)
    seconds = told.seconds * run.round if told and told.seconds is not None else None
    # A rule or a callback that ended it, and no person, no signal and no fault.
    early = told is not None and told.state == RunState.STOPPED and told.ruled
    return RunResult(
        folder=run.folder,
        study=run.study,
        plan=run.agreement.method.plan.text,
        rounds=run.round,
        over=run.round >= run.study.train.rounds or early,
        metrics=run.metrics,
        seconds=seconds,
        told=told.primary if told else "",
        epsilon=stated(run.folder).spent if run.study.privacy and run.study.gathered else None,
    )


def runs_in(places: Sequence[Path | str]) -> tuple[list[Path], list[str]]:
    """The folders of runs that places hold, runs or sweeps, and what is not there, in words."""
    found, notes = list[Path](), list[str]()
    for place in map(Path, places):
        if not is_sweep(place):
            found.append(open_run(place).folder)
            continue
        names, failed = read_asked_for(place).runs, read_failures(place)
        there = [name for name in names if (place / name / STUDY).is_file()]
        begun = [place / name for name in there if name not in failed]
        found += begun
        if failed:
            notes.append(f"{len(failed)} of {len(names)} runs of {place} failed: left out")
        if missing := len(names) - len(begun) - len(failed):
            notes.append(f"{missing} of {len(names)} runs of {place} are not begun: left out")
    return list(dict.fromkeys(found)), notes


def score_named(name: str, results: Sequence[RunResult]) -> str:
    """The score to compare by: as it is named, or the first that all runs have."""
    kinds = {each.primary for each in results}
    usual = [f"{where}.{kind}" for where in ("world", "sites.world") for kind in sorted(kinds)]
    wanted = [name] if name else [*usual, *OF_CLIENTS, "loss"]
    for each in wanted:
        if all(result.score(each) is not None for result in results):
            return each
    lacking = next((r for r in results if all(r.score(w) is None for w in wanted)), results[0])
    there = sorted({key for row in lacking.told_of for key in row})
    raise FedplanError(
        f"not all runs have {name or 'one score'}: {lacking.folder} has "
        f"{', '.join(there) or 'no round yet'}; name one that all have by --score"
    )
