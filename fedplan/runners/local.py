# SPDX-License-Identifier: Apache-2.0
"""The local runner: a whole federation in one process, one client after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fedplan.data.examples import Examples, Loss
from fedplan.federation.agreement import Agreement
from fedplan.federation.callbacks import Closed
from fedplan.federation.client import Client, guard_of
from fedplan.federation.codes import meant
from fedplan.federation.evaluation import Scores, evaluate, question
from fedplan.federation.exams import Exam
from fedplan.federation.messages import Lacking, Refused, Request
from fedplan.federation.participation import Participation
from fedplan.federation.polls import poll
from fedplan.federation.rounds import Tally
from fedplan.federation.server import Server
from fedplan.federation.states import SiteState
from fedplan.federation.status import Status
from fedplan.federation.turns import local
from fedplan.federation.world import World, personal_values
from fedplan.language.turn import Turn
from fedplan.models.values import take
from fedplan.runners.faults import Faults
from fedplan.storage.failpoints import reach
from fedplan.storage.journal import Journal, home_of
from fedplan.tensors.devices import settled
from fedplan.training.features import Features

Said = TypeVar("Said")


class Federation:
    """A server and its clients in one process; `marks` are the digests of the clients' rows.

    `names` are all who may take part; those without rows never answer. `exams` are what clients'
    models are tested on. `faults` says who drops out
    and who is late. The model is moved to the `device`, if one is said; all values stay in host
    memory. `status` is told of each client's turn. `features` keeps frozen outputs for all clients.
    """

    def __init__(
        self,
        agreement: Agreement,
        model: nn.Module,
        rows: Mapping[str, Examples],
        loss: Loss,
        folder: Path,
        *,
        rounds: int,
        participation: Participation | None = None,
        faults: Faults | None = None,
        traits: Mapping[str, Mapping[str, str]] | None = None,
        names: Iterable[str] = (),
        replies: bool = False,
        marks: Mapping[str, str] | None = None,
        device: torch.device | None = None,
        deterministic: bool = Client.deterministic,
        exams: Mapping[str, Exam | None] | None = None,
        status: Status | None = None,
        features: Features | None = None,
    ) -> None:
        self.status = status or Status()
        start = take(model, agreement.params)
        self.model = settled(model.eval(), device) if device else model.eval()
        self.faults = faults or Faults()
        roster = {name: dict((traits or {}).get(name, {})) for name in names or rows}
        self.server = Server(
            agreement,
            start,
            folder,
            rounds=rounds,
            roster=roster,
            participation=participation,
            rows=marks,
        )
        self.clients = {
            name: Client(
                name=name,
                rows=held,
                journal=Journal(home_of(folder, name), replies=replies),
                model=model,
                start=start,
                marks=self.server.marks,
                loss=loss,
                digests=self.server.digests,
                traits=roster[name],
                deterministic=deterministic,
                exam=(exams or {}).get(name),
                features=features,
                guard=guard_of(self.agreement, folder / "privacy" / home_of(folder, name).name),
            )
            for name, held in rows.items()
        }
        for name in self.clients.keys() & self.world.met.keys():
            known = self.world.known_by(name)
            current = {k: n for k, n in known.items() if n == self.world.versions[k]}
            self.clients[name].seen = {k: self.world.values[k] for k in current}
            self.clients[name].held = current

    @property
    def agreement(self) -> Agreement:
        """What all have agreed on."""
        return self.server.agreement

    @property
    def world(self) -> World:
        """The federation's values as they now are."""
        return self.server.world

    def round(self) -> Tally:
        """Play the next round up to its end; `commit` makes it last."""
        tally = self.server.begin()
        late = self.faults.play(self.server, tally)
        self.ask(tally)
        absent = tally.cohort.keys() - self.clients.keys()
        tally.rejected |= {name: "no answer" for name in absent}
        for name in [name for name in tally.cohort if name in self.clients]:
            self.status.beat()
            self.status.site(name, SiteState.ASKED)
            update = self._asked(local, tally, name)
            reach("round.answered")
            self.server.take(tally, update, late=name in late)
            self.status.site(name, SiteState.ANSWERED)
        self.server.end(tally)
        return tally

    def evaluate(self) -> tuple[dict[str, Scores], dict[str, str]]:
        """What each client says of the models of the last round; who says nothing, and why."""
        said, silent = dict[str, Scores](), dict[str, str]()
        for name in self.server.roster:
            try:
                if name in self.clients:
                    said[name] = self._scored(name)
                else:
                    silent[name] = "no answer"
            except Refused as error:
                silent[name] = meant("refused", error.code)
        return said, silent

    def _scored(self, name: str) -> Scores:
        agreement, client = self.agreement, self.clients[name]
        asked = agreement, self.world, name, client.traits
        try:
            return evaluate(agreement, client, question(*asked))
        except Lacking:
            return evaluate(agreement, client, question(*asked, anew=True))

    def commit(
        self,
        tally: Tally,
        scores: Mapping[str, Any] | None = None,
        signs: Mapping[str, Any] | None = None,
    ) -> Closed:
        """Write a round down for good."""
        return self.server.commit(tally, scores, signs)

    def ask(self, tally: Tally) -> None:
        """Where all choose together, hear first what each one would choose."""
        voters = self.server.voters(tally)
        if voters is not None:
            there = [name for name in voters if name in self.clients]
            polled = {name: self._asked(poll, tally, name) for name in there}
            self.server.choose(tally, polled)

    def _asked(
        self, turn: Callable[[Agreement, Client, Request], Said], tally: Tally, name: str
    ) -> Said:
        """What a client says; one that has lost what it had is asked anew."""
        try:
            return turn(self.agreement, self.clients[name], tally.cohort[name])
        except Lacking:
            self.server.anew(tally, name)
            return turn(self.agreement, self.clients[name], tally.cohort[name])

    @property
    def spent(self) -> float | None:
        """The epsilon of whoever has spent most, if anything is hidden."""
        own = (client.guard for client in self.clients.values())
        guards = [self.server.aggregation.guard, *own]
        return max((guard.spent for guard in guards if guard), default=None)

    def world_values(self) -> dict[str, Tensor]:
        """The federation's model: its values, and the start's for what each client keeps."""
        return self.server.world_values()

    def personal_values(self, name: str) -> dict[str, Tensor]:
        """One client's model: its own values over the federation's."""
        home, _ = self.clients[name].journal.home()
        turn = Turn(self.world.round, name, self.world.phase, self.clients[name].traits)
        return personal_values(self.agreement, self.world, self.server.start, turn, home)
