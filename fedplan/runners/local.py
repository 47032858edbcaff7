# SPDX-License-Identifier: Apache-2.0
"""The local runner: a whole federation on one machine, and whoever plays its clients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedplan.data.examples import Examples, Loss
from fedplan.federation.agreement import Agreement
from fedplan.federation.callbacks import Closed
from fedplan.federation.client import Client
from fedplan.federation.evaluation import Scores
from fedplan.federation.exams import Exam
from fedplan.federation.origin import Base, base_of
from fedplan.federation.participation import Participation
from fedplan.federation.rounds import Tally
from fedplan.federation.server import Server
from fedplan.federation.status import Status
from fedplan.federation.world import World, personal_values
from fedplan.language.turn import Turn
from fedplan.models.values import take
from fedplan.runners.clients import Clients
from fedplan.runners.crews.crew import Crew, OneProcess
from fedplan.runners.faults import Faults
from fedplan.tensors.devices import settled
from fedplan.training.features import Features


class Federation:
    """A server and its clients on one machine; `marks` are the digests of the clients' rows.

    `names` are all who may take part; those without rows never answer. `exams` are what clients'
    models are tested on. `faults` says who drops out
    and who is late. The model is moved to the `device`, if one is said; all values stay in host
    memory. `status` is told of each client's turn. `hire` says who plays the turns; without it this
    process does, one after the other. `start` and `base` are what the model starts with, where
    somebody has them already. `features` keeps frozen outputs for all clients.
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
        hire: Callable[[Server, Clients, Status], Crew] | None = None,
        start: Mapping[str, Tensor] | None = None,
        base: Base | None = None,
        features: Features | None = None,
    ) -> None:
        self.status = status or Status()
        start = take(model, agreement.trainable) if start is None else start
        base = base or base_of(model, agreement.params, start)
        self.model = settled(model.eval(), device) if device else model.eval()
        self.faults = faults or Faults()
        roster = {name: dict((traits or {}).get(name, {})) for name in names or rows}
        self.server = server = Server(
            agreement,
            start,
            folder,
            rounds=rounds,
            roster=roster,
            participation=participation,
            marks=base.marks,
            rows=marks,
        )
        del start
        self.clients = Clients(
            agreement=self.server.agreement,
            model=self.model,
            rows=dict(rows),
            loss=loss,
            folder=folder,
            start=self.server.start,
            marks=self.server.marks,
            digests=self.server.digests,
            # Not of `self`: a cycle would hold the folder after the federation is let go.
            world=lambda: server.world,
            traits=roster,
            exams=exams or {},
            rows_marks=marks or {},
            replies=replies,
            deterministic=deterministic,
            base=base.placed(self.model, self.agreement.resting),
            features=features,
        )
        hired = hire or OneProcess
        self.crew: Crew = hired(self.server, self.clients, self.status)

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
        there = [name for name in tally.cohort if name in self.clients]
        self.status.opened(len(there))
        self.crew.play(tally, there, late)
        self.server.end(tally)
        return tally

    def evaluate(self) -> tuple[dict[str, Scores], dict[str, str]]:
        """What each client says of the models of the last round; who says nothing, and why."""
        there = [name for name in self.server.roster if name in self.clients]
        said, silent = self.crew.scored(there)
        absent = [name for name in self.server.roster if name not in self.clients]
        return said, silent | dict.fromkeys(absent, "no answer")

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
            self.server.choose(tally, self.crew.polled(tally, there))

    @property
    def spent(self) -> float | None:
        """The epsilon of whoever has spent most, if anything is hidden."""
        guard = self.server.aggregation.guard
        return guard.spent if guard else self.clients.spent()

    def world_values(self) -> dict[str, Tensor]:
        """The federation's model: its values, and the start's for what each client keeps."""
        return self.server.world_values()

    def personal_values(self, name: str) -> dict[str, Tensor]:
        """One client's model: its own values over the federation's."""
        home, _ = self.clients.journal(name).home()
        turn = Turn(self.world.round, name, self.world.phase, self.server.roster[name])
        return personal_values(self.agreement, self.world, self.server.start, turn, home)
