# SPDX-License-Identifier: Apache-2.0
"""Callbacks: who is told of each round that was committed, and may have the run stop there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import inf, isnan
from pathlib import Path
from typing import Any

from fedplan.errors import FedplanError
from fedplan.federation.history import Metrics, Row
from fedplan.federation.record import RoundRecord, TurnRecord


@dataclass(frozen=True)
class Closed:
    """A round that was committed: its records and scores, and the metrics so far, its own last.

    `primary` names the score that the task is known by, in which the world and clients are
    compared, and `higher` says whether more of it is better, if that is known. `experiment` is the
    study's name and seed, `run` the id of the run, and `folder` where it is kept. Where clients are
    `hidden`, what some of them sent or scored is not for others.
    """

    rounds: int
    whole: RoundRecord
    turns: tuple[TurnRecord, ...]
    scores: Mapping[str, Any]
    metrics: Metrics
    experiment: str = ""
    run: str = ""
    folder: Path | None = None
    hidden: bool = False
    higher: bool | None = None
    primary: str = "loss"

    @property
    def round(self) -> int:
        """Its number, from 1."""
        return self.whole.round

    @property
    def row(self) -> Row:
        """Its own numbers."""
        return self.metrics[-1]


Callback = Callable[[Closed], str | None]
"""Called after each round was committed, by whatever runner. Any words that it returns say why the
run stops there. Who goes on with a run is told of its last round once more: a callback that looks
at nothing but what it is told stops where it did before."""


def stopping(callbacks: Iterable[Callback], closed: Closed) -> str:
    """Tell all of them of a round; the first reason to stop, if any gives one."""
    return str(next(filter(None, [callback(closed) for callback in callbacks]), ""))


WORLD = "world."
"""How the names of the common test's scores begin."""

SPREADS = ("personal.", "sites.spread.")
"""How the names begin that tell how the task's own score lies over clients."""

LOWER = ("loss", "perplexity", "error", "mae", "mse", "rmse")
"""Words at the end of a metric's name of which less is better."""


@dataclass(frozen=True)
class EarlyStopping:
    """Stop once a metric has not become better for so many of the rounds that have it.

    The metric is the name of a number of a round, such as `loss`, `world.accuracy` or
    `personal.mean`; better is by more than `least`, and upward unless the name ends as a loss does
    or `higher` says otherwise.
    """

    metric: str = "loss"
    patience: int = 3
    least: float = 0.0
    higher: bool | None = None

    def __post_init__(self) -> None:
        if self.patience < 1:
            raise FedplanError(f"patience is {self.patience}: it is a number of rounds, 1 or more")

    def require_public(self) -> None:
        """Refuse a metric that follows from what is hidden: when a run stops would tell of it."""
        if not self.metric.startswith(WORLD):
            raise FedplanError(
                f"stop.metric is {self.metric!r}, which follows from what is hidden: when a run "
                "stops would tell of it; take a score of the common test, such as world.loss"
            )

    def require_measured(self, kinds: Iterable[str]) -> None:
        """Refuse a score that nobody measures: a run would never stop by it."""
        kind, dot, _ = self.metric.partition(".")
        if dot and kind not in kinds:
            raise FedplanError(
                f"stop.metric is {self.metric!r}, and this run measures no {kind} scores: give it "
                "rows to test on, or take loss"
            )

    def __call__(self, closed: Closed) -> str | None:
        """Why to stop, if it is time."""
        seen = [row[self.metric] for row in closed.metrics if self.metric in row]
        if not seen and (closed.scores or "." not in self.metric):
            there = ", ".join(closed.row)
            raise FedplanError(f"no round has a metric {self.metric!r}; there are {there}")
        waited = len(seen) - 1 - self._best(seen, upward=self._upward(closed))
        if waited < self.patience:
            return None
        return f"{self.metric} has not become better for {waited} rounds"

    def _best(self, seen: list[float], *, upward: bool) -> int:
        """The place of the last value that was better than all before it."""
        sign = 1 if upward else -1
        best, place = -inf, 0
        for i, value in enumerate(seen):
            if not isnan(value) and sign * value > best + self.least:
                best, place = sign * value, i
        return place

    def _upward(self, closed: Closed) -> bool:
        """Upward, unless it is a loss; what is told of clients goes by the task's own score."""
        if self.higher is not None:
            return self.higher
        own = self.metric.startswith(SPREADS) and closed.higher is not None
        return bool(closed.higher) if own else not self.metric.endswith(LOWER)
