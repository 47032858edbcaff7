# SPDX-License-Identifier: Apache-2.0
"""Explain a study or a published method before anything runs, and state the privacy of a study."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedplan.federation.agreement import Agreement, require_private_method
from fedplan.federation.endpoint import only_run_folder
from fedplan.federation.ledger.egress import AGREEMENT, read_agreement
from fedplan.federation.participation import Participation
from fedplan.language.resolution import Participants
from fedplan.methods.phases import PlannedPhases
from fedplan.methods.registry import method_by_name
from fedplan.models.catalog import meta_model, params_of
from fedplan.models.description import describe
from fedplan.models.params import ITEMSIZE, Kind, Params
from fedplan.privacy.guarantee import Guarantee
from fedplan.privacy.guard import CHARGES_FILE
from fedplan.privacy.statement import PRIVACY_FILE, Expense, Statement
from fedplan.reports.explanation import Explanation, explain
from fedplan.reports.memory import OPTIMIZER_STATES, TrainingStep
from fedplan.reports.plan_warnings import study_exposure
from fedplan.reports.study_warnings import study_warnings
from fedplan.storage.files import write_atomic
from fedplan.studies.experiment import (
    Experiment,
    build_experiment,
    make_method,
    make_participation,
    privacy_guarantee,
    privacy_statement,
)
from fedplan.studies.record import data_record
from fedplan.studies.run import read_earlier_expenses, read_run, read_run_study, sweep_expenses
from fedplan.studies.schema import ConfigError, Study, read_study
from fedplan.tensors.devices import AUTO, resolve_device
from fedplan.training.fit import TrainArguments


def explain_study(file: Path) -> tuple[Explanation, Statement | None]:
    """Read a study file; return the explanation of its plan, and its privacy statement.

    The statement is None without differential privacy. Builds the whole experiment. Raises
    FedplanError if study, data, model or plan cannot be used.
    """
    study = read_study(file)
    return explain_experiment(study, build_experiment(study))


def explain_experiment(
    study: Study, experiment: Experiment
) -> tuple[Explanation, Statement | None]:
    """Return (explanation of the plan, privacy statement or None) of a study.

    Without `data.path`, one client is assumed for each class of clients.
    """
    agreement, phase_rule = experiment.agreement, experiment.agreement.method.phase_rule
    roster = {name: study.clients.traits.get(name, {}) for name in experiment.data.train}
    everyone = full_participation(study, agreement.guarantee)
    participants = Participants(roster, full_participation=everyone) if study.data.path else None
    explanation = explain(
        agreement.method.plan,
        agreement.params,
        rounds=study.train.rounds,
        phases=phase_rule.after if isinstance(phase_rule, PlannedPhases) else None,
        participants=participants,
        wire_cost=agreement.wire_cost,
        step=_training_step(study, agreement.params),
    )
    notes = (*explanation.forecast.notes, *experiment.data.notes)
    device = resolve_device(AUTO).type if study.device == AUTO else study.device
    record = data_record(study, experiment.data)
    explanation = replace(
        explanation,
        forecast=replace(explanation.forecast, notes=notes),
        warning=study_exposure(agreement),
        warnings=tuple(study_warnings(study, agreement, record, roster)),
        on_gpu=device != "cpu",
    )
    return explanation, privacy_statement(study)


def full_participation(study: Study, guarantee: Guarantee | None) -> bool:
    """Whether every client takes part in every round: no sampling by the study or for privacy."""
    sampled = guarantee and guarantee.unit == "client" and guarantee.sampling_rate is not None
    return make_participation(study).fraction == Participation.fraction and not sampled


def explain_method(
    model: str,
    method: str,
    settings: Mapping[str, Any],
    *,
    rounds: int,
    dtype: str,
    head: tuple[str, int],
    step: TrainingStep | None,
) -> Explanation:
    """Explain a published method, with its adapters, on a model given by name.

    `dtype` is that of all params, but adapters are float32 at least. `head` is (task, labels).
    Raises FedplanError for an unknown name.
    """
    resolved, (task, labels) = method_by_name(method, settings), head
    if resolved.adapt is None:
        params = params_of(model, task=task, labels=labels, dtype=dtype)
    else:
        adapted = describe(resolved.adapt(meta_model(model, task=task, num_labels=labels)))
        # peft holds adapters over 16-bit weights in float32.
        wide = dtype if ITEMSIZE.get(dtype, 0) >= 4 else "float32"
        params = tuple(replace(p, dtype=wide if p.kind is Kind.ADAPTER else dtype) for p in adapted)
    resolved = resolved.for_params(params)
    cost = Agreement("explained", params, resolved, TrainArguments()).wire_cost
    phase_rule = resolved.phase_rule
    phases = phase_rule.after if isinstance(phase_rule, PlannedPhases) else None
    return explain(resolved.plan, params, rounds=rounds, phases=phases, wire_cost=cost, step=step)


def _training_step(study: Study, params: Params) -> TrainingStep | None:
    """Return the training step of a client of a study; None if the optimizer's state is unknown."""
    train, task = study.train, study.task
    optimizer = "momentum" if train.optimizer == "sgd" and train.momentum else train.optimizer
    if optimizer not in OPTIMIZER_STATES:
        return None
    patches = [p.shape[-1] for p in params if p.kind is Kind.EMBED and len(p.shape) == 4]
    side = task.image_size // patches[0] if patches else 0
    return TrainingStep(
        batch_size=train.batch_size,
        sequence_length=side**2 + 1 if side else task.max_length,
        optimizer=optimizer,
        gradient_checkpointing=train.gradient_checkpointing,
        autocast=train.precision != TrainArguments.precision,
    )


