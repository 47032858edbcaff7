# SPDX-License-Identifier: Apache-2.0
"""A Flower grid in virtual time: messages are late, lost, doubled, reordered, and sites go away."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count
from random import Random
from types import SimpleNamespace
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

LONG = 50_000.0
"""Seconds that pass at once if nothing can happen meanwhile."""
Handler = Callable[[str, Message, Context], "Message | None"]


@dataclass
class VirtualClock:
    """Time that passes only when somebody sleeps; `offset` is what a jump adds to the time of day."""

    now: float = 1000.0
    offset: float = 1.7e9
    events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    numbers: Any = field(default_factory=count)

    def at(self, delay: float, act: Callable[[], None]) -> None:
        """Call `act` after a delay."""
        heapq.heappush(self.events, (self.now + delay, next(self.numbers), act))

    def sleep(self, seconds: float) -> None:
        """Let time pass: at least to the next event, or long if there is none to come."""
        end = self.now + max(0.0, seconds)
        end = max(end, self.events[0][0] if self.events else self.now + LONG)
        while self.events and self.events[0][0] <= end:
            self.now, _, act = heapq.heappop(self.events)
            act()
        self.now = max(self.now, end)


@dataclass
class Weather:
    """How bad a network is: probabilities that a message is lost or doubled, and the largest delay."""

    lost: float = 0.0
    doubled: float = 0.0
    delay: float = 0.1


class Network(Grid):
    """A grid of named sites. `handle(name, message, context)` is a site's answer, None if it dies.

    `down`: names of sites that are not connected, `since`: how often each has started.
    """

    def __init__(self, names: Iterable[str], clock: VirtualClock, rng: Random, handle: Handler):
        TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
        self.clock, self.rng, self.handle, self.weather = clock, rng, handle, Weather()
        self.nodes = {100 + i: name for i, name in enumerate(names)}
        self.contexts = {
            n: Context(run_id=1, node_id=n, node_config={}, state=RecordDict(), run_config={})
            for n in self.nodes
        }
        self.down, self.since = set[str](), dict.fromkeys(self.nodes.values(), 0)
        self.arrived = dict[str, list[Message]]()
        self.numbers = count()
        self.events = dict[str, int]()

    def count(self, event: str) -> None:
        """Count an event, as the loss of a message."""
        self.events[event] = self.events.get(event, 0) + 1

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        numbers = list[str]()
        for message in messages:
            number = str(next(self.numbers))
            message.metadata.__dict__["_message_id"] = number
            self.travel(lambda m=message, n=number: self._deliver(n, m))
            numbers.append(number)
        return numbers

    def travel(self, arrive: Callable[[], None]) -> None:
        """Let a message arrive later, never, or twice."""
        weather, draw = self.weather, self.rng.random
        if draw() < weather.lost:
            return self.count("message lost")
        self.clock.at(draw() * weather.delay, arrive)
        if draw() < weather.doubled:
            self.count("message doubled")
            self.clock.at(draw() * 10 * weather.delay, arrive)
        return None

    def _deliver(self, number: str, message: Message) -> None:
        node = message.metadata.dst_node_id
        name = self.nodes[node]
        if name in self.down:
            return self.count("message to a site that is away")
        reply = self.handle(name, message, self.contexts[node])
        if reply is not None:
            self.travel(lambda: self.arrived.setdefault(number, []).append(reply))
        return None

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        return [reply for n in message_ids for reply in self.arrived.pop(n, [])]

    def get_nodes(self) -> Any:
        return [
            SimpleNamespace(node_id=n, name=name, last_activated_at=str(self.since[name]))
            for n, name in self.nodes.items()
            if name not in self.down
        ]

    def get_node_ids(self) -> list[int]:
        return [n for n, name in self.nodes.items() if name not in self.down]

    def send_and_receive(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError

    def set_run(self, run: Any) -> None:
        raise NotImplementedError

    @property
    def run(self) -> Run:
        return Run.create_empty(1)
