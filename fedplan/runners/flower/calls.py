# SPDX-License-Identifier: Apache-2.0
"""Calls: requests to sites over Flower's grid, asked again until each is answered or given up.

A request has a name, and a site answers the same one the same: so a request that may have been
lost is simply asked again.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import TypeVar, cast

from flwr.app import ArrayRecord
from flwr.app import Message as FlowerMessage
from flwr.serverapp import Grid

from fedplan.errors import FedplanError
from fedplan.federation.codes import APPROVAL, KINDS, meant, understood
from fedplan.federation.patience import Patience
from fedplan.federation.states import SiteState, state_said
from fedplan.federation.status import Status
from fedplan.runners.flower.records import message_in, records_of
from fedplan.tensors.message import Message
from fedplan.tensors.serialization import packed, unpacked

log = logging.getLogger("fedplan")
Found = TypeVar("Found")
Letter = Callable[[], tuple[Message, ArrayRecord | None]]
"""Makes a request when it is sent: only one of them is held at a time."""


GREETED = 5.0
"""Seconds after which a site that did not let a study in is greeted again."""


@dataclass(frozen=True)
class Guest:
    """A site that said who it is: its node, what it agreed to, in which run, and its traits.

    `versions` are of what both ends must have alike; of a site that says none, nothing is known.
    `key` is its node key as it says it, where sums are masked: the sites know each other's better.
    """

    node: int
    agreed: str
    start: str
    run: str
    traits: dict[str, str]
    versions: dict[str, str] = field(default_factory=dict[str, str])
    key: bytes = b""


@dataclass
class _Open:
    """A request that waits for its answer."""

    letter: Letter
    numbers: dict[str, int] = field(default_factory=dict[str, int])
    node: int = 0
    since: str = ""
    failures: int = 0
    after: float = 0.0


class Ended(Exception):
    """Flower has ended the run that a call was of: whoever drives begins another."""


class Calls:
    """The sites that have come, and what is asked of them.

    A site whose node was registered under a name has that name, whatever it says; where nodes are
    registered under none, on one machine alone, its word is taken. `refusals` are of sites that do
    not let the study in: they are greeted again and again, until somebody there does. Where
    `registered` says who may come at all, nobody else is waited for.
    """

    def __init__(
        self, grid: Grid, names: Iterable[str], patience: Patience, hello: Message | None = None
    ) -> None:
        self.grid, self.names, self.patience = grid, list(names), patience
        self.hello = hello or packed({}, {"run": ""})
        self.guests: dict[str, Guest] = {}
        self.refusals: dict[str, str] = {}
        self._greeted: dict[int, str] = {}
        self._again: dict[int, float] = {}
        self._named: dict[int, str] = {}
        self._hellos: dict[str, int] = {}
        self._gone: dict[str, float] = {}
        self.registered: Callable[[], Iterable[str]] | None = None
        self.status = Status()
        self._told: dict[str, tuple[str, str]] = {}

    def gather(self, enough: int) -> None:
        """Wait until all have come; when it is time, until enough have."""
        until = time.monotonic() + self.patience.sites
        while missing := [name for name in self.names if name not in self.guests]:
            self.look()
            if self.status.halted() or self._over(missing, enough):
                return
            if time.monotonic() > until:
                if len([name for name in self.guests if not self.away(name)]) >= enough:
                    return
                # A person may take days to approve: a site that waits for one has come.
                if not any(APPROVAL in self.refusals.get(name, "") for name in missing):
                    raise FedplanError(
                        f"after {self.patience.sites:.0f} s these have not come: "
                        + "; ".join(f"{n} {self.refusals.get(n, '')}".strip() for n in missing)
                    )
            time.sleep(self.patience.look)

    def _over(self, missing: list[str], enough: int) -> bool:
        """Whether enough have come, and nobody who is missing can."""
        if self.registered is None or len(self.guests) < enough:
            return False
        try:
            there = set(self.registered()) - {""}
        except FedplanError:  # the SuperLink is in trouble: look again
            return False
        # On one machine alone nodes may be registered under no names.
        return bool(there) and not any(name in there for name in missing if name not in self.guests)

    def look(self) -> dict[int, str]:
        """Greet nodes that are new; the nodes that are there, each with when it last came."""
        there = self._there()
        for node, since in there.items():
            if self._greeted.get(node) != since or self._again.get(node, inf) < time.monotonic():
                self._greeted[node] = since
                self._again.pop(node, None)
                for number in self._push(node, "query.hello", self.hello, None):
                    self._hellos[number] = node
        for number, node in list(self._hellos.items()):
            for reply in self._steady(lambda n=number: self.grid.pull_messages([n])):
                self._hellos.pop(number, None)
                if reply.has_error():
                    self._refused(node, "", _reason(reply))
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
        if why := self.refusals.get(name):
            return state_said(why), why
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

    def present(self) -> list[str]:
        """The sites that are there now."""
        self.look()
        return [name for name in self.guests if name not in self._gone]

    def ask(
        self,
        kind: str,
        letters: dict[str, Letter],
        done: Callable[[], bool],
        *,
        wait: float | None = None,
    ) -> Iterator[tuple[str, Message | str]]:
        """Each site's answer as it comes, or in words why none came; who has not is left out.

        The caller may put another letter for a name into `letters`: it is then asked anew. All are
        waited for until it is time, and then until `done`; `wait` says when it is time.
        """
        waiting = {name: _Open(letter) for name, letter in letters.items()}
        until = time.monotonic() + (self.patience.answers if wait is None else wait)
        last = until + self.patience.sites
        while waiting:
            there = self.look()
            for name, request in waiting.items():
                self._send(kind, name, request, there)
            for name, answer in self._arrived(waiting):
                letter = letters.get(name)
                yield name, answer
                del answer
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
            nodes = self._steady(self.grid.get_nodes)
            self._named = {node.node_id: node.name for node in nodes if node.name}
            return {node.node_id: node.last_activated_at for node in nodes}
        except NotImplementedError:
            return dict.fromkeys(self._steady(self.grid.get_node_ids), "")

    def _met(self, node: int, reply: FlowerMessage) -> None:
        try:
            _, said = unpacked(message_in(reply.content))
            name, known = str(said.get("client", "")), self._named.get(node, "")
            if kind := next((kind for kind in KINDS if kind in said), ""):
                return self._refused(node, known or name, meant(kind, str(said[kind])))
            if known and name != known:
                return self._refused(node, known, f"says that it is {name[:80]!r}")
            if name not in self.names:
                return self._refused(node, "", f"is {name[:80]!r}, whom the study does not name")
            traits, versions = (_words(said.get(word)) for word in ("traits", "versions"))
            agreed, start, run = (str(said.get(word)) for word in ("agreed", "start", "run"))
            key = bytes.fromhex(str(said.get("node", "")))
        except (FedplanError, TypeError, ValueError) as error:
            return self._refused(node, "", f"does not say who it is: {str(error)[:200]}")
        other = self.guests.get(name)
        if other is not None and other.node != node and other.node in self._there():
            return self._refused(node, "", f"says that it is {name!r}, as node {other.node} does")
        # Kept here, where the site cannot change it: a record that was rewritten does not have it.
        ends = re.sub("[^0-9a-f]", "?", str(said.get("record", ""))[:64])
        self.status.tell(
            "site greeted", f"its record of what left ends with {ends}", level="info", site=name
        )
        self.refusals.pop(name, None)
        self.guests[name] = Guest(node, agreed, start, run, traits, versions, key)

    def _refused(self, node: int, name: str, why: str) -> None:
        """Note why a node is not a guest, and greet it again later."""
        self._again[node] = time.monotonic() + GREETED
        name = name or self._named.get(node, "")
        known = name if name in self.names else f"node {node}"
        if self.refusals.get(known) != why:
            log.warning("%s: %s", known, why)
        self.refusals[known] = why

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
        return [n for n in self._steady(lambda: self.grid.push_messages([envelope])) if n]

    def _steady(self, call: Callable[[], Iterable[Found]]) -> list[Found]:
        """A call to the grid, tried again while the SuperLink is in trouble.

        Meanwhile the run tells so, and may be asked to stop.
        """
        until, pause = time.monotonic() + self.patience.sites, self.patience.look
        while True:
            try:
                found = list(call())
            except (FedplanError, NotImplementedError, TypeError, ValueError, AttributeError):
                raise
            except BaseException as error:
                if type(error).__name__ == "RunNotRunningException":  # no Exception, with Flower
                    raise Ended(str(error)) from error
                if not isinstance(error, Exception) or time.monotonic() > until:
                    raise
                log.warning("the SuperLink is in trouble, and is asked again: %r", error)
            else:
                self.status.trouble("")
                return found
            self.status.trouble("the SuperLink does not answer, and is asked again")
            again = time.monotonic() + pause
            while (left := again - time.monotonic()) > 0:
                self.status.beat()
                time.sleep(min(left, 1.0))
            pause = min(30.0, 2 * pause)

    def _arrived(self, waiting: dict[str, _Open]) -> Iterator[tuple[str, Message | str]]:
        """Answers that have come, one pulled at a time."""
        for name, request in list(waiting.items()):
            for number in list(request.numbers):
                # Nothing of an answer is held here while the next one is fetched.
                replies = self._steady(lambda n=number: self.grid.pull_messages([n]))
                while replies:
                    request.numbers.pop(number, None)
                    answer = self._heard(name, request, replies.pop(0))
                    # An answer that comes twice is not the answer to what is asked next.
                    if answer is not None and waiting.get(name) is request:
                        del waiting[name]
                        yield name, answer
                    del answer

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


def _words(said: object) -> dict[str, str]:
    found = cast("Mapping[object, object]", said if isinstance(said, dict) else {})
    return {str(name): str(value) for name, value in found.items()}


def _reason(reply: FlowerMessage) -> str:
    return understood(str(reply.error.reason)[:200])
