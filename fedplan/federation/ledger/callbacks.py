# SPDX-License-Identifier: Apache-2.0
"""Callbacks of fedplan: early stopping, and the trackers TensorBoard, MLflow and W&B.

A tracker is a callback with an open resource. It writes below the run's folder, and cannot change
the results of a run. The same metrics are in metrics.jsonl.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from math import inf, isfinite
from pathlib import Path
from typing import Any, ClassVar, final

from fedplan.data.metrics import metric_direction
from fedplan.errors import FedplanError, require_extra
from fedplan.federation.ledger.events import Callback, CommittedRound
from fedplan.naming import Registry
from fedplan.storage.files import make_folder

GLOBAL_PREFIXES = ("global.", "validation.global.")
"""Prefixes of the global model's metrics on the common test and validation sets."""

VALIDATION_REMEDY = (
    "set data.validation_fraction = 0.1 or data.validation_split (in Python: validation=..., or "
    'clients={"north": {"train": ..., "validation": ...}})'
)
"""How a study gets validation examples."""


@dataclass(frozen=True)
class EarlyStopping:
    """A stateless callback that stops a run when a metric no longer improves.

    `metric`: name in a round's row: `loss` of the training, or a metric on validation examples, as
    `validation.global.accuracy` or `validation.personal.accuracy`.
    `patience`: number of rounds with the metric, but without improvement, until the run stops; the
    constructor raises FedplanError if below 1. `min_delta`: an improvement must exceed this.
    `higher_is_better`: if None, the direction that the metric or the task gives. A call with a
    CommittedRound returns the reason to stop, or None. The call raises FedplanError if the
    direction is not known, or if no round so far has the metric; for a name with a dot, only after
    a round with evaluation.
    """

    metric: str = "loss"
    patience: int = 3
    min_delta: float = 0.0
    higher_is_better: bool | None = None

    def __post_init__(self) -> None:
        if self.patience < 1:
            raise FedplanError(f"patience is {self.patience}: give a number of rounds, 1 or more")

    def require_public(self) -> None:
        """Raise FedplanError unless the metric is of the global model on common, public examples.

        The names of these metrics start as in GLOBAL_PREFIXES. Call this under differential
        privacy, where the stopping time by another metric would reveal private data.
        """
        if not self.metric.startswith(GLOBAL_PREFIXES):
            raise FedplanError(
                f"early_stopping.metric is {self.metric!r}, which depends on private data, "
                "so the stopping time would reveal it: use a metric on the common validation set, "
                "such as validation.global.loss"
            )

    def require_validation(self, models: Iterable[str]) -> None:
        """Raise FedplanError if the metric is on test examples, or if the run does not measure it.

        `models`: the models of the run with metrics on validation examples, of "global" and
        "personal". A name without a dot, such as "loss", is of the training and accepted.
        """
        kind, dot, name = self.metric.partition(".")
        if dot and kind != "validation":
            model = "personal" if "personal" in self.metric else "global"
            raise FedplanError(
                f"early_stopping.metric is {self.metric!r}, which is measured on test examples: a "
                "test that decides when to stop is no test; use "
                f"validation.{model}.{self.metric.rpartition('.')[2]}, and {VALIDATION_REMEDY}"
            )
        if dot and name.partition(".")[0] not in models:
            raise FedplanError(
                f"early_stopping.metric is {self.metric!r}, and this run does not measure it: "
                f"{VALIDATION_REMEDY}, or use loss"
            )

    def __call__(self, committed: CommittedRound) -> str | None:
        """Return the reason to stop, or None; raise FedplanError if no round has the metric."""
        values = [row[self.metric] for row in committed.metrics if self.metric in row]
        if not values and (committed.scores or "." not in self.metric):
            names = ", ".join(committed.row)
            raise FedplanError(f"no round has a metric {self.metric!r}; use one of {names}")
        higher = self.higher_is_better
        if higher is None:
            higher = metric_direction(self.metric, committed.directions)
        if higher is None:
            raise FedplanError(
                f"early_stopping.metric is {self.metric!r}, and its direction is not known: set "
                'early_stopping.mode to "max" or "min", from Python higher_is_better'
            )
        best, index = -inf, 0  # of the last value that improved on all before by min_delta
        for i, value in enumerate(values):
            score = value if higher else -value
            if score > best + self.min_delta:  # False for nan
                best, index = score, i
        waited = len(values) - 1 - index
        if waited < self.patience:
            return None
        return f"{self.metric} has not improved for {waited} rounds"


