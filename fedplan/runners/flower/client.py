# SPDX-License-Identifier: Apache-2.0
"""The client's app: Flower's messages carried to a site's endpoint and back.

Flower starts a new process for every message. This one imports no torch: it hands the request to
the worker that stays at the site.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable

from flwr.app import Context, Error
from flwr.app import Message as FlowerMessage
from flwr.clientapp import ClientApp

from fedplan.errors import FedplanError
from fedplan.federation.codes import code_of, told
from fedplan.runners.flower.records import message_in, records_of
from fedplan.tensors.message import Message

log = logging.getLogger("fedplan")
RAISED = 2
"""The code of Flower's own for an app that failed: the request is asked again a few times."""
Answer = Callable[[Context, str, Message], Message]
"""A site's answer to a request of a kind."""


def client_app(answer: Answer) -> ClientApp:
    """A Flower app that answers by a site's endpoint."""
    app = ClientApp()

    def answered(envelope: FlowerMessage, context: Context, kind: str) -> FlowerMessage:
        try:
            message = answer(context, kind, message_in(envelope.content))
            return FlowerMessage(records_of(message), reply_to=envelope)
        except Exception as error:
            return failed(envelope, error)

    @app.query("hello")
    def hello(envelope: FlowerMessage, context: Context) -> FlowerMessage:
        return answered(envelope, context, "hello")

    @app.query("poll")
    def poll(envelope: FlowerMessage, context: Context) -> FlowerMessage:
        return answered(envelope, context, "poll")

    @app.train()
    def train(envelope: FlowerMessage, context: Context) -> FlowerMessage:
        return answered(envelope, context, "train")

    @app.evaluate()
    def evaluate(envelope: FlowerMessage, context: Context) -> FlowerMessage:
        return answered(envelope, context, "evaluate")

    _ = hello, poll, train, evaluate
    return app


def failed(envelope: FlowerMessage, error: Exception) -> FlowerMessage:
    """What leaves of an error: its code. Flower would send its text, which may tell of rows."""
    foreseen = isinstance(error, FedplanError)
    log.error("%s", error if foreseen else "".join(traceback.format_exception(error)))
    return FlowerMessage(Error(RAISED, told(code_of(error))), reply_to=envelope)
