# SPDX-License-Identifier: Apache-2.0
"""Stages: what each end of a study builds for itself: rows, model and agreement."""

from __future__ import annotations

import copy
import hashlib
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fedplan import seeds
from fedplan.data.examples import Examples
from fedplan.data.foresight import require_sight
from fedplan.data.own import OWN
from fedplan.federation.agreement import Agreement, require_sound
from fedplan.federation.evaluation import Scoring
from fedplan.federation.exams import Exam
from fedplan.federation.origin import Base, base_of
from fedplan.federation.participation import Participation
from fedplan.federation.record import joined
from fedplan.language.crowds import phases_in
from fedplan.language.parser import parse
from fedplan.language.plan import chain
from fedplan.language.resolution import check
from fedplan.methods.method import Method
from fedplan.methods.phases import Planned
from fedplan.methods.products import product_told
from fedplan.methods.registry import method_named, server_optimiser_named
from fedplan.methods.told import Told, told_method
from fedplan.models.description import describe
from fedplan.models.params import Params
from fedplan.models.quantised import steadied
from fedplan.models.values import take
from fedplan.privacy.guarantee import Guarantee
from fedplan.privacy.statement import Statement
from fedplan.studies.given import Given
from fedplan.studies.model import adapted, outlined_model, starting_model
from fedplan.studies.schema import ConfigError, Study
from fedplan.studies.sections import DataSection, MethodSection
from fedplan.studies.shares import Shares, shares_of
from fedplan.tensors.devices import at_rest, brought, device_of, forked
from fedplan.tensors.wire import parse_wire
from fedplan.training.loops import loop_named
from fedplan.training.probes import probe_named
from fedplan.training.wraps import wrap_named

if TYPE_CHECKING:
    from datasets import Dataset


@dataclass(frozen=True)
class Stage:
    """What each end of a study builds for itself: the rows, the model, and what all agree on."""

    shares: Shares
    model: nn.Module
    agreement: Agreement

    @cached_property
    def start(self) -> dict[str, Tensor]:
        """The values that the model starts with, of every param that may change."""
        return take(self.model, self.agreement.trainable)

    @cached_property
    def base(self) -> Base:
        """What tells the model apart, and that the rest of it stands still."""
        return base_of(self.model, self.agreement.params, self.start)

    @property
    def marks(self) -> dict[str, str]:
        """The digest of each param."""
        return self.base.marks

    @cached_property
    def digest(self) -> str:
        """Tells two starting models apart."""
        return hashlib.sha256(joined(self.agreement.params, self.marks).encode()).hexdigest()[:16]

    @cached_property
    def agreed(self) -> Agreement:
        """What all ends agree on, the model that they start from with it."""
        return replace(self.agreement, start=self.digest)


def stage_of(
    study: Study, own: tuple[str, Dataset] | None = None, given: Given | None = None
) -> Stage:
    """The stage of a study; the same study gives the same one everywhere.

    `own` is a site's name with the table that it brings; `given` is what came from Python.
    """
    if given is not None:
        return _stage_given(study, given)
    require_files(study)
    torch.set_num_threads(study.threads)
    shares, made = shares_of(study, own), method_of(study)
    model = starting_model(study, shares.task, made)
    stage = Stage(shares, model, agreement_of(study, describe(model)))
    check(stage.agreement.method.plan, stage.agreement.params)
    pinned = study.model.digest
    if pinned and stage.digest != pinned:
        raise ConfigError(f"model.digest is {pinned}, and this model's is {stage.digest}")
    return stage


def _stage_given(study: Study, given: Given) -> Stage:
    given = given.under(study)
    torch.set_num_threads(study.threads)
    # What a method adds is drawn from the study's seed, as from a file: else no run goes on.
    with forked(seed=seeds.seed(study.name, "model", study.seed)):
        model = steadied(copy.deepcopy(given.model))
        if given.task.kind != OWN:
            require_sight(model, given.task.kind)
        model = adapted(model, given.task, given.method)
    agreement = agreement_of(study, describe(model), given.method)
    check(given.method.plan, agreement.params)
    return Stage(given.shares, model, agreement)


def require_files(study: Study) -> None:
    """Refuse to build from its file what a study was given from Python."""
    if study.data.given:
        raise ConfigError(
            f"{study.name} was given its model and rows from Python: go on with it by "
            "fedplan.simulate(..., folder=..., resume=True), with the same objects; its models are "
            "run.world() and run.client(name)"
        )


def stage_without_rows(study: Study, labels: list[str]) -> Stage:
    """The stage of a study whose rows are not there: the same model, and nobody to train it."""
    task = study.task.model_copy(update={"labels": labels})
    return stage_of(study.model_copy(update={"data": DataSection(), "task": task}))


def outline_of(study: Study) -> Agreement:
    """What a study says to both ends, from names and shapes: without rows, and without weights."""
    require_files(study)
    task = shares_of(study.model_copy(update={"data": DataSection()}), None).task
    model = outlined_model(study, task, method_of(study))
    agreement = agreement_of(study, describe(model))
    check(agreement.method.plan, agreement.params)
    return agreement


def require_fitting(stage: Stage, batch: int) -> None:
    """Refuse rows that the model cannot take: better at once than in the middle of a round.

    A whole batch of the first client is tried, and two rows of every other, and of each test.
    """
    shares = stage.shares
    held = {repr(name): rows for name, rows in shares.train.items() if len(rows)}
    held |= {f"{name!r}, to test on": rows for name, rows in shares.own.items() if len(rows)}
    held |= {"the common test": shares.test} if shares.test is not None and len(shares.test) else {}
    for number, (whose, rows) in enumerate(held.items()):
        _require_taken(stage, whose, rows, 2 if number else batch)