FOLDER = "trackers"
"""Folder of all trackers within a run's folder."""
PER_CLIENT_PREFIXES = ("clients.", "sites.by.", "sites.silent.")
"""Prefixes of metrics of single clients, which trackers do not get."""
COHORT_PREFIXES = (
    "upload_bytes",
    "download_bytes",
    "aggregated",
    "rejected",
    "personal.",
    "sites.",
)
"""Prefixes of metrics that depend on the sampled clients."""


class Tracker(ABC):
    """Base class of callbacks with an open resource, one object for each run.

    A run calls the tracker with each committed round, and `close` when the run ends or fails. A
    resumed run repeats the last round; a subclass must ignore the repetition. `package`: package
    that must be installed, else the constructor raises MissingExtra.
    """

    package: ClassVar[str] = ""

    def __init__(self) -> None:
        """Raise MissingExtra if the package is not installed."""
        if self.package:
            require_extra(self.package, f"the tracker {self.package!r} of evaluate.trackers")

    @abstractmethod
    def __call__(self, closed: CommittedRound) -> str | None:
        """Log a committed round; returns None, since a tracker does not stop a run."""

    @abstractmethod
    def close(self) -> None:
        """Close the open resource; the next call opens it again."""


def tracked_metrics(closed: CommittedRound) -> dict[str, float]:
    """Return the metrics of the committed round `closed` that are over all clients, by name.

    Under client-level DP, metrics that depend on the sampled clients are left out too.
    """
    excluded = PER_CLIENT_PREFIXES
    if closed.hides_clients:
        excluded += COHORT_PREFIXES
    return {k: float(v) for k, v in closed.row.items() if not k.startswith(excluded)}


def tracker_folder(tracker: str, closed: CommittedRound) -> Path:
    """Return the folder of a tracker in the run's folder, created if missing.

    Raises FedplanError if the run of the committed round `closed` has no folder.
    """
    if closed.folder is None:
        raise FedplanError(f"the tracker {tracker!r} writes into a run's folder: give the run one")
    folder = closed.folder / FOLDER / tracker
    make_folder(folder)
    return folder


@final
class TensorBoard(Tracker):
    """Tracker that writes each metric as a scalar for TensorBoard, in the run's folder.

    To see the scalars: `tensorboard --logdir RUN/trackers/tensorboard`. The first call opens the
    file.
    """

    package = "tensorboard"
    _writer: Any = None

    def __call__(self, closed: CommittedRound) -> str | None:
        """Write each metric as a scalar at the step of the round."""
        if self._writer is None:
            folder = tracker_folder(self.package, closed)
            tensorboard = import_module("torch.utils.tensorboard")
            # Purges what was written of this round before.
            self._writer = tensorboard.SummaryWriter(str(folder), purge_step=closed.round)
        for name, value in tracked_metrics(closed).items():
            self._writer.add_scalar(name.replace(".", "/", 1), value, closed.round)
        self._writer.flush()
        return None

    def close(self) -> None:
        """Close the event file."""
        if self._writer is not None:
            self._writer.close()
        self._writer = None


