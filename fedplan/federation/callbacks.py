# SPDX-License-Identifier: Apache-2.0
"""Callbacks after each committed round, and early stopping."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from fedplan.errors import FedplanError
from fedplan.federation.history import Metrics, Row
from fedplan.federation.record import RoundRecord, TurnRecord


@dataclass(frozen=True)
class CommittedRound:
    """A round that the server has written to disk, as callbacks receive it.

    `total_rounds`: rounds of the run. `record`, `turns`: the ledger's entries of the round and of
    each client in the round. `scores`: evaluation metrics of the round, empty without evaluation.
    `metrics`: rows of metrics of all rounds so far; the last one is `row`.
    `experiment`: name and seed of the study. `run`: id of the run. `folder`: the run's folder.
    `hides_clients`: client-level DP; then numbers of single clients must not be published.
    `primary`: name of the task's primary metric. `higher_is_better`: whether a higher primary
    metric is better; None if unknown.
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
    """A stateless callback that stops a run when a metric no longer improves.

    `metric`: name in a round's row, for example `loss`, `global.accuracy` or `personal.accuracy`.
    `patience`: number of rounds with the metric, but without improvement, until the run stops; the
    constructor raises FedplanError if below 1. `min_delta`: an improvement must exceed this.
    `higher_is_better`: if None, a metric that starts as in SPREADS has the direction of the task's
    primary metric, if known; any other metric improves by becoming higher, unless the name ends as
    in LOWER_IS_BETTER. A call with a CommittedRound returns the reason to stop, or None. The call
    raises FedplanError if no round so far has the metric; for a name with a dot, only after a round
    with evaluation.
    """

    metric: str = "loss"
    patience: int = 3
    min_delta: float = 0.0
    higher_is_better: bool | None = None

    def __post_init__(self) -> None:
        if self.patience < 1:
            raise FedplanError(f"patience is {self.patience}: give a number of rounds, 1 or more")

    def require_public(self) -> None:
        """Raise FedplanError unless the metric is of the global model on the common test set.

        The names of these metrics start with GLOBAL_PREFIX. Call this under differential privacy,
        where the stopping time by another metric would reveal private data.
        """
        if not self.metric.startswith(GLOBAL_PREFIX):
            raise FedplanError(
                f"early_stopping.metric is {self.metric!r}, which depends on private data, "
                "so the stopping time would reveal it: use a metric of the common test, such as "
                "global.loss"
            )

    def require_measured(self, kinds: Iterable[str]) -> None:
        """Raise FedplanError if the run does not measure the metric.

        `kinds`: kinds of evaluation metrics of the run, such as "global" and "sites". A metric's
        kind is the name up to the first dot. A name without a dot, such as "loss", is accepted.
        """
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
        higher = self.higher_is_better
        if higher is None and self.metric.startswith(SPREADS):
            higher = committed.higher_is_better
        if higher is None:
            higher = not self.metric.endswith(LOWER_IS_BETTER)
        best, index = -inf, 0  # of the last value that improved on all before by min_delta
        for i, value in enumerate(values):
            score = value if higher else -value
            if score > best + self.min_delta:  # False for nan
                best, index = score, i
        waited = len(values) - 1 - index
        if waited < self.patience:
            return None
        return f"{self.metric} has not improved for {waited} rounds"
