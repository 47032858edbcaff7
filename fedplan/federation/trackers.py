# SPDX-License-Identifier: Apache-2.0
"""Trackers: other people's programs that draw runs, each told of every committed round.

A tracker is a callback that holds something open. It writes below the run's own folder, and no bit
of a run follows from it. What it is told stands in metrics.jsonl too, whether it is there or not.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from importlib import import_module
from importlib.util import find_spec
from math import isfinite
from pathlib import Path
from typing import Any, ClassVar, final

from fedplan.errors import FedplanError
from fedplan.federation.callbacks import Callback, Closed
from fedplan.naming import Registry

FOLDER = "trackers"
"""Where trackers write, in the folder of a run."""
SINGLE = ("clients.", "sites.by.", "sites.silent.")
"""How the names of numbers of single clients begin: trackers are told of all together."""
DRAWN = ("up", "down", "counted", "rejected", "personal.", "sites.")
"""How the names of numbers begin that tell of those who were drawn."""


class Tracker(ABC):
    """A callback that is made for one run, and closed when the run ends, however that is.

    A run that goes on tells its last round once more: that must change nothing.
    """

    package: ClassVar[str] = ""
    """What must be installed for it, called as the extra is."""

    def __init__(self) -> None:
        if self.package and find_spec(self.package) is None:
            raise FedplanError(
                f"the tracker {self.package!r} needs the package {self.package}, which is not "
                f"installed: pip install 'fedplan[{self.package}]', or leave it out of "
                "evaluate.trackers"
            )

    @abstractmethod
    def __call__(self, closed: Closed) -> str | None:
        """Take note of a round; a tracker has no run stop."""

    @abstractmethod
    def close(self) -> None:
        """Let go of what is open; the next round that is told opens it again."""


def numbers(closed: Closed) -> dict[str, float]:
    """What a tracker is told of a round: its numbers of all clients together.

    Where clients are hidden, nothing that tells how many were drawn, or how they scored.
    """
    left_out = (*SINGLE, *DRAWN) if closed.hidden else SINGLE
    return {k: float(v) for k, v in closed.row.items() if not k.startswith(left_out)}


def place_for(tracker: str, closed: Closed) -> Path:
    """Where a tracker writes of a run."""
    if closed.folder is None:
        raise FedplanError(f"the tracker {tracker!r} writes into a run's folder: give the run one")
    place = closed.folder / FOLDER / tracker
    place.mkdir(parents=True, exist_ok=True)
    return place


@final
class TensorBoard(Tracker):
    """Scalars for TensorBoard: `tensorboard --logdir RUN/trackers/tensorboard`."""

    package = "tensorboard"

    def __init__(self) -> None:
        super().__init__()
        self._writer: Any = None

    def __call__(self, closed: Closed) -> str | None:
        """Write each number as a scalar of the round."""
        if self._writer is None:
            writer, place = (
                import_module("torch.utils.tensorboard"),
                place_for(self.package, closed),
            )
            # What was written of this round before is purged.
            self._writer = writer.SummaryWriter(str(place), purge_step=closed.round)
        for name, value in numbers(closed).items():
            self._writer.add_scalar(name.replace(".", "/", 1), value, closed.round)
        self._writer.flush()
        return None

    def close(self) -> None:
        """Close the file of events."""
        if self._writer is not None:
            self._writer.close()
        self._writer = None


@final
class MLflow(Tracker):
    """A run of MLflow, in a database of the run's folder, or where `MLFLOW_TRACKING_URI` says."""

    package = "mlflow"

    def __init__(self) -> None:
        super().__init__()
        self._open: tuple[Any, str] | None = None
        self._round = 0

    def __call__(self, closed: Closed) -> str | None:
        """Write each number as a metric of the round."""
        client, run = self._open = self._open or self._opened(closed)
        if closed.round > self._round:
            now, metric = int(time.time() * 1000), import_module("mlflow.entities").Metric
            told = {k: v for k, v in numbers(closed).items() if isfinite(v)}
            metrics = [metric(k, v, now, closed.round) for k, v in told.items()]
            client.log_batch(run, metrics=metrics)
            self._round = closed.round
        return None

    def _opened(self, closed: Closed) -> tuple[Any, str]:
        """The run of MLflow with this run's id, which is made if there is none."""
        place = place_for(self.package, closed).absolute()
        uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{place / 'mlflow.db'}"
        client: Any = import_module("mlflow.tracking").MlflowClient(tracking_uri=uri)
        name = closed.experiment.rpartition("/")[0]
        found = client.get_experiment_by_name(name)
        where = (place / "artifacts").as_uri()
        number = found.experiment_id if found else client.create_experiment(name, where)
        runs = client.search_runs([number], f"tags.`fedplan.run` = '{closed.run}'")
        if runs:
            self._round = int(runs[0].data.metrics.get("round", 0))
            client.update_run(runs[0].info.run_id, status="RUNNING")
            return client, runs[0].info.run_id
        tags = {"fedplan.run": closed.run, "fedplan.score": closed.primary}
        made = client.create_run(number, run_name=closed.experiment, tags=tags)
        return client, made.info.run_id

    def close(self) -> None:
        """Say that the run has ended."""
        if self._open is not None:
            client, run = self._open
            client.set_terminated(run)
        self._open = None


@final
class WeightsAndBiases(Tracker):
    """A run of Weights & Biases, offline: `wandb sync RUN/trackers/wandb/wandb/offline-run-*`."""

    package = "wandb"

    def __init__(self) -> None:
        super().__init__()
        self._run: Any = None

    def __call__(self, closed: Closed) -> str | None:
        """Log the numbers at the step of the round."""
        if self._run is None:
            wandb, place = import_module("wandb"), place_for(self.package, closed)
            if any(place.glob("wandb/offline-run-*")):
                time.sleep(1)  # its folders are named by the second: it would write over that one
            self._run = wandb.init(
                project=closed.experiment.rpartition("/")[0],
                name=closed.experiment,
                id=closed.run,
                dir=str(place),
                mode="offline",  # nothing leaves this machine unless somebody syncs it
                config={"score": closed.primary, "rounds": closed.rounds},
                settings=wandb.Settings(silent=True, console="off", disable_git=True),
            )
        # Else W&B holds a step back until the next one, and a run that is killed has lost it.
        self._run.log(numbers(closed), step=closed.round, commit=True)
        return None

    def close(self) -> None:
        """Write what is left, and end."""
        if self._run is not None:
            self._run.finish()
        self._run = None


TRACKERS: dict[str, Callback | type[Tracker]] = {
    each.package: each for each in (TensorBoard, MLflow, WeightsAndBiases)
}
"""The trackers that fedplan knows; each is an extra of its name."""
TRACKER_NAMES: Registry[Callback | type[Tracker]] = Registry("tracker", TRACKERS)
"""All callbacks that a study can name, and classes of `Tracker`, which are made for each run."""


def tracker_named(name: str) -> Callback:
    """A callback by its name; a tracker is made anew."""
    found = TRACKER_NAMES.find(name).value
    return found() if isinstance(found, type) else found


def close_all(callbacks: tuple[Callback, ...]) -> None:
    """Close the trackers among some callbacks."""
    for each in callbacks:
        if isinstance(each, Tracker):
            each.close()
