# SPDX-License-Identifier: Apache-2.0
"""A Flower grid in virtual time: messages are late, lost, doubled, reordered, and sites go away."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count
from random import Random
from types import SimpleNamespace
from typing import Any

from flwr.app import Context, Message
from grids import LocalGrid

from fedplan.runners.flower._internals import RunNotRunningException

LONG = 50_000.0
"""Seconds that pass at once if nothing can happen meanwhile."""
END = 2e10
"""Seconds after which a federation that still waits makes no progress any more."""
Handler = Callable[[str, Message, Context], "Message | None"]


@dataclass
class VirtualClock:
    """Time that passes only when somebody sleeps; `offset` is what a jump adds to the time of day.

    `stretch`: by how much the next sleep is longer. It grows until somebody calls `progress`, so
    that waiting for a day takes few steps.
    """

    now: float = 1000.0
    stretch: float = 1.0
    offset: float = 1.7e9
    events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    numbers: Any = field(default_factory=count)

    def at(self, delay: float, act: Callable[[], None]) -> None:
        """Call `act` after a delay."""
        heapq.heappush(self.events, (self.now + delay, next(self.numbers), act))

    def sleep(self, seconds: float) -> None:
        """Let time pass: at least to the next event, or long if there is none to come.

        Raises AssertionError at the end of time.
        """
        assert self.now < END, "the federation waits for ever"
        end = self.now + max(0.0, seconds) * self.stretch
        self.stretch = min(1.2 * self.stretch, 1e7)
        end = max(end, self.events[0][0] if self.events else self.now + LONG)
        while self.events and self.events[0][0] <= end:
            self.now, _, act = heapq.heappop(self.events)
            act()
        self.now = max(self.now, end)

    def progress(self) -> None:
        """End the stretch: the federation made progress."""
        self.stretch = 1.0


@dataclass
class Weather:
    """Probabilities that a message is lost or doubled, and the largest delay of a message."""

    lost: float = 0.0
    doubled: float = 0.0
    delay: float = 0.1


LATE = 10.0
"""Seconds after which a message counts as delayed: a server has looked for it twice."""


class Network(LocalGrid):
    """A grid of named sites. `handle(name, message, context)` is a site's answer, None if it dies.

    `down`: names of sites that are not connected, `since`: how often each has started, `events`:
    what happened to messages, by kind of message. `link_back`: when the SuperLink answers again,
    `ended`: it has ended its run.
    """

    def __init__(self, names: Iterable[str], clock: VirtualClock, rng: Random, handle: Handler):
        self.nodes = {100 + i: name for i, name in enumerate(names)}
        super().__init__([{"name": name} for name in self.nodes.values()])
        self.clock, self.rng, self.handle, self.weather = clock, rng, handle, Weather()
        self.down, self.since = set[str](), dict.fromkeys(self.nodes.values(), 0)
        self.arrived = dict[str, list[Message]]()
        self.numbers = count()
        self.events = Counter[str]()
        self.link_back, self.ended = 0.0, False

    def require_link(self) -> None:
        """Raise as a SuperLink that is away, or that has ended its run."""
        if self.clock.now < self.link_back:
            raise ConnectionError("the SuperLink is away")
        if self.ended:
            raise RunNotRunningException

    def renew(self) -> Network:
        """Start another run of the SuperLink, on which no message of the last one arrives."""
        self.ended = False
        self.require_link()
        self.arrived.clear()
        return self

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        numbers = list[str]()
        self.require_link()
        for message in messages:
            number = str(next(self.numbers))
            message.metadata.__dict__["_message_id"] = number
            kind = message.metadata.message_type.removeprefix("query.")
            self.travel(kind, lambda m=message, n=number, k=kind: self._deliver(n, k, m))
            numbers.append(number)
        return numbers

    def travel(self, kind: str, arrive: Callable[[], None]) -> None:
        """Let a message of a kind arrive later, never, or twice."""
        weather, draw = self.weather, self.rng.random
        if draw() < weather.lost:
            self.events[f"message lost: {kind}"] += 1
            return
        delay = draw() * weather.delay
        if delay > LATE:
            self.events[f"message delayed: {kind}"] += 1
        self.clock.at(delay, arrive)
        if draw() < weather.doubled:
            self.events[f"message doubled: {kind}"] += 1
            self.clock.at(draw() * 10 * weather.delay, arrive)

    def _deliver(self, number: str, kind: str, message: Message) -> None:
        node = message.metadata.dst_node_id
        name = self.nodes[node]
        if name in self.down:
            self.events[f"message to a site that is away: {kind}"] += 1
            return
        reply = self.handle(name, message, self.contexts[node])
        if reply is not None:
            arrive = self.arrived.setdefault(number, []).append
            self.travel(f"reply to {kind}", lambda: arrive(reply))

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        found = list[Message]()
        self.require_link()
        for number in message_ids:
            replies = self.arrived.get(number, [])
            found += replies
            replies.clear()
        return found

    def get_nodes(self) -> Any:
        self.require_link()
        return [
            SimpleNamespace(node_id=n, name=name, last_activated_at=str(self.since[name]))
            for n, name in self.nodes.items()
            if name not in self.down
        ]
