# SPDX-License-Identifier: Apache-2.0
"""Explain a study, or a published method on a named model, before anything runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedplan.federation.agreement import Agreement
from fedplan.federation.participation import Participation
from fedplan.language.resolution import Participants
from fedplan.methods.phases import PlannedPhases
from fedplan.methods.registry import method_by_name
from fedplan.models.catalog import meta_model, params_of
from fedplan.models.description import describe
from fedplan.models.params import ITEMSIZE, Kind, Params
from fedplan.privacy.guarantee import Guarantee
from fedplan.privacy.statement import Statement
from fedplan.reports.explanation import Explanation, explain
from fedplan.reports.memory import OPTIMIZER_STATES, TrainingStep
from fedplan.studies.experiment import (
    Experiment,
    build_experiment,
    make_participation,
    privacy_statement,
)
from fedplan.studies.schema import Study, read_study
from fedplan.training.fit import TrainArguments


def explain_study(file: Path) -> tuple[Explanation, Statement | None]:
    """Read a study file; return the explanation of its plan, and its privacy statement.

    The privacy statement is None if differential privacy is off. Builds the whole experiment: loads
    the data, and loads or creates the initial model. Raises ConfigError if the file is no valid
    study, and FedplanError if data, model or plan cannot be used.
    """
    study = read_study(file)
    return explain_experiment(study, build_experiment(study))


def explain_experiment(
    study: Study, experiment: Experiment
) -> tuple[Explanation, Statement | None]:
    """Return (explanation of the plan, privacy statement or None) of a study.

    `experiment` is `build_experiment(study)`. The clients are those of the data in `data.path`;
    without a path, one client is assumed for each class of clients that the plan distinguishes.
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
    return explanation, privacy_statement(study)


def full_participation(study: Study, guarantee: Guarantee | None) -> bool:
    """Whether every client takes part in every round: no sampling by the study or for privacy."""
    sampled = (
        guarantee is not None and guarantee.unit == "client" and guarantee.sampling_rate is not None
    )
    return make_participation(study) == Participation() and not sampled


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
    """Explain a published method, with the adapters of the method, on a model given by name.

    `settings` are the method's own, `rounds` the length of the run; `dtype` is the dtype of all
    params, but adapters are float32 at least. `head` is (task, number of labels), ("", 0) for the
    model's usual head. With `step`, the memory of a training step is estimated too. Raises
    FedplanError if the name of a model, method or setting is unknown.
    """
    resolved, (task, labels) = method_by_name(method, settings), head
    if resolved.adapt is None:
        params = params_of(model, task=task, labels=labels, dtype=dtype)
    else:
        adapted = describe(resolved.adapt(meta_model(model, task=task, num_labels=labels)))
        # peft holds adapters over 16-bit weights in float32.
        adapter_dtype = dtype if ITEMSIZE.get(dtype, 0) >= 4 else "float32"
        params = tuple(
            replace(p, dtype=adapter_dtype if p.kind is Kind.ADAPTER else dtype) for p in adapted
        )
    cost = Agreement("explained", params, resolved, TrainArguments()).wire_cost
    phase_rule = resolved.phase_rule
    phases = phase_rule.after if isinstance(phase_rule, PlannedPhases) else None
    return explain(resolved.plan, params, rounds=rounds, phases=phases, wire_cost=cost, step=step)


def _training_step(study: Study, params: Params) -> TrainingStep | None:
    """Return the training step of a client of a study; None if the optimizer's state is unknown.

    The sequence length is `task.max_length`; for an image model (with a 4-dimensional patch
    embedding in `params`), it is the number of patches plus one class token.
    """
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
