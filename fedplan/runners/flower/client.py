# SPDX-License-Identifier: Apache-2.0
"""The client's app: Flower's messages carried to a site's desk and back.

Flower starts a new process for every message. This one imports no torch: it hands the request to
the trainer that stays at the site.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable

from flwr.app import Context, Error, Message
from flwr.clientapp import ClientApp

from fedplan.codes import code_of, told
from fedplan.errors import FedplanError
from fedplan.parcel import Parcel
from fedplan.runners.flower.records import parcel_in, records_of

log = logging.getLogger("fedplan")
RAISED = 2
"""The code of Flower's own for an app that failed: the request is asked again a few times."""
Answer = Callable[[Context, str, Parcel], Parcel]
"""A site's answer to a request of a kind."""


def client_app(answer: Answer) -> ClientApp:
    """A Flower app that answers by a site's desk."""
    app = ClientApp()

    def answered(message: Message, context: Context, kind: str) -> Message:
        try:
            parcel = answer(context, kind, parcel_in(message.content))
            return Message(records_of(parcel), reply_to=message)
        except Exception as error:
            return failed(message, error)

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


def failed(message: Message, error: Exception) -> Message:
    """What leaves of an error: its code. Flower would send its text, which may tell of rows."""
    foreseen = isinstance(error, FedplanError)
    log.error("%s", error if foreseen else "".join(traceback.format_exception(error)))
    return Message(Error(RAISED, told(code_of(error))), reply_to=message)
