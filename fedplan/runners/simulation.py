# SPDX-License-Identifier: Apache-2.0
"""Simulations: a study that runs in one process, with its scores."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fedplan.data.metrics import spread
from fedplan.federation.rounds import Tally
from fedplan.models.attention import moved
from fedplan.models.values import put
from fedplan.runners.faults import faults_of
from fedplan.runners.local import Federation
from fedplan.studies.schema import ConfigError, Study
from fedplan.tensors.named import Tensors

if TYPE_CHECKING:
    pass
from fedplan.studies.folder import agreed_run, opened_run
from fedplan.studies.stage import participation_of, require_fitting, stage_of

Watch = Callable[["Simulation", Tally, Mapping[str, Any]], None]


class Simulation:
    """A study that runs in a folder, and goes on from where the folder says it stopped."""

    def __init__(self, study: Study, folder: Path) -> None:
        self.study, self.folder = study, folder
        if not study.data.path:
            raise ConfigError("data.path: each site of this study has its own: --runner flower")
        stage = stage_of(study)
        self.shares, agreement = stage.shares, stage.agreed
        names = study.clients.names or list(self.shares.train)
        for what, said in (("clients.traits", study.clients.traits), ("data", self.shares.train)):
            if strange := said.keys() - set(names):
                there = ", ".join(names)
                raise ConfigError(f"{what}: there is no client {min(strange)!r}; there are {there}")
        require_fitting(stage, study.train.batch)
        self.claim = opened_run(folder, study, agreement.params, self.shares)
        self.federation = Federation(
            agreement,
            stage.model,
            self.shares.train,
            self.shares.task.loss,
            folder,
            rounds=study.train.rounds,
            participation=participation_of(study),
            faults=faults_of(study),
            traits=study.clients.traits,
            names=names,
            marks=self.shares.marks,
        )
        agreed_run(self.federation.server, study, self.shares)

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
        trainable = self.federation.agreement.trainable
        put(model, self.federation.world_values(), trainable)
        found: dict[str, Any] = {}
        if self.shares.test is not None:
            score = self.shares.task.score(model, self.shares.test, batch_size=evaluate.batch)
            found["world"] = score
        if evaluate.personal and self.shares.own:
            found["clients"] = {name: self._personal(name) for name in self.shares.own}
            key, higher = self.shares.task.primary, self.shares.task.higher
            own = {n: s[key] for n, s in found["clients"].items() if key in s}
            found["personal"] = spread(own, higher=higher)
        return found

    def signs(self, before: Tensors) -> dict[str, Any]:
        """How far the attention of each block moved in a round, on a few rows of the test."""
        test = self.shares.test
        rows = min(self.study.evaluate.attention, len(test)) if test is not None else 0
        if test is None or not rows:
            return {}
        states = (before, self.federation.world_values())
        batch = test.batch(torch.arange(rows))
        found = moved(self.federation.model, self.federation.agreement.trainable, states, batch)
        return {"attention": [[*block, round(far, 6)] for block, far in found.items()]}

    def _personal(self, name: str) -> dict[str, float]:
        model = self.federation.model
        put(model, self.federation.personal_values(name), self.federation.agreement.trainable)
        return self.shares.task.score(
            model, self.shares.own[name], batch_size=self.study.evaluate.batch
        )
