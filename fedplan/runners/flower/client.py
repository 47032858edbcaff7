# SPDX-License-Identifier: Apache-2.0
"""The client's app: Flower's messages carried to a site's desk and back.

Flower starts a new process for every message. This one imports no torch: it hands the request to
the trainer that stays at the site.
"""

from __future__ import annotations

from collections.abc import Callable

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedplan.parcel import Parcel
from fedplan.runners.flower.records import parcel_in, records_of

Answer = Callable[[Context, str, Parcel], Parcel]
"""A site's answer to a request of a kind."""


def client_app(answer: Answer) -> ClientApp:
    """A Flower app that answers by a site's desk."""
    app = ClientApp()

    def answered(message: Message, context: Context, kind: str) -> Message:
        parcel = answer(context, kind, parcel_in(message.content))
        return Message(records_of(parcel), reply_to=message)

    @app.query("hello")
    def hello(message: Message, context: Context) -> Message:
        return answered(message, context, "hello")

    @app.query("poll")
    def poll(message: Message, context: Context) -> Message:
        return answered(message, context, "poll")

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return answered(message, context, "train")

    _ = hello, poll, train
    return app
