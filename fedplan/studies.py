# SPDX-License-Identifier: Apache-2.0
"""Studies: from a study file to a federation, its rounds, and what they scored."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fedplan.agreement import Setup
from fedplan.attendance import Attendance
from fedplan.attention import at_rest, moved
from fedplan.config import ConfigError, DataSection, MethodSection, Study, placed, study_of
from fedplan.crowds import phases_in
from fedplan.description import describe
from fedplan.evaluation import spread
from fedplan.files import keep_file
from fedplan.fit import Pace
from fedplan.identity import RUN
from fedplan.ledger import digests, joined
from fedplan.loading import starting_model
from fedplan.locks import Claim, claimed
from fedplan.manifest import read, written
from fedplan.method import Method
from fedplan.methods import method
from fedplan.params import Params
from fedplan.phases import Planned
from fedplan.plan import chain
from fedplan.privacy.promise import Promise, require_sound
from fedplan.probe import probe_named
from fedplan.resolution import check
from fedplan.rounds import Tally
from fedplan.runners.local import Federation
from fedplan.server import STUDY as STUDY
from fedplan.server import Server
from fedplan.shares import Shares, shares_of
from fedplan.state import Tensors, put, take
from fedplan.store import told
from fedplan.text import parse
from fedplan.wire import parse_wire

if TYPE_CHECKING:
    from datasets import Dataset

MANIFEST, TASK = "manifest.json", "task.json"
"""In a run's folder, and in a site's for a run: what it is of; its labels and its clients."""

Watch = Callable[["Trial", Tally, Mapping[str, Any]], None]


@dataclass(frozen=True)
class Stage:
    """What each end of a study builds for itself: the rows, the model, and what all agree on."""

    shares: Shares
    model: nn.Module
    setup: Setup

    @cached_property
    def start(self) -> dict[str, Tensor]:
        """The values of every param that the model starts with."""
        return take(self.model, self.setup.params)

    @cached_property
    def marks(self) -> dict[str, str]:
        """The digest of each of them."""
        return digests(self.start)

    @cached_property
    def digest(self) -> str:
        """Tells two starting models apart."""
        return hashlib.sha256(joined(self.setup.params, self.marks).encode()).hexdigest()[:16]

    @cached_property
    def agreed(self) -> Setup:
        """What all ends agree on, the model that they start from with it."""
        return replace(self.setup, start=self.digest)


def stage_of(study: Study, own: tuple[str, Dataset] | None = None) -> Stage:
    """The stage of a study; the same study gives the same one everywhere.

    `own` is a site's name with the table that it brings.
    """
    torch.set_num_threads(study.threads)
    shares, made = shares_of(study, own), method_of(study)
    model = starting_model(study, shares.task, made)
    stage = Stage(shares, model, setup_of(study, describe(model)))
    check(stage.setup.method.plan, stage.setup.params)
    pinned = study.model.digest
    if pinned and stage.digest != pinned:
        raise ConfigError(f"model.digest is {pinned}, and this model's is {stage.digest}")
    return stage


def opened_run(folder: Path, study: Study, params: Params, shares: Shares) -> Claim:
    """Claim a folder for a run of a study, and write what it is of, if no run was begun there.

    While the claim is held no other process opens the folder. What a run was begun with is changed
    by `agreed_run`, when nothing is left that could refuse to go on with it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with told(f"{folder} cannot be claimed", "name a folder that you may write to"):
        claim = claimed(folder)
    if (folder / STUDY).exists() and study_in(folder).digest != study.digest:
        raise ConfigError(f"{folder} holds a run of another study: name another folder")
    if not (folder / RUN).exists():
        write_run(folder, study, params)
        note_task(folder, shares)
    return claim


def agreed_run(server: Server, study: Study, shares: Shares) -> None:
    """Write what a run is of as it now is, once its server has taken it up."""
    write_run(server.folder, study, server.setup.params)
    note_task(server.folder, shares)
    server.agree()


def write_run(folder: Path, study: Study, params: Params) -> None:
    """Write what a folder is of, unless that stands there."""
    folder.mkdir(parents=True, exist_ok=True)
    keep_file(folder / STUDY, placed(study, Path.cwd()).model_dump_json(indent=1))
    keep_file(folder / MANIFEST, written(params))


def note_task(folder: Path, shares: Shares) -> None:
    """Write what a model of the run is told apart by: its labels, and whose it may be.

    Rows are needed to train, and not to export what was trained: they may be gone by then.
    """
    said = {"labels": shares.task.labels, "clients": list(shares.train)}
    keep_file(folder / TASK, json.dumps(said, indent=1) + "\n")


def noted_task(folder: Path) -> tuple[list[str], list[str]]:
    """The labels and the clients of a run, as its folder tells them."""
    try:
        said = json.loads((folder / TASK).read_text(encoding="utf-8"))
        found = tuple([str(each) for each in said[name]] for name in ("labels", "clients"))
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise ConfigError(f"{folder} does not say the labels of its run: {error!r}") from error
    return found[0], found[1]


def stage_without_rows(study: Study, labels: list[str]) -> Stage:
    """The stage of a study whose rows are not there: the same model, and nobody to train it."""
    task = study.task.model_copy(update={"labels": labels})
    return stage_of(study.model_copy(update={"data": DataSection(), "task": task}))


