# SPDX-License-Identifier: Apache-2.0
"""Simulations: a study that runs on this machine, with its scores."""

from __future__ import annotations

import atexit
import copy
from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from fedplan.data.metrics import spread
from fedplan.federation.callbacks import Callback, Closed, EarlyStopping, stopping
from fedplan.federation.evaluation import together
from fedplan.federation.history import Metrics
from fedplan.federation.patience import Patience
from fedplan.federation.status import Status
from fedplan.federation.trackers import close_all
from fedplan.models.attention import moved
from fedplan.models.values import put
from fedplan.runners.crews.hiring import hired
from fedplan.runners.crews.team import Team
from fedplan.runners.crews.workers import Workers
from fedplan.runners.faults import faults_of
from fedplan.runners.local import Federation
from fedplan.studies.continuation import begun, carry_over, require_free
from fedplan.studies.folder import agreed_run, opened_run
from fedplan.studies.given import Given
from fedplan.studies.run import open_run
from fedplan.studies.schema import ConfigError, Study, study_of
from fedplan.studies.stage import (
    exam_of,
    participation_of,
    require_fitting,
    scoring_of,
    stage_of,
)
from fedplan.tensors.devices import device_named
from fedplan.tensors.named import Tensors

_OPEN = WeakSet[Generator[Closed]]()
"""Runs whose next round may be asked for."""


@atexit.register
def _close_open() -> None:
    """End what was left so while modules still stand; what another thread is at ends with it."""
    for each in list(_OPEN):
        with suppress(Exception):
            each.close()