def _require_taken(stage: Stage, whose: str, rows: Examples, count: int) -> None:
    try:
        some = brought(rows.batch(torch.arange(min(count, len(rows)))), device_of(stage.model))
        with torch.no_grad(), at_rest(stage.model):
            loss = stage.shares.task.loss(stage.model, some)
        if loss.numel() != 1:
            raise ValueError(f"the loss has shape {tuple(loss.shape)}, and it is one number")
    except (RuntimeError, ValueError, IndexError, TypeError, KeyError, AttributeError) as error:
        words = str(error).strip().splitlines() or [""]
        raise ConfigError(
            f"the model cannot take the rows of {whose}: {type(error).__name__}: {words[0][:300]}; "
            "see model and task"
        ) from error


def exam_of(study: Study, shares: Shares, name: str) -> Exam | None:
    """What a client's models are tested on, if the study has clients tell their scores."""
    said = study.evaluate
    if not said.sites:
        return None
    score = partial(shares.task.score, batch_size=said.batch)
    return Exam(shares.own.get(name), score, said.personal, said.every, study.train.rounds)


def scoring_of(study: Study, shares: Shares) -> Scoring:
    """What a study measures, and when; to keep the best of what nobody measures is refused."""
    said, task = study.evaluate, shares.task
    measured = {"world": shares.test is not None or said.sites, "own": said.personal and said.sites}
    measured["own"] |= said.personal and bool(shares.own)
    if said.keep_best and not measured[said.keep_best]:
        raise ConfigError(
            f"evaluate.keep_best is {said.keep_best!r}, and nobody measures that: say "
            "evaluate.sites, or give the study rows to test on"
        )
    return Scoring(said.every, said.sites, said.keep_best, task.primary, task.higher)


def participation_of(study: Study) -> Participation:
    """Who takes part in a study's rounds."""
    return Participation(study.clients.share)


def method_of(study: Study) -> Method:
    """The method that a study names, or its own plan. Who votes chooses together."""
    made = _method(study.method)
    return replace(made, together=True) if study.privacy and study.privacy.vote else made


def _method(said: MethodSection) -> Method:
    if said.given:
        return told_method(said.given)
    if said.name:
        made = method_named(said.name, said.settings)
        made = replace(made, plan=chain(made.plan, parse(said.plan))) if said.plan else made
    else:
        probe = probe_named(said.probe or "random")
        made = Method(parse(said.plan), probe=probe, together=said.together)
    if said.inside is not None:
        made = made.inside(_method(said.inside))
    if said.phases:
        if strange := said.phases.keys() - set(phases_in(made.plan)):
            raise ConfigError(f"method.phases: the plan speaks of no phase {min(strange)!r}")
        made = replace(made, announce=Planned(said.phases))
    made = _fitted(made, said)
    made = replace(made, product=product_told(said.product)) if said.product else made
    return replace(made, wire=parse_wire(said.wire)) if said.wire else made


def _fitted(made: Method, said: MethodSection) -> Method:
    """A method with the loop, the wraps and the server optimiser that a study names."""
    wraps = (*map(wrap_named, said.wraps), *made.wraps)
    loop = loop_named(said.loop) if said.loop else made.loop
    server = made.server_optimiser
    if said.server_optimiser:
        server = server_optimiser_named(said.server_optimiser, said.server_settings)
    return replace(made, wraps=wraps, loop=loop, server_optimiser=server)


def agreement_of(study: Study, params: Params, given: Method | None = None) -> Agreement:
    """What a study says to both ends, of a model with these params."""
    guarantee, pace = guarantee_of(study), study.train.pace
    made = given or method_of(study)
    # One that is only told of was judged when it ran.
    if guarantee is not None and not isinstance(made, Told):
        require_sound(guarantee, made)
    return Agreement(
        f"{study.name}/{study.seed}",
        params,
        made,
        pace,
        guarantee,
        study.digest,
        defence=study.defence.made,
        masking=study.aggregation.made,
    )


def statement_of(study: Study, folder: Path | None = None, *, run: str = "") -> Statement | None:
    """What a study promises, and what was spent of it in a folder, if it promises anything."""
    guarantee, masking = guarantee_of(study), study.aggregation.made
    if guarantee is None:
        return None
    sites, shares = len(study.clients.names) or study.data.clients, ""
    if masking.active and guarantee.unit == "client":
        shares = masking.shares(sites, guarantee.noise, guarantee.clip)
    return Statement.of(guarantee, study.train.rounds, folder, run=run, shares=shares)


@cache
def _calibrated(guarantee: Guarantee, rounds: int) -> Guarantee:
    return guarantee.calibrated(rounds)


def guarantee_of(study: Study) -> Guarantee | None:
    """What a study promises, with the noise that it takes."""
    said, train = study.privacy, study.train
    if said is None:
        return None
    if said.unit == "client":
        rate, steps, batch = (study.clients.share if study.clients.share < 1 else None), 0, 0
    else:
        rate, steps, batch = train.batch / said.size, train.steps, train.batch
    noise = said.noise or 1.0
    made = Guarantee(
        unit=said.unit,
        epsilon=said.epsilon,
        delta=said.delta,
        clip=said.clip,
        noise=noise,
        rate=rate,
        steps=steps,
        batch=batch,
        vote=said.vote,
        period=said.period,
        quantile=said.quantile,
        cap=said.cap,
    )
    return made if said.noise else _calibrated(made, train.rounds)
