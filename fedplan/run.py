# SPDX-License-Identifier: Apache-2.0
"""Start a run from Python or from a study file, and open the run in a folder."""

from __future__ import annotations

import atexit
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any, Never

import torch
from torch import Tensor, nn

from fedplan.audits.repair import repair_run
from fedplan.data.custom_task import CustomTask, model_loss
from fedplan.data.examples import Loss
from fedplan.data.tasks.definition import Task
from fedplan.federation.client import TrainSetup
from fedplan.federation.identity import STUDY
from fedplan.federation.ledger.events import Callback, CommittedRound
from fedplan.federation.ledger.history import Metrics
from fedplan.federation.ledger.records import Record
from fedplan.federation.ledger.stream import EventStream
from fedplan.language.plan import Plan
from fedplan.methods.method import Method
from fedplan.models.description import describe
from fedplan.reports.pages.run_report import report
from fedplan.reports.plan_warnings import RunWarning
from fedplan.reports.run_warnings import read_run_warnings
from fedplan.reports.study_warnings import NOTHING_RUN, refuse_warnings, study_warnings
from fedplan.runners.executors.executor import make_pool_config
from fedplan.runners.simulation import Simulation
from fedplan.studies.export import export_run, load_run_model, load_run_values
from fedplan.studies.federation_sections import (
    AggregationConfig,
    ClientsConfig,
    DefenceConfig,
    EvaluateConfig,
    PrivacyConfig,
)
from fedplan.studies.in_memory import InMemoryInputs
from fedplan.studies.record import read_data_record
from fedplan.studies.resume import continue_study, prepare_folder
from fedplan.studies.run import read_run, read_run_study
from fedplan.studies.schema import ConfigError, Study, read_study
from fedplan.studies.sections import TrainConfig
from fedplan.tensors.devices import AUTO

_MOVED = {
    " ".join(TrainConfig.model_fields): "train=fp.TrainConfig({}=...)",
    " ".join(ClientsConfig.model_fields): "participation=fp.ClientsConfig({}=...)",
    "collate metrics primary": "task=fp.CustomTask({}=...)",
    "client_tests": 'clients={{"north": {{"train": ..., "test": ...}}}}',
    "folder resume repair start name seed device deterministic": "options=fp.RunOptions({}=...)",
    "store_model": "options=fp.RunOptions({}=...)",
    "run": "options=fp.RunOptions(start=False)",
    "runner workers": "fp.run_study, with a study file",
}
"""Words that somebody may give to `simulate`, with the place where they belong."""


@dataclass(frozen=True)
class RunOptions:
    """Where and how `simulate` runs; `name` and `seed` fix all random draws.

    `folder`: the run's folder; by default a temporary one, which is removed at exit.
    `resume`: continue the run in `folder`; without it a folder with rounds is an error.
    `repair`: restore the run's lost and damaged files before it goes on, by running rounds again.
    `start`: False runs no round yet; iterate over `Run.rounds`.
    `device`: "auto" or a device name. `deterministic`: raise where PyTorch has no deterministic
    kernel. `store_model`: store the initial model in `folder`, which takes as much disk as all its
    values, so that any process can open and export the run without the objects that made it.
    """

    folder: Path | str | None = None
    resume: bool = False
    repair: bool = False
    start: bool = True
    name: str = "study"
    seed: int = 0
    device: str = AUTO
    deterministic: bool = TrainSetup.deterministic
    store_model: bool = True