def require_fitting(stage: Stage, batch: int) -> None:
    """Refuse rows that the model cannot take: better at once than in the middle of a round."""
    task = stage.shares.task
    for name, rows in stage.shares.train.items():
        if not len(rows):
            continue
        some = rows.batch(torch.arange(min(batch, len(rows))))
        try:
            with torch.no_grad(), at_rest(stage.model):
                task.loss(stage.model, some)
        except (RuntimeError, ValueError, IndexError, TypeError, KeyError) as error:
            words = str(error).strip().splitlines() or [type(error).__name__]
            raise ConfigError(
                f"the model cannot take the rows of {name!r}: {words[0][:300]}; see model and task"
            ) from error
        return


class Trial:
    """A study that runs in a folder, and goes on from where the folder says it stopped."""

    def __init__(self, study: Study, folder: Path) -> None:
        self.study, self.folder = study, folder
        if not study.data.path:
            raise ConfigError("data.path: each site of this study has its own: --runner flower")
        stage = stage_of(study)
        self.shares, setup = stage.shares, stage.agreed
        names = study.clients.names or list(self.shares.train)
        for what, said in (("clients.traits", study.clients.traits), ("data", self.shares.train)):
            if strange := said.keys() - set(names):
                there = ", ".join(names)
                raise ConfigError(f"{what}: there is no client {min(strange)!r}; there are {there}")
        require_fitting(stage, study.train.batch)
        self.claim = opened_run(folder, study, setup.params, self.shares)
        self.federation = Federation(
            setup,
            stage.model,
            self.shares.train,
            self.shares.task.loss,
            folder,
            rounds=study.train.rounds,
            attendance=attendance_of(study),
            traits=study.clients.traits,
            names=names,
            marks=self.shares.marks,
        )
        agreed_run(self.federation, study, self.shares)

    def run(self, watch: Watch) -> None:
        """Play every round that is left, committing each before the next."""
        while self.federation.world.round < self.study.train.rounds:
            before = self.federation.world_values()
            tally = self.federation.round()
            number = self.federation.world.round
            last = number == self.study.train.rounds
            due = last or number % self.study.evaluate.every == 0
            scores = self.scores() if due else {}
            self.federation.commit(tally, scores, self.signs(before))
            watch(self, tally, scores)

    def scores(self) -> dict[str, Any]:
        """How good the models are: the world on the common test, each client on its own rows."""
        model, evaluate = self.federation.model, self.study.evaluate
        trainable = self.federation.setup.trainable
        put(model, self.federation.world_values(), trainable)
        found: dict[str, Any] = {}
        if self.shares.test is not None:
            score = self.shares.task.score(model, self.shares.test, batch_size=evaluate.batch)
            found["world"] = score
        if evaluate.personal and self.shares.own:
            found["clients"] = {name: self._personal(name) for name in self.shares.own}
            key = "f1" if self.study.task.kind == "token-classification" else "accuracy"
            found["personal"] = spread({n: s[key] for n, s in found["clients"].items() if key in s})
        return found

    def signs(self, before: Tensors) -> dict[str, Any]:
        """How far the attention of each block moved in a round, on a few rows of the test."""
        test = self.shares.test
        rows = min(self.study.evaluate.attention, len(test)) if test is not None else 0
        if test is None or not rows:
            return {}
        states = (before, self.federation.world_values())
        batch = test.batch(torch.arange(rows))
        found = moved(self.federation.model, self.federation.setup.trainable, states, batch)
        return {"attention": [[*block, round(far, 6)] for block, far in found.items()]}

    def _personal(self, name: str) -> dict[str, float]:
        model = self.federation.model
        put(model, self.federation.personal_values(name), self.federation.setup.trainable)
        return self.shares.task.score(
            model, self.shares.own[name], batch_size=self.study.evaluate.batch
        )


def attendance_of(study: Study) -> Attendance:
    """Who takes part in a study's rounds."""
    said = study.clients
    return Attendance(said.share, said.dropped, said.late)


def method_of(study: Study) -> Method:
    """The method that a study names, or its own plan. Who votes chooses together."""
    made = _method(study.method)
    return replace(made, together=True) if study.privacy and study.privacy.vote else made


def _method(said: MethodSection) -> Method:
    if said.name:
        made = method(said.name, said.settings)
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
    return replace(made, wire=parse_wire(said.wire)) if said.wire else made


def study_in(folder: Path) -> Study:
    """The study that a folder is of."""
    try:
        said = json.loads((folder / STUDY).read_text(encoding="utf-8"))
        return study_of(said if isinstance(said, dict) else {STUDY: said})
    except (OSError, ValueError, RecursionError, ConfigError) as error:
        raise ConfigError(f"{folder} is not the folder of a run: {STUDY}: {error}") from error


def setup_in(folder: Path) -> Setup:
    """The agreement of a run, as its folder tells it."""
    return setup_of(study_in(folder), read(folder / MANIFEST))


def setup_of(study: Study, params: Params) -> Setup:
    """What a study says to both ends, of a model with these params."""
    pace = Pace(**study.train.model_dump(exclude={"rounds"}))
    made, promise = method_of(study), promise_of(study)
    if promise is not None:
        require_sound(promise, made)
    return Setup(f"{study.name}/{study.seed}", params, made, pace, promise, study.digest)


@cache
def _calibrated(promise: Promise, rounds: int) -> Promise:
    return promise.calibrated(rounds)


def promise_of(study: Study) -> Promise | None:
    """What a study promises, with the noise that it takes."""
    said, train = study.privacy, study.train
    if said is None:
        return None
    if said.unit == "client":
        rate, steps, batch = (study.clients.share if study.clients.share < 1 else None), 0, 0
    else:
        rate, steps, batch = train.batch / said.size, train.steps, train.batch
    noise = said.noise or 1.0
    made = Promise(
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
