# SPDX-License-Identifier: Apache-2.0
"""Callbacks after each committed round, and early stopping."""

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
class CommittedRound:
    """A committed round, as callbacks receive it.

    `total_rounds`: rounds of the run. `record`, `turns`: the ledger's records of the round and of
    its clients. `scores`: evaluation metrics. `metrics`: rows of all rounds so far.
    `experiment`: name and seed of the study. `run`: id of the run. `folder`: the run's folder.
    `hides_clients`: client-level DP; then numbers of single clients must not be published.
    `primary`: the task's primary metric. `higher_is_better`: of that metric; None if unknown.
    """

    total_rounds: int
    record: RoundRecord
    turns: tuple[TurnRecord, ...]
    scores: Mapping[str, Any]
    metrics: Metrics
    experiment: str = ""
    run: str = ""
    folder: Path | None = None
    hides_clients: bool = False
    higher_is_better: bool | None = None
    primary: str = "loss"

    @property
    def round(self) -> int:
        """Number of the round, from 1."""
        return self.record.round

    @property
    def row(self) -> Row:
        """The round's row of metrics."""
        return self.metrics[-1]


Callback = Callable[[CommittedRound], str | None]
"""Called after each committed round. Return a string to stop the run; it is logged as the reason.
A resumed run calls it again for the last round, so a stateless callback stops at the same place."""


def run_callbacks(callbacks: Iterable[Callback], committed: CommittedRound) -> str:
    """Call all callbacks and return the first reason to stop; empty to continue."""
    return str(next(filter(None, [callback(committed) for callback in callbacks]), ""))


GLOBAL_PREFIX = "global."
"""Prefix of the global model's metrics on the common test set."""

SPREADS = ("personal.", "sites.spread.")
"""Prefixes of metrics over clients of the task's primary metric."""

LOWER_IS_BETTER = ("loss", "perplexity", "error", "mae", "mse", "rmse")
"""Ends of the names of metrics that improve by becoming lower."""


@dataclass(frozen=True)
class EarlyStopping:
    """A callback that stops a run when a metric no longer improves.

    `metric`: name in a round's row, such as `loss`, `global.accuracy` or `personal.accuracy`.
    `patience`: rounds with the metric, without improvement, until the run stops.
    `min_delta`: smallest change that counts as improvement.
    `higher_is_better`: None decides by the metric's name. Raises FedplanError if patience is < 1.
    """

    metric: str = "loss"
    patience: int = 3
    min_delta: float = 0.0
    higher_is_better: bool | None = None

    def __post_init__(self) -> None:
        if self.patience < 1:
            raise FedplanError(f"patience is {self.patience}: give a number of rounds, 1 or more")

    def require_public(self) -> None:
        """Raise FedplanError for a metric of private data: the stopping time would reveal it."""
        if not self.metric.startswith(GLOBAL_PREFIX):
            raise FedplanError(
                f"early_stopping.metric is {self.metric!r}, which depends on private data, "
                "so the stopping time would reveal it: use a metric of the common test, such as "
                "global.loss"
            )

    def require_measured(self, kinds: Iterable[str]) -> None:
        """Raise FedplanError if the metric's kind, its name up to a dot, is not measured."""
        kind, dot, _ = self.metric.partition(".")
        if dot and kind not in kinds:
            raise FedplanError(
                f"early_stopping.metric is {self.metric!r}, and this run has no {kind} metrics: "
                "give it test examples, or use loss"
            )

    def __call__(self, committed: CommittedRound) -> str | None:
        """Return the reason to stop, or None; raise FedplanError if no round has the metric."""
        values = [row[self.metric] for row in committed.metrics if self.metric in row]
        if not values and (committed.scores or "." not in self.metric):
            names = ", ".join(committed.row)
            raise FedplanError(f"no round has a metric {self.metric!r}; use one of {names}")
        waited = len(values) - 1 - self._best_index(values, higher=self._prefers_higher(committed))
        if waited < self.patience:
            return None
        return f"{self.metric} has not improved for {waited} rounds"

    def _best_index(self, values: list[float], *, higher: bool) -> int:
        """Return the index of the last value that improved on all before it by `min_delta`."""
        sign = 1 if higher else -1
        best, index = -inf, 0
        for i, value in enumerate(values):
            if not isnan(value) and sign * value > best + self.min_delta:
                best, index = sign * value, i
        return index

    def _prefers_higher(self, committed: CommittedRound) -> bool:
        """Whether higher is better: as set, as of the primary metric, or by the metric's name."""
        if self.higher_is_better is not None:
            return self.higher_is_better
        if self.metric.startswith(SPREADS) and committed.higher_is_better is not None:
            return committed.higher_is_better
        return not self.metric.endswith(LOWER_IS_BETTER)
