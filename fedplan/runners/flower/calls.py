# SPDX-License-Identifier: Apache-2.0
"""Calls: requests to sites over Flower's grid, asked again until each is answered or given up.

A request has a name, and a site answers the same one the same: so a request that may have been
lost is simply asked again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from flwr.app import ArrayRecord
from flwr.app import Message as FlowerMessage
from flwr.serverapp import Grid

from fedplan.errors import FedplanError
from fedplan.federation.codes import KINDS, meant, understood
from fedplan.federation.patience import Patience
from fedplan.federation.states import SiteState
from fedplan.federation.status import Status
from fedplan.runners.flower.records import message_in, records_of
from fedplan.tensors.message import Message
from fedplan.tensors.serialization import packed, unpacked

log = logging.getLogger("fedplan")
Found = TypeVar("Found")
Letter = Callable[[], tuple[Message, ArrayRecord | None]]
"""Makes a request when it is sent: only one of them is held at a time."""


@dataclass(frozen=True)
class Guest:
    """A site that said who it is: its node, what it agreed to, in which run, and its traits."""

    node: int
    agreed: str
    start: str
    run: str
    traits: dict[str, str]


@dataclass
class _Open:
    """A request that waits for its answer."""

    letter: Letter
    numbers: dict[str, int] = field(default_factory=dict[str, int])
    node: int = 0
    since: str = ""
    failures: int = 0
    after: float = 0.0


class Calls:
    """The sites that have come, by the names that they say, and what is asked of them."""

    def __init__(self, grid: Grid, names: Iterable[str], patience: Patience, run: str = "") -> None:
        self.grid, self.names, self.patience, self.run = grid, list(names), patience, run
        self.guests: dict[str, Guest] = {}
        self._greeted: dict[int, str] = {}
        self._hellos: dict[str, int] = {}
        self._gone: dict[str, float] = {}
        self.status = Status()
        self._told: dict[str, tuple[str, str]] = {}

    def gather(self, enough: int) -> None:
        """Wait until all have come; when it is time, until enough have."""
        until = time.monotonic() + self.patience.sites
        while set(self.names) - self.guests.keys():
            self.look()
            if time.monotonic() > until:
                if len(self.guests) >= enough:
                    return
                missing = ", ".join(n for n in self.names if n not in self.guests)
                raise FedplanError(
                    f"after {self.patience.sites:.0f} s these have not come: {missing}"
                )
            time.sleep(self.patience.look)

    def look(self) -> dict[int, str]:
        """Greet nodes that are new; the nodes that are there, each with when it last came."""
        there = self._there()
        for node, since in there.items():
            if self._greeted.get(node) != since:
                self._greeted[node] = since
                hello = packed({}, {"run": self.run})
                for number in self._push(node, "query.hello", hello, None):
                    self._hellos[number] = node
        for number, node in list(self._hellos.items()):
            for reply in steady(lambda n=number: self.grid.pull_messages([n]), self.patience):
                self._hellos.pop(number, None)
                if reply.has_error():
                    log.warning("node %s: %s", node, _reason(reply))
                    self._greeted.pop(node, None)
                else:
                    self._met(node, reply)
        now = time.monotonic()
        for name, guest in self.guests.items():
            if guest.node in there:
                self._gone.pop(name, None)
            else:
                self._gone.setdefault(name, now)
        self._tell()
        return there

    def _tell(self) -> None:
        """Tell how each site stands with the server, if that is new; it may be asked to stop."""
        for name in self.names:
            said = self._standing(name)
            if self._told.get(name) != said:
                self._told[name] = said
                self.status.site(name, *said)
        self.status.beat()

    def _standing(self, name: str) -> tuple[str, str]:
        if name not in self.guests:
            return SiteState.NOT_COME, ""
        return (SiteState.AWAY, "") if self.away(name) else (SiteState.THERE, "")

    @property
    def absent(self) -> set[str]:
        """Sites that have not come, or are gone for long."""
        return {name for name in self.names if self.away(name)}

    def away(self, name: str) -> bool:
        """Whether a site is gone for longer than one waits for it."""
        since = self._gone.get(name)
        missing = name not in self.guests
        return missing or (since is not None and time.monotonic() - since > self.patience.absent)

    def ask(
        self, kind: str, letters: dict[str, Letter], done: Callable[[], bool]
    ) -> Iterator[tuple[str, Message | str]]:
        """Each site's answer as it comes, or in words why none came; who has not is left out.

        The caller may put another letter for a name into `letters`: it is then asked anew. All are
        waited for until it is time, and then until `done`.
        """
        waiting = {name: _Open(letter) for name, letter in letters.items()}
        until = time.monotonic() + self.patience.answers
        last = until + self.patience.sites
        while waiting:
            there = self.look()
            for name, request in waiting.items():
                self._send(kind, name, request, there)
            for name, answer in self._arrived(waiting):
                letter = letters.get(name)
                yield name, answer
                if letters.get(name) is not letter:
                    waiting[name] = _Open(letters[name])
            now = time.monotonic()
            if done() and (now > until or all(map(self.away, waiting))):
                return
            if now > last:
                missing = ", ".join(sorted(waiting))
                raise FedplanError(
                    f"too few have answered in time, and not {missing}: start the run again to go "
                    "on with this round"
                )
            time.sleep(self.patience.look)

    def _there(self) -> dict[int, str]:
        try:
            nodes = steady(self.grid.get_nodes, self.patience)
            return {node.node_id: node.last_activated_at for node in nodes}
        except NotImplementedError:
            return dict.fromkeys(steady(self.grid.get_node_ids, self.patience), "")

    def _met(self, node: int, reply: FlowerMessage) -> None:
        try:
            _, said = unpacked(message_in(reply.content))
            if kind := next((kind for kind in KINDS if kind in said), ""):
                raise FedplanError(meant(kind, str(said[kind])))
            name = str(said.get("client"))
            if name not in self.names:
                log.warning("node %s says it is %r, whom the study does not name", node, name[:80])
                return
            traits = {str(k): str(v) for k, v in dict(said.get("traits") or {}).items()}
            agreed, start, run = (str(said.get(word)) for word in ("agreed", "start", "run"))
        except (FedplanError, TypeError, ValueError) as error:
            log.warning("node %s does not say who it is: %s", node, str(error)[:200])
            return
        other = self.guests.get(name)
        if other is not None and other.node != node and other.node in self._there():
            log.warning("node %s says it is %r, and so does node %s", node, name, other.node)
            return
        self.guests[name] = Guest(node, agreed, start, run, traits)

    def _send(self, kind: str, name: str, request: _Open, there: dict[int, str]) -> None:
        """Ask, or ask again a node that came back since it was asked."""
        guest = self.guests.get(name)
        if guest is None or guest.node not in there or time.monotonic() < request.after:
            return
        if request.numbers and (request.node, request.since) == (guest.node, there[guest.node]):
            return
        request.node, request.since = guest.node, there[guest.node]
        message, arrays = request.letter()
        for number in self._push(guest.node, kind, message, arrays):
            request.numbers[number] = guest.node
        self.status.site(name, SiteState.ASKED)

    def _push(
        self, node: int, kind: str, message: Message, arrays: ArrayRecord | None
    ) -> list[str]:
        envelope = FlowerMessage(records_of(message, arrays), node, kind)
        return [n for n in steady(lambda: self.grid.push_messages([envelope]), self.patience) if n]

    def _arrived(self, waiting: dict[str, _Open]) -> Iterator[tuple[str, Message | str]]:
        """Answers that have come, one pulled at a time."""
        for name, request in list(waiting.items()):
            for number in list(request.numbers):
                for reply in steady(lambda n=number: self.grid.pull_messages([n]), self.patience):
                    request.numbers.pop(number, None)
                    answer = self._heard(name, request, reply)
                    # An answer that comes twice is not the answer to what is asked next.
                    if answer is not None and waiting.get(name) is request:
                        del waiting[name]
                        yield name, answer

    def _heard(self, name: str, request: _Open, reply: FlowerMessage) -> Message | str | None:
        if not reply.has_error():
            try:
                return message_in(reply.content)
            except FedplanError as error:
                return str(error)
        reason = _reason(reply)
        log.warning("%s: %s", name, reason)
        request.after = time.monotonic() + min(5.0, 10 * self.patience.look)
        if request.node in self._there():
            request.failures += 1
        return f"no answer: {reason}" if request.failures >= self.patience.tries else None


def _reason(reply: FlowerMessage) -> str:
    return understood(str(reply.error.reason)[:200])


def steady(call: Callable[[], Iterable[Found]], patience: Patience) -> list[Found]:
    """A call to the grid, tried again while the SuperLink is in trouble."""
    until, pause = time.monotonic() + patience.sites, patience.look
    while True:
        try:
            return list(call())
        except (FedplanError, NotImplementedError, TypeError, ValueError, AttributeError):
            raise
        except Exception as error:
            if type(error).__name__ == "RunNotRunningException" or time.monotonic() > until:
                raise
            log.warning("the SuperLink is in trouble, and is asked again: %r", error)
            time.sleep(pause)
            pause = min(30.0, 2 * pause)
