# SPDX-License-Identifier: Apache-2.0
"""Scores and warnings of a run, which its process writes into the status file for all readers."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from math import isfinite
from pathlib import Path

from fedplan.errors import FedplanError
from fedplan.federation.ledger.events import CommittedRound
from fedplan.federation.ledger.history import Metrics
from fedplan.federation.ledger.status import RunStatus
from fedplan.federation.ledger.stream import EventStream
from fedplan.reports.pages.facts import RunFacts, read_run_facts
from fedplan.reports.plan_warnings import RunWarning
from fedplan.reports.run_warnings import (
    Losses,
    first_warnings,
    loss_warnings,
    read_losses,
    run_warnings,
)
from fedplan.studies.run import read_run
from fedplan.studies.run_scores import RunScores, run_scores


class RunSummary:
    """Adds scores and warnings to the status of the run in a folder; see `EventStream.summarize`.

    At the start and the end of the run they are read from the folder, after a round they follow
    from the round. If the folder cannot be read, the status has none.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._facts: RunFacts | None = None
        self._first = list[RunWarning]()
        self._losses = Losses()

    def __call__(self, status: RunStatus, closed: CommittedRound | None) -> RunStatus:
        """Return the status with scores and warnings after the round `closed`, or by the folder."""
        if closed is None:
            self._facts = None
            with suppress(FedplanError, OSError):
                return self._read(status)
        if closed is None or self._facts is None:
            return replace(status, run_scores=None, warnings=None)
        for turn in closed.turns:
            self._losses.add(turn)
        warnings = [*self._first, *loss_warnings(self._facts, self._losses)]
        scores = self._facts.rules.of_row(closed.row)
        return _with_summary(status, scores if scores.scores else None, warnings)

    def _read(self, status: RunStatus) -> RunStatus:
        facts = read_run_facts(read_run(self._folder))
        facts = replace(facts, snapshot=replace(facts.snapshot, status=status, state=status.state))
        warnings = run_warnings(facts)
        if facts.snapshot.live:
            self._first, self._losses = first_warnings(facts), read_losses(facts)
            # Without the ledger: it may be long.
            run = read_run(self._folder)
            self._facts = replace(facts, run=run, metrics=Metrics(), rounds=(), turns=())
        return _with_summary(status, run_scores(facts.run), warnings)


def _with_summary(
    status: RunStatus, scores: RunScores | None, warnings: list[RunWarning]
) -> RunStatus:
    """Return the status with these warnings, and these scores or by default those it has.

    Without scores if one is not finite, which JSON cannot express.
    """
    fields = status.run_scores
    if scores is not None:
        finite = all(isfinite(each.value) for each in scores.scores)
        fields = scores.json() if finite else None
    return replace(status, run_scores=fields, warnings=[each.json() for each in warnings])


def summarized_events(folder: Path) -> EventStream:
    """Return the event stream of the run in a folder, with scores and warnings in its status."""
    events = EventStream(folder)
    events.summarize = RunSummary(folder)
    return events
