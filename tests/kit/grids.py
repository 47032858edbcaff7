# SPDX-License-Identifier: Apache-2.0
"""A Flower grid in one process: every message goes through a client's app, none over a network."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

Shuffle = Callable[[list[Message]], list[Message]]


class LocalGrid(Grid):
    """Nodes 100, 101 and so on of one process, each with a configuration of its own."""

    def __init__(self, configs: list[dict[str, Any]]) -> None:
        TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
        self.contexts = {
            100 + i: Context(
                run_id=1, node_id=100 + i, node_config=config, state=RecordDict(), run_config={}
            )
            for i, config in enumerate(configs)
        }

    def get_node_ids(self) -> list[int]:
        return list(self.contexts)

    def get_nodes(self) -> Any:
        raise NotImplementedError

    def send_and_receive(self, messages: Iterable[Message], *, timeout: Any = None) -> Any:
        return self.pull_messages(self.push_messages(messages))

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError

    def set_run(self, run: Any) -> None:
        raise NotImplementedError

    @property
    def run(self) -> Run:
        return Run.create_empty(1)


class InProcess(LocalGrid):
    """A grid whose nodes answer at once, each by the same app."""

    def __init__(self, app: ClientApp, configs: list[dict[str, Any]]) -> None:
        super().__init__(configs)
        self.app, self.sent, self.bytes = app, dict[str, Message](), 0

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        numbers = []
        for message in messages:
            number = str(uuid.uuid4())
            message.metadata.__dict__["_message_id"] = number
            self.sent[number] = message
            numbers.append(number)
        return numbers

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        return [self._answer(self.sent.pop(n)) for n in message_ids if n in self.sent]

    def _answer(self, message: Message) -> Message:
        try:
            return self.app(message, self.contexts[message.metadata.dst_node_id])
        except Exception as error:
            return Message(Error(1, repr(error)), reply_to=message)
