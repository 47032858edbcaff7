# SPDX-License-Identifier: Apache-2.0
"""Python entry points: run a study, or a method with a model and data in memory."""

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

from fedplan.data.custom_task import BatchMetrics, Collate, CustomTask, batch_columns, model_loss
from fedplan.data.examples import Loss
from fedplan.data.tasks import Task
from fedplan.federation.client import Client
from fedplan.federation.ledger.callbacks import LOWER_IS_BETTER
from fedplan.federation.ledger.events import Callback
from fedplan.federation.ledger.stream import EventStream
from fedplan.federation.participation import Participation
from fedplan.federation.server import STUDY
from fedplan.language.plan import Plan
from fedplan.methods.method import Method
from fedplan.runners.executors.config import LOCAL, make_pool_config
from fedplan.runners.simulation import Simulation
from fedplan.studies.in_memory import InMemoryInputs
from fedplan.studies.resume import continue_study, prepare_folder
from fedplan.studies.run_folder import read_run_study
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
    """Run all rounds of a study (an object or a TOML file) here; return the finished simulation.

    `folder` is the run folder, by default runs/NAME. A folder with committed rounds raises
    ConfigError without `resume`; with `resume` the run there is continued. `continue_from` is the
    folder or id of an earlier run from which clients take their personal params. `callbacks` are
    called after each round. The `runner` "pool" or "ray" runs clients in `workers` processes
    (default: by the number of cores) with the same result as "local"; `gpus_per_worker` and
    `ray_address` are for "ray". Raises ConfigError if study, folder or arguments are invalid.
    """
    pool_config = make_pool_config(runner, workers, gpus_per_worker, ray_address)
    study = study if isinstance(study, Study) else read_study(Path(study))
    study = continue_study(study, continue_from) if continue_from else study
    folder = Path(folder or Path("runs") / study.name)
    prepare_folder(folder, study, resume=resume)
    return Simulation(
        study,
        folder,
        earlier_run=continue_from,
        callbacks=callbacks,
        events=EventStream(folder),
        pool_config=pool_config,
    ).run()


def simulate(
    method: Method | Plan,
    model: nn.Module,
    clients: Mapping[str, Any],
    loss: Loss = model_loss,
    *,
    task: Task | None = None,
    collate: Collate = batch_columns,
    metrics: BatchMetrics | None = None,
    primary: str = CustomTask.primary,
    test: Any = None,
    client_tests: Mapping[str, Any] | None = None,
    rounds: int | None = None,
    train: Mapping[str, Any] | None = None,
    fraction: float = Participation.fraction,
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
    """Run a federation by a method or plan on Python objects, and return the simulation.

    `clients` are the training examples by client name: a table of `datasets`, a torch Dataset, or
    an object with a length and `batch`. `test` is the test set of the global model, `client_tests`
    are the test sets of personal models by client. Give a `task`, which prepares tables, or the
    functions `loss` (default: the model's own), `collate` and `metrics`; `primary` is the metric by
    which models are compared (lower is better for names that end as "loss" or "error", see
    LOWER_IS_BETTER). `fraction` of the clients take part in each round; `traits` are texts by
    client for conditions of the plan. `train`, `evaluate`, `privacy`, `defence` and `aggregation`
    are sections of a study file. `callbacks` are called after each committed round.
    `device` is "auto" or a device name; `deterministic` raises where PyTorch has no deterministic
    kernel. The `seed` and `name` fix all random draws. The run is stored in `folder`, by default in
    a temporary folder that is removed at exit; `resume` continues the run in `folder`. With
    `run=False` nothing runs yet: iterate over `rounds()` of the simulation. The `runner` "local" is
    this process; "pool" and "ray" with `workers` need a study file, and raise ConfigError here.
    Raises ConfigError if arguments are invalid or do not fit together.
    """
    if not isinstance(method, Method | Plan):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"the method is {method!r}: give a plan, or one as fp.methods.fedper()")
    if not all(map(callable, callbacks)):
        raise ConfigError(
            "callbacks has an item that is not callable: give functions of a committed round"
        )
    method = method if isinstance(method, Method) else Method(method)
    if privacy and privacy.get("vote_noise_multiplier"):
        method = replace(method, joint_choice=True)
    functions = CustomTask(function=loss, collate=collate, metrics=metrics, primary=primary)
    if task is not None and functions != CustomTask():
        raise ConfigError("a task has its own loss, collator and metrics: give it, or give these")
    task = task or replace(functions, higher_is_better=not primary.endswith(LOWER_IS_BETTER))
    in_memory = InMemoryInputs(method, model, clients, task, test, client_tests or {})
    if rounds is not None and "rounds" in (train or {}):
        raise ConfigError(f"rounds is {rounds}, and train has rounds too: give it once")
    if folder:
        run_folder = Path(folder)
    else:
        temporary = mkdtemp(prefix="fedplan-")
        atexit.register(rmtree, temporary, ignore_errors=True)
        run_folder = Path(temporary) / name
    # A resumed run keeps its number of threads, which may change the bits of a sum.
    has_run = resume and (run_folder / STUDY).is_file()
    sections = dict(evaluate=evaluate, privacy=privacy, defence=defence, aggregation=aggregation)
    study = in_memory.make_study(
        name=name,
        seed=seed,
        threads=read_run_study(run_folder).threads if has_run else torch.get_num_threads(),
        device=device,
        deterministic=deterministic,
        train={**(train or {}), **({"rounds": rounds} if rounds is not None else {})},
        clients={
            "fraction": fraction,
            "traits": {str(k): dict(v) for k, v in (traits or {}).items()},
        },
        **{key: dict(section) for key, section in sections.items() if section},
    )
    prepare_folder(run_folder, study, resume=resume)
    simulation = Simulation(
        study,
        run_folder,
        in_memory,
        callbacks=callbacks,
        events=EventStream(run_folder) if folder else None,
        pool_config=make_pool_config(runner, workers),
    )
    return simulation.run() if run else simulation