def read_privacy_statement(path: Path, *, with_sweep: bool = True) -> Statement:
    """Return the privacy statement (guarantee and epsilon spent) of a study or of a run.

    `path` is a study file, for which nothing is spent yet, a run folder, or a site's folder of a
    run. `with_sweep`: for a run of a sweep, add what the other runs have spent. Raises ConfigError
    if the study has no [privacy] section, if only the sites have the accounts of spent epsilon, or
    if entries are missing in the run's file of spent epsilon.
    """
    if not path.is_dir():
        return _require_statement(read_study(path), path)
    if (path / AGREEMENT).exists():
        folder = only_run_folder(path)
        agreement = read_agreement(folder)
        account, prefix = Path(agreement["account"]), agreement["prefix"]
        earlier = read_earlier_expenses(folder)
        return _require_statement(read_run_study(folder), path, account, prefix, earlier)
    run = read_run(path)
    guarantee = privacy_guarantee(run.study)
    if guarantee is not None and guarantee.unit == "example" and not run.study.has_central_data:
        raise ConfigError(
            f"{path}: each site keeps the privacy account of its own examples; run `fedplan "
            "privacy` at the site, on the site's folder of this run"
        )
    for name, fault in (run.file_faults() if run.round else {}).items():
        if name.endswith(CHARGES_FILE):
            raise ConfigError(f"{fault}: the spent epsilon is unknown; restore the file")
    earlier = read_earlier_expenses(run.folder)
    earlier += sweep_expenses(run.folder) if with_sweep else ()
    return _require_statement(run.study, path, run.folder, earlier=earlier)


def write_privacy_statement(folder: Path) -> Statement:
    """Write the privacy statement of a run to its folder, and return it; raises as the reader.

    Leaves out the other runs of a sweep, which may not have ended.
    """
    statement = read_privacy_statement(folder, with_sweep=False)
    write_atomic(folder / PRIVACY_FILE, json.dumps(statement.json(), indent=1) + "\n")
    return statement


def _require_statement(
    study: Study,
    path: Path,
    account: Path | None = None,
    run: str = "",
    earlier: tuple[Expense, ...] | None = None,
) -> Statement:
    """Return the privacy statement of a study, with the epsilon spent in an account folder."""
    statement = privacy_statement(study, account, run=run, earlier=earlier)
    if statement is None:
        raise ConfigError(f"{path}: differential privacy is off: the study has no [privacy]")
    require_private_method(statement.guarantee, make_method(study))
    return statement
