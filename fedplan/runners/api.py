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
from fedplan.federation.callbacks import LOWER_IS_BETTER, Callback
from fedplan.federation.client import Client
from fedplan.federation.participation import Participation
from fedplan.federation.server import STUDY
from fedplan.federation.status import StatusReporter
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
    """Run a study, or the study of a file, on this machine, and return the finished simulation.

    `folder` is the run folder, by default runs/NAME; `resume` continues an unfinished run there.
    `continue_from` is an earlier run from which clients take their personal params. `callbacks`
    are called after each round. The `runner` "pool" or "ray" runs clients in `workers` processes
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
        status=StatusReporter(folder),
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
    """Run a federation on Python objects, and return its simulation.

    `clients` are the training examples by client name: a table of `datasets`, a torch Dataset, or
    an object with a length and `batch`. `test` is the test set of the global model, `client_tests`
    those of personal models. Give a `task`, which prepares tables, or the functions `loss`
    (default: the model's own), `collate` and `metrics`; `primary` is the metric by which models are
    compared. `fraction` of the clients take part in each round; `traits` are the clients' traits.
    `train`, `evaluate`, `privacy`, `defence` and `aggregation` are sections of a study file.
    `device` is "auto" or a device name. The run is kept in `folder`, by default in a temporary one
    that is removed at exit; `resume` continues it. With `run=False` nothing runs yet: iterate over
    `rounds()` of the result. Raises ConfigError if arguments are invalid or do not fit together.
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
    run_folder = Path(folder) if folder else _temporary_folder() / name
    study = in_memory.make_study(
        name=name,
        seed=seed,
        threads=_thread_count(run_folder, resume=resume),
        device=device,
        deterministic=deterministic,
        train={**(train or {}), **({"rounds": rounds} if rounds is not None else {})},
        clients={
            "fraction": fraction,
            "traits": {str(k): dict(v) for k, v in (traits or {}).items()},
        },
        **({"evaluate": dict(evaluate)} if evaluate else {}),
        **({"privacy": dict(privacy)} if privacy else {}),
        **({"defence": dict(defence)} if defence else {}),
        **({"aggregation": dict(aggregation)} if aggregation else {}),
    )
    prepare_folder(run_folder, study, resume=resume)
    status = StatusReporter(run_folder) if folder else None
    simulation = Simulation(
        study,
        run_folder,
        in_memory,
        callbacks=callbacks,
        status=status,
        pool_config=make_pool_config(runner, workers),
    )
    return simulation.run() if run else simulation


def _thread_count(folder: Path, *, resume: bool) -> int:
    """Return this process's number of threads; a resumed run keeps the one of its study."""
    resumes = resume and (folder / STUDY).is_file()
    return read_run_study(folder).threads if resumes else torch.get_num_threads()


def _temporary_folder() -> Path:
    """Make a folder that is removed at exit."""
    folder = Path(mkdtemp(prefix="fedplan-"))
    atexit.register(rmtree, folder, ignore_errors=True)
    return folder