class Run:
    """A run and its folder, as `simulate`, `run_study` and `open_run` return it.

    What it reads is of the last committed round, also while the run goes on. `simulation` is the
    run in this process, None for a run that was only opened.
    """

    def __init__(self, folder: Path, simulation: Simulation | None = None) -> None:
        self.folder, self.simulation = folder, simulation

    @property
    def study(self) -> Study:
        """The study of the run."""
        return read_run_study(self.folder)

    @property
    def round(self) -> int:
        """The last committed round; 0 before the first."""
        return read_run(self.folder).round

    @property
    def clients(self) -> list[str]:
        """The names of the clients, if the run has their data; else empty."""
        return read_run(self.folder).clients

    @property
    def metrics(self) -> Metrics:
        """A row of numbers for each round: loss, bytes, and scores if it was evaluated."""
        return read_run(self.folder).metrics

    @property
    def warnings(self) -> list[RunWarning]:
        """Reasons to doubt the result, each with its remedy: nothing trained, few test examples."""
        return read_run_warnings(self.folder)

    @property
    def ledger(self) -> list[Record]:
        """The turns and rounds of the ledger."""
        return read_run(self.folder).records

    @property
    def stopped(self) -> str:
        """Why the run ended here before its last round: a callback's text, or an operator's stop.

        Empty if the run did not end early, or did not run in this process.
        """
        return self.simulation.stopped if self.simulation else ""

    def global_model(self) -> nn.Module:
        """Return a new model with the global values.

        A run that was only opened builds its model again from the study's files, or from the model
        stored in its folder; ConfigError if these have changed, or if the model is of a class that
        is neither of transformers nor of fedplan: see `global_values`.
        """
        if self.simulation:
            return self.simulation.global_model()
        return load_run_model(self.folder)

    def personal_model(self, client: str) -> nn.Module:
        """Return a new model with a client's personal values over the global ones.

        Raises ConfigError if there is no client of this name, and as `global_model`.
        """
        if self.simulation:
            return self.simulation.personal_model(client)
        return load_run_model(self.folder, client)

    def global_values(self) -> dict[str, Tensor]:
        """Return the state dict of the global model; also if the class of the model is unknown.

        Load it by `model.load_state_dict(run.global_values())`. Raises ConfigError if the run has
        no readable initial model.
        """
        if self.simulation:
            return dict(self.simulation.global_model().state_dict())
        return load_run_values(self.folder)

    def personal_values(self, client: str) -> dict[str, Tensor]:
        """Return the state dict of a client's personal model; see `global_values`.

        Raises ConfigError if there is no client of this name, and as `global_values`.
        """
        if self.simulation:
            return dict(self.simulation.personal_model(client).state_dict())
        return load_run_values(self.folder, client)

    def export(
        self,
        output: Path | str,
        client: str = "",
        *,
        adapter: bool = False,
        best: bool = False,
        global_model: bool = False,
        all_clients: bool = False,
    ) -> str:
        """Write a model of this run as a Hugging Face folder, and return the code that loads it.

        As `fedplan export`: the personal model of `client`, or the global model, which must be said
        by `global_model` if clients keep parts of their own. `adapter`: only the peft adapter.
        `best`: the best round. `all_clients`, with `adapter`: the shared adapter and each client's,
        with a manifest. Raises ConfigError as `fedplan.export_run`.
        """
        return export_run(
            self.folder,
            output,
            client,
            adapter=adapter,
            best=best,
            global_model=global_model,
            all_clients=all_clients,
        )

    def report(
        self,
        file: str | Path = "report.html",
        *,
        csv: str | Path | None = None,
        png: str | Path | None = None,
    ) -> Path:
        """Write the report of this run to a self-contained HTML file; return its path.

        `csv` and `png` are folders for the numbers and the images of the figures.
        """
        return report(self.folder, file, csv=csv, png=png)

    def rounds(self) -> Iterator[CommittedRound]:
        """Run the remaining rounds one by one; yield each after its commit and its callbacks.

        The run waits while the caller holds the iterator, and stops if the iterator is closed.
        """
        return self._open().rounds()

    def resume(
        self, rounds: int | None = None, *, callbacks: Sequence[Callback] | None = None
    ) -> Run:
        """Run the remaining rounds, and return this object.

        `rounds` is a new total number of rounds. `callbacks` replace all earlier callbacks and the
        study's early stopping. Raises ConfigError if the study's model or data have changed.
        """
        self._open().resume(rounds, callbacks=callbacks)
        return self

    def _open(self) -> Simulation:
        if self.simulation is None:
            events = EventStream(self.folder)
            self.simulation = Simulation(self.study, self.folder, events=events)
        return self.simulation


def open_run(folder: Path | str) -> Run:
    """Open the run in a folder, finished or in progress; nothing there is changed.

    Raises ConfigError if the folder has no run.
    """
    return Run(read_run(folder).folder)


def run_study(
    study: Study | Path | str,
    folder: Path | str | None = None,
    *,
    resume: bool = False,
    continue_from: Path | str = "",
    callbacks: Sequence[Callback] = (),
    runner: str = "local",
    workers: int | None = None,
    gpus_per_worker: float = 0.0,
    ray_address: str = "",
    devices_per_client: int = 1,
    strict: bool = False,
) -> Run:
    """Run all rounds of a study (an object or a TOML file) here; return the finished run.

    `folder` is the run folder, by default runs/NAME. A folder with committed rounds raises
    ConfigError without `resume`; with `resume` the run there is continued. `continue_from` is the
    folder or id of an earlier run from which clients take their personal params. `callbacks` are
    called after each round. The `runner` "pool" or "ray" runs clients in `workers` processes
    (default: by the number of cores) with the same result as "local"; `gpus_per_worker` and
    `ray_address` are for "ray". `devices_per_client` is for "local": the number of CUDA cards that
    train each client's model together, with the same result up to rounding. `strict` makes warnings
    errors: a FedplanError before the first round, or at the end of the run, names them. Raises
    ConfigError if study, folder or arguments are invalid.
    """
    pool_config = make_pool_config(runner, workers, gpus_per_worker, ray_address)
    study = study if isinstance(study, Study) else read_study(Path(study))
    study = continue_study(study, continue_from) if continue_from else study
    folder = Path(folder or Path("runs") / study.name)
    prepare_folder(folder, study, resume=resume)
    simulation = Simulation(
        study,
        folder,
        earlier_run=continue_from,
        callbacks=callbacks,
        events=EventStream(folder),
        pool_config=pool_config,
        devices_per_client=devices_per_client,
    )
    if strict:
        record = read_data_record(folder)
        refuse_warnings(study_warnings(study, simulation.federation.agreement, record), NOTHING_RUN)
    run = Run(folder, simulation.run())
    refuse_warnings(run.warnings if strict else (), f"{folder} is doubtful")
    return run


