# SPDX-License-Identifier: Apache-2.0
"""Explain a plan, or a published method, on a model given by its type, folder or hub id."""

from __future__ import annotations

import json
from collections.abc import Iterable

from fedplan.errors import FedplanError
from fedplan.language.parser import parse
from fedplan.models.catalog import params_of
from fedplan.reports.explanation import Explanation, explain
from fedplan.reports.memory import TrainingStep


def explain_plan(
    model: str,
    plan: str = "",
    *,
    method: str = "",
    settings: Iterable[str] = (),
    rounds: int = 100,
    phases: Iterable[str] = (),
    task: str = "",
    labels: int = 0,
    dtype: str = "float32",
    step: TrainingStep | None = None,
) -> Explanation:
    """Explain a plan's text, or a method given by name, on a model; no weights are loaded.

    Give `plan` or `method`, not both. `settings` are texts NAME=VALUE for the method, with a JSON
    value or a plain text; `phases` are texts NAME=ROUND: the phase NAME of the plan begins after
    that round. `task` and `labels` replace the model's usual head; `dtype` is the dtype of
    the weights. With `step`, the memory of a training step is estimated too. Raises FedplanError if
    the arguments contradict each other or a text is malformed, PlanError if the plan names parts
    that the model lacks.
    """
    if method and plan:
        raise FedplanError(f"the method {method} has its own plan: omit {plan!r}")
    if model.endswith(".toml"):
        raise FedplanError(f"{model} is a study file, which has its own plan: omit {plan!r}")
    if method and (phase_texts := list(phases)):
        raise FedplanError(
            f"the method {method} sets its own phases: omit --phase {phase_texts[0]} and use a "
            "setting of the method, for example --setting warmup=20"
        )
    if method:
        from fedplan.reports.explain_study import explain_method

        return explain_method(
            model,
            method,
            dict(map(_parse_setting, settings)),
            rounds=rounds,
            dtype=dtype,
            head=(task, labels),
            step=step,
        )
    if not plan:
        raise FedplanError(f"give a plan for {model}, for example 'share()', or name a study.toml")
    phase_rounds = dict[str, int]()
    for text in phases:
        name, _, after = text.partition("=")
        if not name or not after.isdecimal():
            raise FedplanError(f"--phase takes NAME=ROUND, for example frozen=20, not {text!r}")
        phase_rounds[name] = int(after)
    params = params_of(model, task=task, labels=labels, dtype=dtype)
    return explain(parse(plan), params, rounds=rounds, phases=phase_rounds, step=step)


def _parse_setting(text: str) -> tuple[str, object]:
    """Split a text NAME=VALUE into name and value, which is decoded from JSON or stays a string.

    Raises FedplanError if there is no name or no `=`.
    """
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise FedplanError(f"--setting takes NAME=VALUE, for example rank=8, not {text!r}")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value