class Simulation:
    """A study that runs in a folder, and goes on from where the folder says it stopped.

    `given` is what came from Python in place of files. Callbacks are told of each round that is
    committed; `stopped` is why the run ended before its last round: what one of them said, or that
    an operator asked for it. `status` is told how it goes. With `workers` clients are played by
    them, many at once; else by this process.
    """

    def __init__(
        self,
        study: Study,
        folder: Path,
        given: Given | None = None,
        *,
        earlier: Path | str = "",
        callbacks: Sequence[Callback] = (),
        status: Status | None = None,
        workers: Workers | None = None,
    ) -> None:
        if not study.gathered:
            raise ConfigError("data.path: each site of this study has its own: --runner flower")
        if workers is not None and study.aggregation.made.active:
            raise ConfigError(
                "aggregation.kind: workers sum in parts, and a masked sum has none: --runner local"
            )
        self.study, self.folder, self.given, self.earlier = study, folder, given, earlier
        self.callbacks, self.stopped = (*callbacks, *study.evaluate.callbacks), ""
        self.status, self.workers = status or Status(), workers
        self.team: Team | None = None
        self._open()

    def _open(self) -> None:
        """Build all that the study says, from what the folder holds; workers begin meanwhile."""
        if self.team is not None:
            self.team.close()
        with hired(self.workers, self.study, self.folder) as self.team:
            self._build()

    def _build(self) -> None:
        device = device_named(self.study.device)  # before anything is written
        study, stage = self.study, stage_of(self.study, given=self.given)
        self.shares, agreement = stage.shares, stage.agreed
        names = study.clients.names or list(self.shares.train)
        for what, said in (("clients.traits", study.clients.traits), ("data", self.shares.train)):
            if strange := said.keys() - set(names):
                there = ", ".join(names)
                raise ConfigError(f"{what}: there is no client {min(strange)!r}; there are {there}")
        require_fitting(stage, study.train.batch)
        self.scoring = scoring_of(study, self.shares)
        self.claim = opened_run(self.folder, study, agreement.params, self.shares)
        if study.continues and not begun(self.folder):
            carry_over(study, self.earlier, self.folder)
        self.federation = Federation(
            agreement,
            stage.model,
            self.shares.train,
            self.shares.task.loss,
            self.folder,
            rounds=study.train.rounds,
            participation=participation_of(study),
            faults=faults_of(study),
            traits=study.clients.traits,
            names=names,
            marks=self.shares.marks,
            device=device,
            deterministic=study.deterministic,
            exams={n: exam_of(study, self.shares, n) for n in names if study.evaluate.sites},
            status=self.status,
            hire=self.team.hired if self.team else None,
            start=stage.start,
            base=stage.base,
            features=study.train.features,
        )
        agreed_run(self.federation.server, study, self.shares)

    def run(self) -> Simulation:
        """Play every round that is left, committing each before the next."""
        for _ in self.rounds():
            pass
        return self

    def rounds(self) -> Iterator[Closed]:
        """Play round by round, each told once it is committed.

        Callbacks are told first. Whoever asks for no more has the run wait there.
        """
        _OPEN.add(asked := self._driven())
        return asked

    def _driven(self) -> Generator[Closed]:
        callbacks, server = self._listeners(), self.federation.server
        patience = Patience(**self.study.patience.model_dump())
        crew = self.federation.crew
        try:
            with self.status.driving(server, self.study.name, patience):
                yield from self._rounds(callbacks)
        finally:
            crew.close()
            close_all(callbacks)
        self.stopped = self.status.stopped

    def _rounds(self, callbacks: Sequence[Callback]) -> Iterator[Closed]:
        federation, status = self.federation, self.status
        server, last = federation.server, federation.server.last()
        server.keep_best(self.scoring.best(server.history))
        self.stopped = status.halted(self._told(callbacks, self._directed(last)) if last else "")
        while (
            server.world.round < server.rounds
            and not self.stopped
            and self.federation is federation  # else it was resumed meanwhile
        ):
            closed = self._directed(self._played())
            status.round(closed)
            self.stopped = status.halted(self._told(callbacks, closed))
            yield closed

    def _told(self, callbacks: Sequence[Callback], closed: Closed) -> str:
        reason = stopping(callbacks, closed)
        return reason if closed.round < self.study.train.rounds else ""

    def _directed(self, closed: Closed) -> Closed:
        """A round with the task's own score, and which way is better; the server knows no task."""
        return replace(closed, higher=self.scoring.higher, primary=self.scoring.primary)

    def _listeners(self) -> tuple[Callback, ...]:
        """All who are told; who stops by what is hidden, or by what nobody measures, is refused."""
        own = (self.study.stop.callback,) if self.study.stop else ()
        personal = self.study.evaluate.personal and bool(self.shares.own)
        kinds = {"world"} if self.shares.test is not None else set[str]()
        if self.scoring.sites:
            kinds |= {"sites"}
        elif personal:
            kinds |= {"personal", "clients"}
        for each in (*self.callbacks, *own):
            if isinstance(each, EarlyStopping):
                each.require_measured(kinds)
                if self.study.privacy is not None:
                    each.require_public()
        return (*self.callbacks, *own)

    def _played(self) -> Closed:
        # Else the last world would be held for a whole round.
        before = self.federation.world_values() if self.study.evaluate.attention else {}
        tally = self.federation.round()
        due = self.scoring.due(self.federation.world.round, self.study.train.rounds)
        closed = self.federation.commit(tally, self.scores() if due else {}, self.signs(before))
        self.federation.server.keep_best(self.scoring.best(closed.metrics))
        return closed

    def resume(
        self, rounds: int | None = None, *, callbacks: Sequence[Callback] | None = None
    ) -> Simulation:
        """Go on from what the folder holds: to the last round, or to another number of rounds.

        Other callbacks take the place of those that it had, and of the study's own `stop`.
        """
        said = self.study.model_dump(mode="json")
        said |= {"stop": None} if callbacks is not None else {}
        said["train"] |= {"rounds": rounds} if rounds is not None else {}
        study = study_of(said)
        require_free(self.folder, study, resume=True)
        self.study = study
        self.callbacks = self.callbacks if callbacks is None else tuple(callbacks)
        self._open()
        return self.run()

    @property
    def metrics(self) -> Metrics:
        """A row of numbers for each round: its loss, its bytes, and the scores if any."""
        return open_run(self.folder).metrics

    def world(self) -> nn.Module:
        """A model with the federation's values, to keep."""
        return self._model(self.federation.world_values())

    def client(self, name: str) -> nn.Module:
        """A model with one client's own values over the federation's, to keep."""
        if (name := str(name)) not in self.federation.clients:
            there = ", ".join(self.federation.clients)
            raise ConfigError(f"there is no client {name!r}; there are {there}")
        return self._model(self.federation.personal_values(name))

    def _model(self, values: dict[str, Tensor]) -> nn.Module:
        model = copy.deepcopy(self.federation.model)
        put(model, values, self.federation.agreement.trainable)
        return model.eval()

    def scores(self) -> dict[str, Any]:
        """How good the models are: the world on the common test, each client on its own rows.

        With `evaluate.sites` clients are asked as sites are, and tell of both models.
        """
        model, evaluate = self.federation.model, self.study.evaluate
        trainable = self.federation.agreement.trainable
        put(model, self.federation.world_values(), trainable)
        found: dict[str, Any] = {}
        if self.shares.test is not None:
            score = self.shares.task.score(model, self.shares.test, batch_size=evaluate.batch)
            found["world"] = score
        if evaluate.sites:
            found["sites"] = together(*self.federation.evaluate(), self.scoring)
        elif evaluate.personal and self.shares.own:
            found["clients"] = self._own_scores()
            key, higher = self.shares.task.primary, self.shares.task.higher
            own = {n: s[key] for n, s in found["clients"].items() if key in s}
            found |= {"personal": spread(own, higher=higher)} if own else {}
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

    def _own_scores(self) -> dict[str, dict[str, float]]:
        if self.team is not None and self.team.seats:
            return self.team.own_scores(list(self.shares.own))
        return {name: self._personal(name) for name in self.shares.own}

    def _personal(self, name: str) -> dict[str, float]:
        model = self.federation.model
        put(model, self.federation.personal_values(name), self.federation.agreement.trainable)
        return self.shares.task.score(
            model, self.shares.own[name], batch_size=self.study.evaluate.batch
        )