def simulate(
    method: Method | Plan,
    model: nn.Module,
    clients: Mapping[str, Any],
    loss: Loss = model_loss,
    *,
    task: Task | None = None,
    test: Any = None,
    validation: Any = None,
    train: TrainConfig | None = None,
    participation: ClientsConfig | None = None,
    evaluate: EvaluateConfig | None = None,
    privacy: PrivacyConfig | None = None,
    defence: DefenceConfig | None = None,
    aggregation: AggregationConfig | None = None,
    callbacks: Sequence[Callback] = (),
    options: RunOptions | None = None,
    **unknown: Never,
) -> Run:
    """Run a federation by a method or plan on Python objects, and return the run.

    `clients` are the training examples by client name: a table of `datasets`, a torch Dataset, or
    an object with a length and `batch`; or "train", "validation" and "test" examples of the client,
    as a dict or DatasetDict. `test` is the test set of the global model, `validation` the common
    set by which the best round and early stopping are decided.
    `loss` is a function of model and batch (default: the model's own loss). `task` is a CustomTask
    with your own collator and metrics beside the loss, or a task that prepares tables and has a
    loss of its own.
    `train`, `evaluate`, `privacy`, `defence` and `aggregation` are the sections of these names in a
    study file, `participation` is [clients] without `names`; None has the defaults there.
    `callbacks` are called after each committed round. The caller's model is not changed.
    Raises ConfigError if arguments are invalid or do not fit together.
    """
    for word in unknown:
        place = next((place for words, place in _MOVED.items() if word in words.split()), "")
        hint = f": use {place.format(word)}" if place else ""
        raise TypeError(f"simulate() has no argument {word!r}{hint}")
    if not isinstance(method, Method | Plan):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(
            f"the method is {method!r}: give a plan, as fp.parse('share()'), or a method, as "
            "fp.methods.fedper()"
        )
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"the model is {model!r}: give an nn.Module, as Classifier()")
    if callable(callbacks) or not all(map(callable, callbacks)):
        raise ConfigError(f"callbacks is {callbacks!r}: give a list of functions of a round")
    if not isinstance(options, RunOptions | None):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"options is {options!r}: give fp.RunOptions(...)")
    if options and options.repair and not options.resume:
        raise ConfigError("repair is True without resume: only a run that goes on is repaired")
    if options and options.resume and not options.folder:
        raise ConfigError("resume is True without a folder: give the folder of the run, too")
    method = method if isinstance(method, Method) else Method(method)
    if privacy and privacy.vote_noise_multiplier:
        method = replace(method, joint_choice=True)
    if method.plan_without_head is not None:
        method = method.for_params(describe(model))
    if task is not None and not isinstance(task, CustomTask) and loss is not model_loss:
        raise ConfigError("a task has its own loss: give a task, or a loss")
    task = CustomTask() if task is None else task
    if isinstance(task, CustomTask):
        task = replace(task, function=task.function if loss is model_loss else loss)
    in_memory, options = (
        InMemoryInputs(method, model, clients, task, test, validation),
        options or RunOptions(),
    )
    if options.folder:
        folder = Path(options.folder)
    else:
        temporary = mkdtemp(prefix="fedplan-")
        atexit.register(rmtree, temporary, ignore_errors=True)
        folder = Path(temporary) / options.name
    # A resumed run keeps its number of threads, which may change the bits of a sum.
    has_run = options.resume and (folder / STUDY).is_file()
    study = in_memory.make_study(
        name=options.name,
        seed=options.seed,
        threads=read_run_study(folder).threads if has_run else torch.get_num_threads(),
        device=options.device,
        deterministic=options.deterministic,
        sections={
            "train": train,
            "clients": participation,
            "evaluate": evaluate,
            "privacy": privacy,
            "defence": defence,
            "aggregation": aggregation,
        },
    )
    prepare_folder(folder, study, resume=options.resume)
    if options.repair:
        repair_run(folder, in_memory)
    events = EventStream(folder) if options.folder else None
    simulation = Simulation(
        study,
        folder,
        in_memory,
        callbacks=callbacks,
        events=events,
        store_model=options.store_model and bool(options.folder),
    )
    return Run(folder, simulation.run() if options.start else simulation)
