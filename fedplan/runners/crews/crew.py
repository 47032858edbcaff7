# SPDX-License-Identifier: Apache-2.0
"""Crews: who plays the clients' turns of a round, one after the other or many at once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Protocol, TypeVar

from fedplan.federation.agreement import Agreement
from fedplan.federation.client import Client
from fedplan.federation.codes import meant
from fedplan.federation.evaluation import Scores, evaluate, question
from fedplan.federation.messages import Lacking, Refused, Request
from fedplan.federation.polls import poll
from fedplan.federation.rounds import Tally
from fedplan.federation.server import Server
from fedplan.federation.states import SiteState
from fedplan.federation.status import Status
from fedplan.federation.turns import local
from fedplan.models.params import Block
from fedplan.runners.clients import Clients
from fedplan.storage.failpoints import reach

Said = TypeVar("Said")


class Crew(Protocol):
    """Whoever plays clients; whoever it is, the bits of a run are the same."""

    def polled(self, tally: Tally, names: Sequence[str]) -> dict[str, Mapping[Block, float]]:
        """What each of these clients would choose."""
        ...

    def play(self, tally: Tally, names: Sequence[str], late: Collection[str]) -> None:
        """Play the turns of these clients, and have the tally hold what came of them."""

    def scored(self, names: Sequence[str]) -> tuple[dict[str, Scores], dict[str, str]]:
        """What each says of the models of the last round; who says nothing, and why."""
        ...

    def close(self) -> None:
        """Let go of all that it holds; who is asked again after that begins anew."""


class OneProcess:
    """One client after the other, in this process."""

    def __init__(self, server: Server, clients: Clients, status: Status) -> None:
        self.server, self.clients, self.status = server, clients, status

    def polled(self, tally: Tally, names: Sequence[str]) -> dict[str, Mapping[Block, float]]:
        """What each of these clients would choose."""
        return {name: self._asked(poll, tally, name) for name in names}

    def play(self, tally: Tally, names: Sequence[str], late: Collection[str]) -> None:
        """Play the turns of these clients in their order."""
        for name in names:
            self.status.beat()
            self.status.site(name, SiteState.ASKED)
            update = self._asked(partial(local, lent=True), tally, name)
            reach("round.answered")
            self.server.take(tally, update, late=name in late)
            del update  # the model's own values, which the next turn writes to
            self.status.site(name, SiteState.ANSWERED)

    def scored(self, names: Sequence[str]) -> tuple[dict[str, Scores], dict[str, str]]:
        """What each says of the models of the last round; who says nothing, and why."""
        said, silent = dict[str, Scores](), dict[str, str]()
        for name in names:
            try:
                said[name] = self._scores(name)
            except Refused as error:
                silent[name] = meant("refused", error.code)
        return said, silent

    def close(self) -> None:
        """There is nothing to let go of."""

    def _asked(
        self, turn: Callable[[Agreement, Client, Request], Said], tally: Tally, name: str
    ) -> Said:
        """What a client says; one that has lost what it had is asked anew."""
        client, agreement = self.clients[name], self.server.agreement
        try:
            return turn(agreement, client, tally.cohort[name])
        except Lacking:
            self.server.anew(tally, name)
            return turn(agreement, client, tally.cohort[name])

    def _scores(self, name: str) -> Scores:
        agreement, client = self.server.agreement, self.clients[name]
        asked = agreement, self.server.world, name, client.traits
        try:
            return evaluate(agreement, client, question(*asked))
        except Lacking:
            return evaluate(agreement, client, question(*asked, anew=True))
