# SPDX-License-Identifier: Apache-2.0
"""Read the models of a run or of a site, filled with values, with the card that describes each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from fedplan.data.custom_task import CustomTask
from fedplan.data.tasks.definition import Task
from fedplan.federation.agreement import Agreement
from fedplan.federation.endpoint import only_run_folder, read_personal_model
from fedplan.federation.global_state import global_values, personal_values
from fedplan.federation.ledger.egress import read_agreement
from fedplan.language.predicates import Turn
from fedplan.models.adapters import adapter_families
from fedplan.models.values import set_values
from fedplan.studies.experiment import Experiment, build_experiment, privacy_statement
from fedplan.studies.federated_data import FederatedData
from fedplan.studies.model_card import ModelCard, private_names
from fedplan.studies.record import read_data_record
from fedplan.studies.run import (
    RunReader,
    read_consistently,
    read_earlier_expenses,
    read_run_agreement,
    read_run_study,
    read_task_file,
    sweep_expenses,
)
from fedplan.studies.run_scores import client_score, score_rules
from fedplan.studies.schema import ConfigError, Study
from fedplan.studies.sections import DataSection
from fedplan.studies.stored_model import MODEL_FOLDER, STORED_FILE, load_stored_model
from fedplan.tensors.named import Tensors

HIDDEN_COLUMNS = ("examples", "clients")
"""Metrics that are no scores; the number of test examples is not revealed."""


@dataclass(frozen=True)
class ExportedModel:
    """A model filled with the values of a run."""

    model: nn.Module
    task: Task
    card: ModelCard

    @property
    def loader(self) -> str:
        """The name of the transformers class that loads the model."""
        if not isinstance(self.task, CustomTask):
            return self.task.model_class
        adapted = adapter_families(self.model)
        return type(cast("Any", self.model).get_base_model() if adapted else self.model).__name__


def read_run_model(folder: Path, client: str, *, best: bool) -> ExportedModel:
    """Return the global model of a run, or the personal model of `client` if given."""
    return read_consistently(folder, lambda run: next(read_run_models(run, [client], best=best))[1])


def read_run_models(
    run: RunReader, names: Iterable[str], *, best: bool
) -> Iterator[tuple[str, ExportedModel]]:
    """Yield (name, model) of clients of a run, and of the global model for the name "".

    All are the same module, which holds the values of the last one. Raises RunAdvanced if the run
    has committed another round since it was opened.
    """
    study, folder = run.study, run.folder
    global_state = run.best_state if best else run.global_state
    states = ((name, run.client_state(name)[0] if name else {}) for name in names)
    first = next(states)  # an unknown client is refused before the model is built
    if study.data.from_python:
        experiment = _load_experiment(run)
    else:
        experiment = _rebuild_experiment(study, run.agreement, run.labels)
    initial = experiment.initial_values
    earlier = read_earlier_expenses(folder)
    statement = privacy_statement(study, folder, earlier=(*earlier, *sweep_expenses(folder)))
    clients = run.clients or list(study.clients.names)
    public, number = statement is None, global_state.round
    row = next((row for row in run.metrics if public and row["round"] == number), {})
    told = public and not study.aggregation.config.active
    trained: dict[str, Any] = read_data_record(folder).get("train", {}) if told else {}
    for client, client_state in chain([first], states):
        values = global_values(run.agreement, global_state, initial)
        scores = list(score_rules(run).of_row(row).scores)
        if not client:
            scores.sort(key=lambda score: score.kind != "global")  # this model's first
        else:
            turn = Turn(run.round, client, global_state.phase, study.clients.traits.get(client, {}))
            values = personal_values(run.agreement, global_state, initial, turn, client_state)
            if public and (own := client_score(run, client)):
                scores = [replace(own, kind="this client"), *scores]
        prefix = f"clients.{client}." if client else "global."
        # Of clients "a" and "a.b", only the latter has the metric clients.a.b.loss.
        longer = tuple(f"clients.{name}." for name in clients if name.startswith(f"{client}."))
        own_row = {
            n.removeprefix(prefix): v
            for n, v in row.items()
            if n.startswith(prefix) and not n.startswith(longer)
        }
        card = ModelCard(
            study,
            run.agreement,
            number,
            len(clients),
            personal=bool(client),
            statement=statement,
            earlier=earlier,
            scores={name: value for name, value in own_row.items() if name not in HIDDEN_COLUMNS},
            score_texts=tuple(replace(score, client="").text for score in scores),
            train_examples=sum(int(each["examples"]) for each in trained.values()),
            private_names=private_names(study, clients),
        )
        yield client, _fill_model(experiment, values, card)


def _fill_model(experiment: Experiment, values: Tensors, card: ModelCard) -> ExportedModel:
    params = [p for p in experiment.agreement.trainable if p.key in values]
    initial = experiment.initial_values
    changed = tuple(p.name for p in params if not torch.equal(values[p.key], initial[p.key]))
    set_values(experiment.model, values, params)
    return ExportedModel(experiment.model, experiment.data.task, replace(card, changed=changed))


def read_site_model(folder: Path, key: Path | None) -> ExportedModel:
    """Return the personal model at a client's site; `key`: key file of the encrypted state."""
    folder = only_run_folder(folder)
    study, terms = read_run_study(folder), read_agreement(folder)
    agreement = replace(read_run_agreement(folder), start=str(terms.get("model")))
    labels, clients = read_task_file(folder)
    experiment = _rebuild_experiment(study, agreement, labels)
    names = list(study.clients.names) or clients
    account, run = Path(str(terms.get("account", ""))), str(terms.get("prefix", ""))
    earlier = read_earlier_expenses(folder)
    statement = privacy_statement(study, account, run=run, earlier=earlier)
    card = ModelCard(
        study,
        agreement,
        0,
        len(names),
        personal=True,
        statement=statement,
        earlier=earlier,
        private_names=private_names(study, names),
    )
    return _fill_model(experiment, read_personal_model(agreement, folder, key), card)


def _rebuild_experiment(study: Study, agreement: Agreement, labels: list[str]) -> Experiment:
    """Build the initial model of a run again, without data; ConfigError if it is another now."""
    task = study.task.model_copy(update={"labels": labels})
    experiment = build_experiment(study.model_copy(update={"data": DataSection(), "task": task}))
    if experiment.agreement.params != agreement.params:
        raise ConfigError("the study's model has other params than the run started from")
    experiment.require_start(agreement.start)
    return experiment


def _load_experiment(run: RunReader) -> Experiment:
    """Load the stored initial model of a run from Python; ConfigError if there is none."""
    folder, agreement = run.folder, run.agreement
    if faults := [*run.model_faults().values()]:
        raise ConfigError(f"{folder}: {faults[0]}: restore it from a backup")
    if not (folder / MODEL_FOLDER / STORED_FILE).is_file():
        raise ConfigError(
            f"{folder} has no initial model, since it is temporary, of an older version or of "
            "RunOptions(store_model=False): give RunOptions a folder, or continue it with "
            "fedplan.simulate(..., options=RunOptions(folder=..., resume=True)), with the same "
            "objects, which stores the model"
        )
    model, task = load_stored_model(folder / MODEL_FOLDER)
    experiment = Experiment(FederatedData({}, {}, None, task), model, agreement)
    if experiment.model_digest != agreement.start:
        raise ConfigError(
            f"the run started from the model {agreement.start}, but {folder / MODEL_FOLDER} is "
            f"{experiment.model_digest}: restore it from a backup"
        )
    return experiment
