# SPDX-License-Identifier: Apache-2.0
"""Requests to sites over Flower's grid, repeated until they have a reply or are given up.

Requests are idempotent: a site gives the same reply to the same request, so a request that may be
lost is sent again.
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
from fedplan.federation.error_codes import APPROVAL, KINDS, decode_reason, describe_code
from fedplan.federation.run_states import SiteState, site_state_from_reason
from fedplan.federation.status import StatusReporter
from fedplan.federation.timeouts import Timeouts
from fedplan.runners.flower.records import from_records, to_records
from fedplan.tensors.message import Message
from fedplan.tensors.serialization import pack_message, unpack_message

log = logging.getLogger("fedplan")
Item = TypeVar("Item")
MessageFactory = Callable[[], tuple[Message, ArrayRecord | None]]
"""Makes a request and its arrays at the time of sending, so that one is in memory at a time."""

HELLO_RETRY = 5.0
"""Seconds after which a node that refused gets another hello."""


@dataclass(frozen=True)
class ConnectedSite:
    """A site that replied to the hello.

    `node` is its Flower node id, `agreement_digest` the digest of its agreement, `initial_digest`
    that of its initial model, `run` the run that it is in, `versions` those of its
    packages (empty if unknown), `key` its public node key for secure aggregation, as the site
    claims it.
    """

    node: int
    agreement_digest: str
    initial_digest: str
    run: str
    traits: dict[str, str]
    versions: dict[str, str] = field(default_factory=dict[str, str])
    key: bytes = b""


@dataclass
class _PendingCall:
    """A request without a reply.

    `message_ids` are the Flower messages sent for it, with their nodes. `node` and `since` are the
    node that it was last sent to and when that came online. After `failures` it is not sent again
    before the monotonic time `after`.
    """

    make_message: MessageFactory
    message_ids: dict[str, int] = field(default_factory=dict[str, int])
    node: int = 0
    since: str = ""
    failures: int = 0
    after: float = 0.0


class FlowerRunEnded(Exception):
    """Flower has ended its run; the caller may start another."""


class SiteRpc:
    """The connected sites of a run, and remote calls to them.

    A site's name is the registered name of its node; nodes without one, on one machine, are
    believed. `sites` are the connected sites, `refusals` the reasons of the others: they get a
    hello again and again, until they accept. `registered_names` returns the names of registered
    nodes, if known; sites without a node are then not waited for. `hello` is the first message.
    """

    def __init__(
        self, grid: Grid, names: Iterable[str], timeouts: Timeouts, hello: Message | None = None
    ) -> None:
        self.grid, self.names, self.timeouts = grid, list(names), timeouts
        self.hello = hello or pack_message({}, {"run": ""})
        self.sites: dict[str, ConnectedSite] = {}
        self.refusals: dict[str, str] = {}
        self._hello_since: dict[int, str] = {}
        self._hello_after: dict[int, float] = {}
        self._node_names: dict[int, str] = {}
        self._pending_hellos: dict[str, int] = {}
        self._gone_since: dict[str, float] = {}
        self.registered_names: Callable[[], Iterable[str]] | None = None
        self.status = StatusReporter()
        self._reported: dict[str, tuple[str, str]] = {}

    def wait_for_sites(self, enough: int) -> None:
        """Wait until all sites are connected, or `enough` of them after the timeout.

        Returns early if a stop is requested. Raises FedplanError if too few are connected after the
        timeout, unless a missing one waits for an approval.
        """
        deadline = time.monotonic() + self.timeouts.sites
        while missing := [name for name in self.names if name not in self.sites]:
            self.poll_nodes()
            if self.status.stop_reason() or self._all_registered_connected(missing, enough):
                return
            if time.monotonic() > deadline:
                if len([name for name in self.sites if not self.is_away(name)]) >= enough:
                    return
                # A person may take days to approve a study.
                if not any(APPROVAL in self.refusals.get(name, "") for name in missing):
                    raise FedplanError(
                        f"after {self.timeouts.sites:.0f} s these sites are not connected: "
                        + "; ".join(f"{n} {self.refusals.get(n, '')}".strip() for n in missing)
                    )
            time.sleep(self.timeouts.poll_interval)

    def _all_registered_connected(self, missing: list[str], enough: int) -> bool:
        """Whether enough sites are connected, and no missing one is registered."""
        if self.registered_names is None or len(self.sites) < enough:
            return False
        try:
            registered = set(self.registered_names()) - {""}
        except FedplanError:  # the SuperLink does not answer: try again later
            return False
        # On one machine nodes may be registered without names.
        still_missing = registered.intersection(missing) - self.sites.keys()
        return bool(registered) and not still_missing

    def poll_nodes(self) -> dict[int, str]:
        """Send a hello to new nodes, and take the replies of earlier ones.

        Updates `sites`, `refusals` and the status. Returns the online nodes, with the time since
        when each is online.
        """
        online = self._online_nodes()
        for node, since in online.items():
            if (
                self._hello_since.get(node) != since
                or self._hello_after.get(node, inf) < time.monotonic()
            ):
                self._hello_since[node] = since
                self._hello_after.pop(node, None)
                for message_id in self._push(node, "query.hello", self.hello, None):
                    self._pending_hellos[message_id] = node
        for message_id, node in list(self._pending_hellos.items()):
            for reply in self._retry(lambda i=message_id: self.grid.pull_messages([i])):
                self._pending_hellos.pop(message_id, None)
                if reply.has_error():
                    self._refuse(node, "", _error_text(reply))
                else:
                    self._connect(node, reply)
        now = time.monotonic()
        for name, site in self.sites.items():
            if site.node in online:
                self._gone_since.pop(name, None)
            else:
                self._gone_since.setdefault(name, now)
        self._report_states()
        return online

    def _report_states(self) -> None:
        """Report changed states of sites to the status, and send it a heartbeat."""
        for name in self.names:
            state = self._site_state(name)
            if self._reported.get(name) != state:
                self._reported[name] = state
                self.status.set_site_state(name, *state)
        self.status.heartbeat()

    def _site_state(self, name: str) -> tuple[str, str]:
        if reason := self.refusals.get(name):
            return site_state_from_reason(reason), reason
        if name not in self.sites:
            return SiteState.NOT_COME, ""
        return (SiteState.AWAY, "") if self.is_away(name) else (SiteState.THERE, "")

    @property
    def absent_sites(self) -> set[str]:
        """Names of sites that are not connected, or offline for longer than the timeout."""
        return {name for name in self.names if self.is_away(name)}

    def is_away(self, name: str) -> bool:
        """Whether a site is not connected, or offline for longer than the timeout."""
        since = self._gone_since.get(name)
        missing = name not in self.sites
        return missing or (since is not None and time.monotonic() - since > self.timeouts.reconnect)

    def present_sites(self) -> list[str]:
        """Poll the nodes, and return the names of the sites that are online."""
        self.poll_nodes()
        return [name for name in self.sites if name not in self._gone_since]

    def call(
        self,
        kind: str,
        requests: dict[str, MessageFactory],
        is_enough: Callable[[], bool],
        *,
        timeout: float | None = None,
    ) -> Iterator[tuple[str, Message | str]]:
        """Send requests of a kind to sites, and yield (name, reply or error text) as they arrive.

        Waits for all sites until the timeout (default: that for replies), then until `is_enough`;
        sites without a reply are left out. The caller may replace an entry of `requests` after its
        reply: the new request is then sent. Raises FedplanError if it takes too long.
        """
        pending = {name: _PendingCall(request) for name, request in requests.items()}
        soft = time.monotonic() + (self.timeouts.updates if timeout is None else timeout)
        hard = soft + self.timeouts.sites
        while pending:
            online = self.poll_nodes()
            for name, call in pending.items():
                self._send(kind, name, call, online)
            for name, reply in self._receive(pending):
                request = requests.get(name)
                yield name, reply
                del reply
                if requests.get(name) is not request:
                    pending[name] = _PendingCall(requests[name])
            now = time.monotonic()
            if is_enough() and (now > soft or all(map(self.is_away, pending))):
                return
            if now > hard:
                missing = ", ".join(sorted(pending))
                raise FedplanError(
                    f"too few sites have answered in time, and not {missing}: start the run again "
                    "to go on with this round"
                )
            time.sleep(self.timeouts.poll_interval)

    def _online_nodes(self) -> dict[int, str]:
        """Return the online nodes with their activation times; also updates the node names."""
        try:
            nodes = self._retry(self.grid.get_nodes)
            self._node_names = {node.node_id: node.name for node in nodes if node.name}
            return {node.node_id: node.last_activated_at for node in nodes}
        except NotImplementedError:
            return dict.fromkeys(self._retry(self.grid.get_node_ids), "")

    def _connect(self, node: int, reply: FlowerMessage) -> None:
        """Add the site of a hello's reply to `sites`, or its reason to `refusals`."""
        try:
            _, fields = unpack_message(from_records(reply.content))
            name, registered = str(fields.get("client", "")), self._node_names.get(node, "")
            if kind := next((kind for kind in KINDS if kind in fields), ""):
                reason = describe_code(kind, str(fields[kind]))
                return self._refuse(node, registered or name, reason)
            if registered and name != registered:
                return self._refuse(node, registered, f"says that it is {name[:80]!r}")
            if name not in self.names:
                return self._refuse(node, "", f"is {name[:80]!r}, whom the study does not name")
            traits, versions = (_text_fields(fields.get(key)) for key in ("traits", "versions"))
            agreed, start, run = (str(fields.get(key)) for key in ("agreed", "start", "run"))
            node_key = bytes.fromhex(str(fields.get("node", "")))
        except (FedplanError, TypeError, ValueError) as error:
            return self._refuse(node, "", f"does not say who it is: {str(error)[:200]}")
        other = self.sites.get(name)
        if other is not None and other.node != node and other.node in self._online_nodes():
            return self._refuse(node, "", f"says that it is {name!r}, as node {other.node} does")
        # Logged here, out of the site's reach: a rewritten egress log has another end.
        ends = re.sub("[^0-9a-f]", "?", str(fields.get("record", ""))[:64])
        self.status.notify(
            "site greeted", f"its record of what left ends with {ends}", level="info", site=name
        )
        self.refusals.pop(name, None)
        self.sites[name] = ConnectedSite(node, agreed, start, run, traits, versions, node_key)

    def _refuse(self, node: int, name: str, reason: str) -> None:
        """Record and log why a node is not connected, and schedule another hello."""
        self._hello_after[node] = time.monotonic() + HELLO_RETRY
        name = name or self._node_names.get(node, "")
        name = name if name in self.names else f"node {node}"
        if self.refusals.get(name) != reason:
            log.warning("%s: %s", name, reason)
        self.refusals[name] = reason

    def _send(self, kind: str, name: str, call: _PendingCall, online: dict[int, str]) -> None:
        """Send a request to a site that is online, unless its node has it already.

        A node that went offline and came back gets it again.
        """
        site = self.sites.get(name)
        if site is None or site.node not in online or time.monotonic() < call.after:
            return
        if call.message_ids and (call.node, call.since) == (site.node, online[site.node]):
            return
        call.node, call.since = site.node, online[site.node]
        message, arrays = call.make_message()
        for message_id in self._push(site.node, kind, message, arrays):
            call.message_ids[message_id] = site.node
        self.status.set_site_state(name, SiteState.ASKED)

    def _push(
        self, node: int, kind: str, message: Message, arrays: ArrayRecord | None
    ) -> list[str]:
        """Send a message to a node, and return the id that Flower gives it, if any."""
        envelope = FlowerMessage(to_records(message, arrays), node, kind)
        return [i for i in self._retry(lambda: self.grid.push_messages([envelope])) if i]

    def _retry(self, call: Callable[[], Iterable[Item]]) -> list[Item]:
        """Return the items of a call to the grid, repeated while the SuperLink does not answer.

        Reports the problem to the status. Raises FlowerRunEnded if Flower has ended the run, and
        the last error after the timeout for sites.
        """
        deadline, pause = time.monotonic() + self.timeouts.sites, self.timeouts.poll_interval
        while True:
            try:
                items = list(call())
            except (FedplanError, NotImplementedError, TypeError, ValueError, AttributeError):
                raise
            except BaseException as error:
                if (
                    type(error).__name__ == "RunNotRunningException"
                ):  # Flower derives it from BaseException
                    raise FlowerRunEnded(str(error)) from error
                if not isinstance(error, Exception) or time.monotonic() > deadline:
                    raise
                log.warning("the SuperLink does not answer; trying again: %r", error)
            else:
                self.status.set_problem("")
                return items
            self.status.set_problem("the SuperLink does not answer; trying again")
            resume = time.monotonic() + pause
            while (left := resume - time.monotonic()) > 0:
                self.status.heartbeat()
                time.sleep(min(left, 1.0))
            pause = min(30.0, 2 * pause)

    def _receive(self, pending: dict[str, _PendingCall]) -> Iterator[tuple[str, Message | str]]:
        """Yield the replies that have arrived, pulled one at a time, and remove their calls."""
        for name, call in list(pending.items()):
            for message_id in list(call.message_ids):
                # No reply is kept in memory here while the next one is fetched.
                replies = self._retry(lambda i=message_id: self.grid.pull_messages([i]))
                while replies:
                    call.message_ids.pop(message_id, None)
                    reply = self._parse_reply(name, call, replies.pop(0))
                    # A second reply to an old request is not the reply to the next request.
                    if reply is not None and pending.get(name) is call:
                        del pending[name]
                        yield name, reply
                    del reply

    def _parse_reply(
        self, name: str, call: _PendingCall, reply: FlowerMessage
    ) -> Message | str | None:
        """Return a reply's message, or an error text; None if the request is to be sent again."""
        if not reply.has_error():
            try:
                return from_records(reply.content)
            except FedplanError as error:
                return str(error)
        reason = _error_text(reply)
        log.warning("%s: %s", name, reason)
        call.after = time.monotonic() + min(5.0, 10 * self.timeouts.poll_interval)
        if call.node in self._online_nodes():
            call.failures += 1
        return f"no answer: {reason}" if call.failures >= self.timeouts.tries else None


def _text_fields(value: object) -> dict[str, str]:
    items = cast("Mapping[object, object]", value if isinstance(value, dict) else {})
    return {str(name): str(item) for name, item in items.items()}


def _error_text(reply: FlowerMessage) -> str:
    return decode_reason(str(reply.error.reason)[:200])