@final
class MLflow(Tracker):
    """Tracker that logs each finite metric to an MLflow run.

    The run is in a database in the run's folder, or at the variable `MLFLOW_TRACKING_URI` if set.
    """

    package = "mlflow"
    _open: tuple[Any, str] | None = None  # client and run id
    _round = 0  # last logged round

    def __call__(self, closed: CommittedRound) -> str | None:
        """Log each finite metric at the step of the round; a round is logged once."""
        client, run = self._open = self._open or self._open_run(closed)
        if closed.round > self._round:
            now, metric = int(time.time() * 1000), import_module("mlflow.entities").Metric
            finite = {k: v for k, v in tracked_metrics(closed).items() if isfinite(v)}
            metrics = [metric(k, v, now, closed.round) for k, v in finite.items()]
            client.log_batch(run, metrics=metrics)
            self._round = closed.round
        return None

    def _open_run(self, closed: CommittedRound) -> tuple[Any, str]:
        """Return (MLflow client, MLflow run id); create experiment and run if missing.

        `closed`: a committed round, for the names. Sets `_round` to the last round that an existing
        run has logged.
        """
        folder = tracker_folder(self.package, closed).absolute()
        uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder / 'mlflow.db'}"
        client: Any = import_module("mlflow.tracking").MlflowClient(tracking_uri=uri)
        name = closed.experiment.rpartition("/")[0]
        experiment = client.get_experiment_by_name(name)
        if experiment:
            experiment_id = experiment.experiment_id
        else:
            experiment_id = client.create_experiment(name, (folder / "artifacts").as_uri())
        runs = client.search_runs([experiment_id], f"tags.`fedplan.run` = '{closed.run}'")
        if runs:
            self._round = int(runs[0].data.metrics.get("round", 0))
            client.update_run(runs[0].info.run_id, status="RUNNING")
            return client, runs[0].info.run_id
        tags = {"fedplan.run": closed.run, "fedplan.score": closed.primary}
        run = client.create_run(experiment_id, run_name=closed.experiment, tags=tags)
        return client, run.info.run_id

    def close(self) -> None:
        """Mark the MLflow run as ended."""
        if self._open is not None:
            client, run = self._open
            client.set_terminated(run)
        self._open = None


@final
class WeightsAndBiases(Tracker):
    """Tracker that logs the metrics to an offline Weights & Biases run in the run's folder.

    To upload: `wandb sync RUN/trackers/wandb/wandb/offline-run-*`. The first call starts the run.
    """

    package = "wandb"
    _run: Any = None

    def __call__(self, closed: CommittedRound) -> str | None:
        """Log the metrics at the step of the round."""
        if self._run is None:
            wandb, folder = import_module("wandb"), tracker_folder(self.package, closed)
            if any(folder.glob("wandb/offline-run-*")):
                time.sleep(1)  # folders are named by the second: the last one would be overwritten
            self._run = wandb.init(
                project=closed.experiment.rpartition("/")[0],
                name=closed.experiment,
                id=closed.run,
                dir=str(folder),
                mode="offline",  # nothing leaves this machine unless somebody syncs it
                config={"score": closed.primary, "rounds": closed.total_rounds},
                settings=wandb.Settings(silent=True, console="off", disable_git=True),
            )
        # Else W&B writes a step only with the next one, and a killed run loses it.
        self._run.log(tracked_metrics(closed), step=closed.round, commit=True)
        return None

    def close(self) -> None:
        """Finish the W&B run, which writes pending data."""
        if self._run is not None:
            self._run.finish()
        self._run = None


TRACKERS: dict[str, Callback | type[Tracker]] = {
    each.package: each for each in (TensorBoard, MLflow, WeightsAndBiases)
}
"""Trackers of fedplan by name; each is an extra of the same name."""
TRACKER_NAMES: Registry[Callback | type[Tracker]] = Registry("tracker", TRACKERS)
"""All callbacks that a study can name; a `Tracker` class is instantiated for each run."""


def make_tracker(name: str) -> Callback:
    """Return the registered callback of a name; a Tracker class gives a new instance.

    Raises FedplanError for an unknown name or a package that is not installed.
    """
    callback = TRACKER_NAMES.find(name).value
    return callback() if isinstance(callback, type) else callback
