# SPDX-License-Identifier: Apache-2.0
"""Players: one worker's model, rows and world, and the turns that it plays of a study's clients.

A worker builds all that the study says for itself, as every site does, so no code and no object of
ours travels: a study, requests, records and tensors do. Its updates go into a sum of its own.
"""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from fedplan.errors import FedplanError
from fedplan.federation.client import Client
from fedplan.federation.evaluation import evaluate
from fedplan.federation.identity import changed_rows, read_identity
from fedplan.federation.messages import Lacking, Refused, Request, Update, listed, scored
from fedplan.federation.partial import Sent, opened, sent
from fedplan.federation.polls import poll
from fedplan.federation.rounds import Tally, pull
from fedplan.federation.turns import local
from fedplan.federation.world import World, personal_values
from fedplan.language.turn import Turn
from fedplan.models.values import put
from fedplan.runners.clients import Clients
from fedplan.studies.schema import study_of
from fedplan.studies.stage import exam_of, stage_of
from fedplan.tensors.devices import device_named, settled
from fedplan.tensors.named import Digests, Tensors

BEGIN = "begin"
"""The first message, with the study and the folder of its run; another begins anew."""
Words = dict[str, Any]
"""What is said beside tensors, as JSON."""


class Player:
    """A worker's own copy of all that a study says; `answer` is all that it does."""

    def __init__(self, said: Mapping[str, Any]) -> None:
        self.study, self.folder = study_of(dict(said["study"])), Path(said["folder"])
        self.stage = stage = stage_of(self.study)
        settled(stage.model.eval(), device_named(self.study.device))
        self.agreement, self.digests = stage.agreed, Digests()
        self.world = World.start(self.agreement, stage.start)
        self.tally: Tally | None = None
        self.opening: Words = {}
        self.tables: dict[str, list[Any]] = {}
        self.clients = self._clients()

    def _clients(self) -> Clients:
        study, stage = self.study, self.stage
        hides = study.privacy is not None and study.privacy.unit == "example"
        sites = stage.shares.train if study.evaluate.sites else ()
        return Clients(
            agreement=self.agreement,
            model=stage.model,
            rows=stage.shares.train,
            loss=stage.shares.task.loss,
            folder=self.folder,
            start=stage.start,
            marks=stage.marks,
            digests=self.digests,
            world=lambda: self.world,
            traits=study.clients.traits,
            exams={name: exam_of(study, stage.shares, name) for name in sites},
            rows_marks=stage.shares.marks if hides or study.train.reuse else {},
            deterministic=study.deterministic,
            base=stage.base.placed(stage.model, self.agreement.resting),
            features=study.train.features,
        )

    def answer(self, said: Mapping[str, Any], tensors: Tensors) -> Sent:
        """The answer to one message; an error of ours, or of others, is an answer too."""
        try:
            return self._actions[said["do"]](said, tensors)
        except Lacking:
            return {}, {"lacking": True}
        except Refused as error:
            return {}, {"refused": error.code, "error": str(error)}
        except FedplanError as error:
            return {}, {"error": str(error), "code": error.code}

    @property
    def _actions(self) -> dict[str, Callable[[Mapping[str, Any], Tensors], Sent]]:
        return {
            "world": self._moved,
            "open": self._opened,
            "turn": self._turn,
            "poll": self._poll,
            "scores": self._scores,
            "own": self._own,
            "sum": self._sum,
        }

    def _moved(self, said: Mapping[str, Any], tensors: Tensors) -> Sent:
        """Take what has changed of the world; the first time, the run that it is of, too."""
        if said["run"] != self.agreement.run:
            self._join(said["run"], said["agreed"])
        self.world = replace(
            self.world,
            values={**self.world.values, **tensors},
            versions={**self.world.versions, **said["versions"]},
            round=said["round"],
            phase=said["phase"],
        )
        self.digests.only(self.world.values.values())
        self.tables = {"versions": [], "held": []}
        return {}, {}

    def _join(self, run: str, agreed: str) -> None:
        """Be of a run, if this worker sees its folder, and built what its server did."""
        identity = read_identity(self.folder)
        if identity.id != run:
            raise FedplanError(
                f"{self.folder} holds another run on this worker's machine: workers need the run's "
                "folder, so put it on a disk that all of them see at the same place"
            )
        if self.agreement.fingerprint != agreed:
            raise FedplanError(
                f"a worker built {self.agreement.fingerprint} of the study, and the server "
                f"{agreed}: the study's files differ from machine to machine, or were changed"
            )
        if changed := changed_rows(identity.rows, self.stage.shares.marks):
            raise FedplanError(
                f"a worker read other rows of {', '.join(changed[:5])} than the run began with: "
                "the table differs from machine to machine, or was changed"
            )
        self.agreement = self.clients.agreement = replace(self.agreement, run=run)

    def _opened(self, said: Mapping[str, Any], tensors: Tensors) -> Sent:
        self.opening = dict(said["total"])
        total = opened(self.agreement, self.world, self.opening)
        self.tally = Tally({}, total, marks=self.stage.marks, digests=self.digests)
        return {}, {}

    def _client(self, said: Mapping[str, Any]) -> Client:
        """The client that is asked, with what it has seen of the world that stands here."""
        held = self._table("held", said)
        values, versions = self.world.values, self.world.versions
        seen = {key: values[key] for key in held}
        return self.clients.made(said["client"], seen, {key: versions[key] for key in held})

    def _table(self, name: str, said: Mapping[str, Any]) -> Any:
        """What many clients share is said once: `[number]`, or `[number, value]` at first."""
        number, *fresh = said[name]
        if fresh:
            self.tables[name][number:] = fresh
        return self.tables[name][number]

    def _request(self, said: Mapping[str, Any]) -> Request:
        versions: dict[str, int] = self._table("versions", said)
        scores = said["scores"]
        turn = Turn(
            round=said["round"],
            client=said["client"],
            phase=said["phase"],
            traits=said["traits"],
            scores=scored(scores) if scores is not None else None,
        )
        return Request(
            name=said["request"],
            agreed=said["agreed"],
            turn=turn,
            values={key: self.world.values[key] for key in versions},
            versions=versions,
            basis=said["basis"],
            heard=said["heard"],
            anew=said["anew"],
            run=said["run"],
        )

    def _turn(self, said: Mapping[str, Any], tensors: Tensors) -> Sent:
        """Play a turn and add its update to the sum here, by the very checks of a server."""
        name, request, tally = said["client"], self._request(said), self.tally
        began = time.perf_counter()
        assert tally is not None
        tally.cohort = {name: request}
        update = local(self.agreement, self._client(said), request, lent=True)
        pull(self.agreement, self.world, tally, update, late=said["late"])
        line, rejected = tally.lines.pop(name, None), tally.rejected.pop(name, None)
        return {}, {
            "counted": name in tally.counted,
            "line": line.json() if line else None,
            "rejected": rejected,
            "crowded": line is None and self._fits(request, update),
            "seconds": time.perf_counter() - began,
        }

    def _fits(self, request: Request, update: Update) -> bool:
        """Whether an update that was refused is sound: then the others left it no room.

        In another order they would have, so the round is to be played in the order of its clients.
        """
        total = opened(self.agreement, self.world, self.opening)
        lone = Tally({update.client: request}, total, marks=self.stage.marks, digests=self.digests)
        pull(self.agreement, self.world, lone, update)
        return bool(lone.lines)

    def _poll(self, said: Mapping[str, Any], tensors: Tensors) -> Sent:
        request = self._request(said)
        return {}, {"scores": listed(poll(self.agreement, self._client(said), request))}

    def _scores(self, said: Mapping[str, Any], tensors: Tensors) -> Sent:
        request = self._request(said)
        return {}, {"scores": evaluate(self.agreement, self._client(said), request)}

    def _own(self, said: Mapping[str, Any], tensors: Tensors) -> Sent:
        """The scores of a client's own model, as the world of this round leaves it."""
        name, shares = said["client"], self.stage.shares
        home, _ = self.clients.journal(name).home()
        traits = self.study.clients.traits.get(name, {})
        turn = Turn(self.world.round, name, self.world.phase, traits)
        values = personal_values(self.agreement, self.world, self.stage.start, turn, home)
        put(self.stage.model, values, self.agreement.trainable)
        score = shares.task.score(
            self.stage.model, shares.own[name], batch_size=self.study.evaluate.batch
        )
        return {}, {"scores": dict(score)}

    def _sum(self, said: Mapping[str, Any], tensors: Tensors) -> Sent:
        """Hand over the sum of all that was played here, and hold none."""
        assert self.tally is not None
        made, self.tally = sent(self.tally.total), None
        return made


class Hand:
    """What one worker does: it builds a player by its first message, and answers by it."""

    def __init__(self) -> None:
        self._player: Player | None = None

    def answer(self, said: Mapping[str, Any], tensors: Callable[[], Tensors]) -> Sent:
        """The answer to a message; whatever goes wrong in it is told, and printed here."""
        try:
            if self._player is None or said["do"] == BEGIN:
                self._player = None  # not two models at once, nor the old one if this fails
                self._player = Player(said)
                return {}, {}
            return self._player.answer(said, tensors())
        except Exception as error:
            traceback.print_exc()
            return {}, {"error": f"{type(error).__name__}: {error}", "code": ""}


def worded(said: Mapping[str, Any]) -> bytes:
    """What is said, as bytes; whole numbers may be of any length."""
    return json.dumps(said).encode()


def read_words(data: bytes) -> Words:
    """What was said."""
    found: Words = json.loads(data)
    return found


def apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors that safetensors takes: each whole and contiguous, in memory of its own."""
    held = dict[int, str]()
    return {
        name: tensor.detach().contiguous()
        if held.setdefault(tensor.untyped_storage().data_ptr(), name) == name
        else tensor.detach().clone()
        for name, tensor in tensors.items()
    }
