# SPDX-License-Identifier: Apache-2.0
"""Previews: what a study will do and cost, before it runs, and what a run has spent."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedplan.federation.agreement import Agreement, require_sound
from fedplan.federation.egress import AGREEMENT, read_agreement
from fedplan.federation.endpoint import last_of
from fedplan.federation.participation import Participation
from fedplan.language.crowds import Crowd
from fedplan.methods.method import Method
from fedplan.methods.phases import Planned
from fedplan.methods.registry import method_named
from fedplan.models.catalog import params_of, skeleton
from fedplan.models.description import describe
from fedplan.models.params import ITEMSIZE, Kind, Params
from fedplan.privacy.guard import CHARGES
from fedplan.privacy.statement import Statement
from fedplan.reports.explanation import Explanation, explain
from fedplan.reports.memory import STATES, Load
from fedplan.storage.files import put_file
from fedplan.studies.folder import study_in
from fedplan.studies.run import Run, open_run
from fedplan.studies.schema import ConfigError, Study, read_study
from fedplan.studies.stage import (
    Stage,
    guarantee_of,
    method_of,
    participation_of,
    stage_of,
    statement_of,
)
from fedplan.training.fit import Pace


def foretold(file: Path) -> tuple[Explanation, Statement | None]:
    """What the study of a file will do with its model, and what that will cost of privacy."""
    study = read_study(file)
    return foreseen_of(study, stage_of(study))


def foreseen_of(study: Study, stage: Stage) -> tuple[Explanation, Statement | None]:
    """The same of a study whose stage is built."""
    rounds = study.train.rounds
    agreement, announce = stage.agreement, stage.agreement.method.announce
    explanation = explain(
        agreement.method.plan,
        agreement.params,
        rounds=rounds,
        phases=announce.after if isinstance(announce, Planned) else None,
        crowd=_crowd(study, stage) if study.data.path else None,
        fare=agreement.fare,
        step=_step(study, agreement.params),
    )
    return explanation, statement_of(study)


def foreseen(
    model: str,
    method: str,
    settings: Mapping[str, Any],
    *,
    rounds: int,
    dtype: str,
    head: tuple[str, int],
    step: Load | None,
) -> Explanation:
    """What a published method will do with a model that is only named, adapters and all.

    `head` is a task with its number of labels, where the usual head is not meant.
    """
    made = method_named(method, settings)
    params = _adapted(model, made, dtype=dtype, task=head[0], labels=head[1])
    announce, fare = made.announce, Agreement("explained", params, made, Pace()).fare
    phases = announce.after if isinstance(announce, Planned) else None
    return explain(made.plan, params, rounds=rounds, phases=phases, fare=fare, step=step)


def _adapted(model: str, method: Method, *, dtype: str, task: str, labels: int) -> Params:
    """A model's params with those that a method adds, which peft holds in float32 over halves."""
    if method.adapt is None:
        return params_of(model, task=task, labels=labels, dtype=dtype)
    found = describe(method.adapt(skeleton(model, task=task, labels=labels)))
    own = dtype if ITEMSIZE.get(dtype, 0) >= 4 else "float32"
    return tuple(replace(p, dtype=own if p.kind is Kind.ADAPTER else dtype) for p in found)


def _step(study: Study, params: Params) -> Load | None:
    """How a client of a study trains; None if nobody knows what its optimiser remembers."""
    train, task = study.train, study.task
    named = "momentum" if train.optimiser == "sgd" and train.momentum else train.optimiser
    if named not in STATES:
        return None
    patches = [p.shape[-1] for p in params if p.kind is Kind.EMBED and len(p.shape) == 4]
    side = task.image_size // patches[0] if patches else 0
    return Load(
        batch=train.batch,
        length=side**2 + 1 if side else task.max_length,
        optimiser=named,
        checkpointing=train.checkpointing,
        half=train.precision != Pace.precision,
    )


def _crowd(study: Study, stage: Stage) -> Crowd:
    """Who takes part in a study that says it all; sites of their own may say more of themselves."""
    guarantee, said = stage.agreement.guarantee, participation_of(study)
    drawn = guarantee is not None and guarantee.unit == "client" and guarantee.rate is not None
    roster = {name: study.clients.traits.get(name, {}) for name in stage.shares.train}
    return Crowd(roster, everyone=said == Participation() and not drawn)


def stated(place: Path) -> Statement:
    """What a study promises, or a run has spent."""
    if not place.is_dir():
        return _stated(read_study(place), place)
    if (place / AGREEMENT).exists():
        folder = last_of(place)
        agreed = read_agreement(folder)
        return _stated(study_in(folder), place, Path(agreed["account"]), agreed["prefix"])
    run = open_run(place)
    guarantee = guarantee_of(run.study)
    if guarantee is not None and guarantee.unit == "example" and not run.study.gathered:
        raise ConfigError(
            f"{place}: each site pays for its own examples, and its account is there: ask for "
            "`fedplan privacy` of the site's folder of this run"
        )
    _require_charges(run)
    return _stated(run.study, place, run.folder)


def _stated(study: Study, place: Path, charged: Path | None = None, run: str = "") -> Statement:
    found = statement_of(study, charged, run=run)
    if found is None:
        raise ConfigError(f"{place} promises nothing: it has no [privacy]")
    require_sound(found.guarantee, method_of(study))
    return found


def _require_charges(run: Run) -> None:
    """Refuse to say what was spent by charges that are fewer than a run has committed."""
    for name, fault in (run.file_faults() if run.round else {}).items():
        if name.endswith(CHARGES):
            raise ConfigError(f"{fault}: nobody knows what was spent; put a copy of it back")


def state(folder: Path) -> Statement:
    """What a run has spent, also written into its folder: for the run itself, when it ends."""
    found = stated(folder)
    put_file(folder / "privacy.json", json.dumps(found.json(), indent=1) + "\n")
    return found
