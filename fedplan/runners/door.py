# SPDX-License-Identifier: Apache-2.0
"""The door from Python: a study, or a method with a model and rows, and the run of it."""

from __future__ import annotations

import atexit
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any

import torch
from torch import nn

from fedplan.data.examples import Loss
from fedplan.data.own import Collate, Measure, Own, model_loss, named_columns
from fedplan.data.tasks import Task
from fedplan.federation.callbacks import LOWER, Callback
from fedplan.federation.client import Client
from fedplan.federation.participation import Participation
from fedplan.federation.server import STUDY
from fedplan.federation.status import Status
from fedplan.language.plan import Plan
from fedplan.methods.method import Method
from fedplan.runners.crews.workers import LOCAL, workers_of
from fedplan.runners.simulation import Simulation
from fedplan.studies.continuation import continuing, require_free
from fedplan.studies.folder import study_in
from fedplan.studies.given import Given
from fedplan.studies.schema import ConfigError, Study, read_study
from fedplan.tensors.devices import AUTO


def run_study(
    study: Study | Path | str,
    folder: Path | str | None = None,
    *,
    resume: bool = False,
    continue_from: Path | str = "",
    callbacks: Sequence[Callback] = (),
    runner: str = LOCAL,
    workers: int | None = None,
    gpus_per_worker: float = 0.0,
    ray_address: str = "",
) -> Simulation:
    """Run a study, or the one in a file, in a folder; without one, in runs/ under its name.

    With `continue_from` each client begins with what it kept in that earlier run. The `runner`
    "pool" or "ray" has as many `workers` play the clients, each in a process of its own: as many as
    there are cores, unless it is said. The bits are those of "local".
    """
    played_by = workers_of(runner, workers, gpus_per_worker, ray_address)
    made = study if isinstance(study, Study) else read_study(Path(study))
    made = continuing(made, continue_from) if continue_from else made
    place = Path(folder or Path("runs") / made.name)
    require_free(place, made, resume=resume)
    status = Status(place)
    return Simulation(
        made, place, earlier=continue_from, callbacks=callbacks, status=status, workers=played_by
    ).run()


def simulate(
    method: Method | Plan,
    model: nn.Module,
    clients: Mapping[str, Any],
    loss: Loss = model_loss,
    *,
    task: Task | None = None,
    collate: Collate = named_columns,
    metrics: Measure | None = None,
    primary: str = Own.primary,
    test: Any = None,
    own: Mapping[str, Any] | None = None,
    rounds: int | None = None,
    train: Mapping[str, Any] | None = None,
    share: float = Participation.share,
    traits: Mapping[str, Mapping[str, str]] | None = None,
    evaluate: Mapping[str, Any] | None = None,
    privacy: Mapping[str, Any] | None = None,
    defence: Mapping[str, Any] | None = None,
    aggregation: Mapping[str, Any] | None = None,
    callbacks: Sequence[Callback] = (),
    device: str = AUTO,
    deterministic: bool = Client.deterministic,
    name: str = "study",
    seed: int = 0,
    folder: Path | str | None = None,
    resume: bool = False,
    run: bool = True,
    runner: str = LOCAL,
    workers: int | None = None,
) -> Simulation:
    """Run a federation on objects: a method or a plan, a model, and the rows of each client.

    `clients` are rows to train on by name: a table of `datasets`, a torch Dataset, or anything with
    a length and `batch`. `test` are rows for the federation's model, `own` for each client's. With
    a `task` rows are tables that it prepares; else `loss`, `collate` and `metrics` are functions,
    the loss that of the model itself unless it is given, and clients are compared by `primary`.
    `train`, `evaluate`, `privacy`, `defence` and `aggregation` are what a study file says under
    these names. It computes on the `device`: the best there is, or the one that is named. Without a
    `folder` the run is kept as long as this process lives.
    With `run=False` nothing is played yet: `for closed in simulation.rounds()` does, one by one.
    """
    if not isinstance(method, Method | Plan):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"the method is {method!r}: give a plan, or one as fp.methods.fedper()")
    if not all(map(callable, callbacks)):
        raise ConfigError("callbacks holds what cannot be called: give functions of a closed round")
    asked = method if isinstance(method, Method) else Method(method)
    if privacy and privacy.get("vote"):
        asked = replace(asked, together=True)
    mine = Own(function=loss, collate=collate, metrics=metrics, primary=primary)
    if task is not None and mine != Own():
        raise ConfigError("a task has its own loss, collator and metrics: give it, or give these")
    goal = task or replace(mine, higher=not primary.endswith(LOWER))
    given = Given(asked, model, clients, goal, test, own or {})
    if rounds is not None and "rounds" in (train or {}):
        raise ConfigError(f"rounds is {rounds}, and train says rounds too: say it once")
    place = Path(folder) if folder else _kept() / name
    study = given.study(
        name=name,
        seed=seed,
        threads=_threads(place, resume=resume),
        device=device,
        deterministic=deterministic,
        train={**(train or {}), **({"rounds": rounds} if rounds is not None else {})},
        clients={"share": share, "traits": {str(k): dict(v) for k, v in (traits or {}).items()}},
        **({"evaluate": dict(evaluate)} if evaluate else {}),
        **({"privacy": dict(privacy)} if privacy else {}),
        **({"defence": dict(defence)} if defence else {}),
        **({"aggregation": dict(aggregation)} if aggregation else {}),
    )
    require_free(place, study, resume=resume)
    status = Status(place) if folder else None
    by = workers_of(runner, workers)
    made = Simulation(study, place, given, callbacks=callbacks, status=status, workers=by)
    return made.run() if run else made


def _threads(folder: Path, *, resume: bool) -> int:
    """As many as this process has; a run that goes on has those that it began with."""
    again = resume and (folder / STUDY).is_file()
    return study_in(folder).threads if again else torch.get_num_threads()


def _kept() -> Path:
    """A folder that goes when this process does."""
    folder = Path(mkdtemp(prefix="fedplan-"))
    atexit.register(rmtree, folder, ignore_errors=True)
    return folder
