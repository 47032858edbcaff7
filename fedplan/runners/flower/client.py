# SPDX-License-Identifier: Apache-2.0
"""The client's app: a site of ours that Flower asks for its turns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedplan.agreement import Setup
from fedplan.runners.flower.parcels import down_of, listed, update_records, wrapped
from fedplan.site import Site, local, poll
from fedplan.store import Store

HELLO, POLL = "hello", "poll"


@dataclass(frozen=True)
class Seat:
    """A site, what it agreed to, and the copy of the world that it has seen, on its own disk."""

    setup: Setup
    site: Site
    seen: Store

    def recall(self) -> None:
        """Take up the world as this site last saw it."""
        found = self.seen.read()
        self.site.seen = dict(found.tensors) if found else {}

    def remember(self, number: int) -> None:
        """Write down what it has seen, before the server is told that it has."""
        self.seen.write(self.site.seen, {}, number=number)


def client_app(seat_of: Callable[[Context], Seat]) -> ClientApp:
    """A Flower app of a site: `seat_of` builds it from what the node was started with."""
    app = ClientApp()

    @app.query(HELLO)
    def hello(message: Message, context: Context) -> Message:
        seat = seat_of(context)
        said = {"client": seat.site.name, "agreed": seat.setup.fingerprint}
        return Message(wrapped({}, {**said, "traits": dict(seat.site.traits)}), reply_to=message)

    @app.query(POLL)
    def vote(message: Message, context: Context) -> Message:
        seat = seat_of(context)
        seat.recall()
        down = down_of(message.content)
        scores = poll(seat.setup, seat.site, down)
        return Message(wrapped({}, {"scores": listed(scores)}), reply_to=message)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        seat = seat_of(context)
        seat.recall()
        down = down_of(message.content)
        update = local(seat.setup, seat.site, down)
        seat.remember(down.turn.round)
        return Message(update_records(update), reply_to=message)

    _ = hello, vote, train
    return app
