# SPDX-License-Identifier: Apache-2.0
"""Explain a study, or a published method on a named model, before anything runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedplan.federation.agreement import Agreement
from fedplan.federation.participation import Participation
from fedplan.language.client_classes import Participants
from fedplan.methods.method import Method
from fedplan.methods.phases import PlannedPhases
from fedplan.methods.registry import method_by_name
from fedplan.models.catalog import meta_model, params_of
from fedplan.models.description import describe
from fedplan.models.params import ITEMSIZE, Kind, Params
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
from fedplan.training.fit import TrainConfig


def explain_study(file: Path) -> tuple[Explanation, Statement | None]:
    """Read a study file; return the explanation of its plan and its privacy statement.

    The statement is None if differential privacy is off.
    """
    study = read_study(file)
    return explain_experiment(study, build_experiment(study))


def explain_experiment(
    study: Study, experiment: Experiment
) -> tuple[Explanation, Statement | None]:
    """Return the explanation of a built study's plan, and its privacy statement, if it has one."""
    agreement, phase_rule = experiment.agreement, experiment.agreement.method.phase_rule
    explanation = explain(
        agreement.method.plan,
        agreement.params,
        rounds=study.train.rounds,
        phases=phase_rule.after if isinstance(phase_rule, PlannedPhases) else None,
        participants=_participants(study, experiment) if study.data.path else None,
        wire_cost=agreement.wire_cost,
        step=_training_step(study, agreement.params),
    )
    return explanation, privacy_statement(study)


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
    """Explain a published method on a model given by name, with the adapters that it adds.

    `settings` are the method's own; `head` is a task and its number of labels, ("", 0) for the
    model's usual head; with `step` the memory of a training step is estimated too.
    """
    resolved = method_by_name(method, settings)
    params = _method_params(model, resolved, dtype=dtype, task=head[0], labels=head[1])
    phase_rule = resolved.phase_rule
    wire_cost = Agreement("explained", params, resolved, TrainConfig()).wire_cost
    phases = phase_rule.after if isinstance(phase_rule, PlannedPhases) else None
    return explain(
        resolved.plan, params, rounds=rounds, phases=phases, wire_cost=wire_cost, step=step
    )


def _method_params(model: str, method: Method, *, dtype: str, task: str, labels: int) -> Params:
    """Return the params of a model with those that a method adds, all in `dtype`.

    Adapters are float32 at least, as peft holds them over 16-bit weights.
    """
    if method.adapt is None:
        return params_of(model, task=task, labels=labels, dtype=dtype)
    params = describe(method.adapt(meta_model(model, task=task, num_labels=labels)))
    adapter_dtype = dtype if ITEMSIZE.get(dtype, 0) >= 4 else "float32"
    return tuple(
        replace(p, dtype=adapter_dtype if p.kind is Kind.ADAPTER else dtype) for p in params
    )


def _training_step(study: Study, params: Params) -> TrainingStep | None:
    """Return the training step of a study's client; None if its optimizer's state is unknown.

    For images the sequence length is the number of patches and one class token.
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
        autocast=train.precision != TrainConfig.precision,
    )


def _participants(study: Study, experiment: Experiment) -> Participants:
    """Return the clients of a simulated study with their traits from the study file."""
    guarantee = experiment.agreement.guarantee
    sampled = (
        guarantee is not None and guarantee.unit == "client" and guarantee.sampling_rate is not None
    )
    roster = {name: study.clients.traits.get(name, {}) for name in experiment.data.train}
    everyone = make_participation(study) == Participation() and not sampled
    return Participants(roster, full_participation=everyone)
