# SPDX-License-Identifier: Apache-2.0
"""Requests to sites over Flower's grid, repeated until they have a reply or are given up.

Requests are idempotent: a site gives the same reply to the same request, so a request that may be
lost is sent again: to a node that came back, and on a new Flower run after Flower ended the last.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from math import inf
from typing import TypeVar

import httpx
from flwr.app import Message as FlowerMessage
from flwr.serverapp import Grid

from fedplan.errors import FedplanError, printable
from fedplan.federation.ledger.events import ClientChanged, Notice, RunStalled
from fedplan.federation.ledger.faults import APPROVAL
from fedplan.federation.ledger.status import SiteState, site_state_from_reason
from fedplan.federation.ledger.stream import EventStream, StopRequested
from fedplan.federation.participation import Timeouts
from fedplan.runners.flower import records
from fedplan.runners.flower._internals import LOST_CODES, ReplyGrid, RunNotRunningException
from fedplan.tensors.message import Message
from fedplan.tensors.serialization import pack_message

log = logging.getLogger("fedplan")
Item = TypeVar("Item")
MessageFactory = Callable[[], tuple[Message, records.BlobRecord | None]]
"""Makes a request and its blobs at the time of sending, so that one is in memory at a time."""


class FlowerRunEnded(FedplanError):
    """Flower has ended its run, as after a long silence of the SuperLink."""


class LinkUnreachable(FedplanError):
    """The SuperLink does not answer, or not now."""


HELLO, STATISTICS_REQUEST = "query.hello", "query.statistics"
"""Kinds of the first message to a site: for a run, or for statistics alone."""
HELLO_RETRY = 5.0
"""Seconds after which a node that refused gets another hello."""
BATCH_BYTES = 2**26
"""About the most bytes of replies that are fetched at a time."""
PAUSE_RATIO, MAX_PAUSE = 4, 30.0
"""Seconds of pause after a second of pulls without a reply, and the longest pause."""
WITHOUT_TENSORS = (HELLO, STATISTICS_REQUEST, "query.poll", "evaluate")
"""Kinds of messages whose replies are a header without tensors."""
ENDED_STATUS = (401, 403)
"""HTTP status of calls for a task that has expired, or whose Flower run has ended."""
AWAY_ERRORS = (httpx.TransportError, ConnectionError, LinkUnreachable)
"""Errors of a call to a SuperLink that is down; it is waited for."""
FINAL_ERRORS = (
    *(NotImplementedError, TypeError, ValueError, AttributeError),
    *(FileNotFoundError, PermissionError),
)
"""Errors of a call that no repetition mends."""
ENDED = "Flower has ended its run: start it again, to go on with this round"


@dataclass
class _PendingCall:
    """A request to a site that has no reply yet.

    `message_ids` are the Flower messages sent so far on `grid`; `node` and `since` (when it came
    online) are of the last sending. After an error reply, counted by `failures`, it is not sent
    again before `after`; at `due` it is sent again, since it may be lost.
    """

    make_message: MessageFactory
    message_ids: set[str] = field(default_factory=set[str])
    grid: Grid | None = None
    node: int = 0
    since: str = ""
    failures: int = 0
    after: float = 0.0
    due: float = inf


class SiteRpc:
    """The sites of a run on a Flower `grid`, and remote calls to the sites.

    Call `wait_for_sites`, then `call`; both poll the grid in the caller's thread. `hello` is the
    first message to each node, of the kind `hello_kind`. `sites` are the connected sites by name,
    `refusals` the reasons why other sites and nodes are not connected; these get the hello again
    until accepted. `sent` are the sites that got a request since the caller last cleared it. A
    site's name is the registered name of the node; for a node without one (on one machine only),
    the name in the reply is accepted. `wait_for_sites` waits for no other site than
    `registered_names()`, if set. `renew_grid`, if set, starts a Flower run and returns its grid:
    the first, if `grid` is None, and another after Flower ended one. A SuperLink that does not
    answer is waited for without limit, and that time counts in no timeout. A reply of more than
    `reply_limit` bytes counts as a failure of its site, and is not fetched whole.
    """

    def __init__(
        self,
        grid: Grid | None,
        names: Iterable[str],
        timeouts: Timeouts,
        hello: Message | None = None,
        hello_kind: str = HELLO,
    ) -> None:
        self._grid, self.names, self.timeouts = grid, list(names), timeouts
        self.hello, self.hello_kind = hello or pack_message({}, {"run": ""}), hello_kind
        self.sites: dict[str, records.ConnectedSite] = {}
        self.refusals: dict[str, str] = {}
        self.sent, self._reply_bytes = set[str](), dict[str, int]()
        self.reply_limit = BATCH_BYTES
        self._hello_since: dict[int, str] = {}
        self._hello_after: dict[int, float] = {}
        self._node_names: dict[int, str] = {}
        self._pending_hellos: dict[str, int] = {}
        self._gone_since: dict[str, float] = {}
        self.registered_names: Callable[[], Iterable[str]] | None = None
        self.renew_grid: Callable[[], Grid] | None = None
        self._outage_seconds, self._empty_pull_seconds = 0.0, 0.0
        self.events = EventStream()
        self._reported: dict[str, tuple[str, str]] = {}

    @property
    def grid(self) -> Grid:
        """The grid of the present Flower run; the first one is started when it is needed."""
        if self._grid is None:
            self._grid = self._open_grid()
        return self._grid

    def _open_grid(self) -> Grid:
        """Start a Flower run, as soon as the SuperLink answers, and return its grid."""
        if (renew := self.renew_grid) is None:
            raise FlowerRunEnded(ENDED)
        (grid,) = self._retry(lambda: [renew()])
        return grid

    def wait_for_sites(self, enough: int) -> None:
        """Wait until all sites are connected, or `enough` sites after the timeout for sites.

        Returns earlier at a stop, or with `enough` if no missing site is registered. After the
        timeout, FedplanError with fewer, except while a missing site waits for approval.
        """
        deadline = self._now() + self.timeouts.sites
        while missing := [name for name in self.names if name not in self.sites]:
            self.poll_nodes()
            if self.events.stop_reason():
                return
            if self.registered_names is not None and len(self.sites) >= enough:
                with suppress(FedplanError):  # the SuperLink does not answer: try again later
                    # On one machine nodes may be registered without names.
                    registered = set(self.registered_names()) - {""}
                    if registered and not registered.intersection(missing) - self.sites.keys():
                        return
            if self._now() > deadline:
                if len([name for name in self.sites if not self.is_away(name)]) >= enough:
                    return
                # A person may take days to approve a study.
                if not any(APPROVAL in self.refusals.get(name, "") for name in missing):
                    raise FedplanError(
                        f"after {self.timeouts.sites:.0f} s these sites are not connected: "
                        + "; ".join(f"{n} {self.refusals.get(n, '')}".strip() for n in missing)
                    )
            self._pause()

    def poll_nodes(self) -> dict[int, str]:
        """Send a hello to new nodes, and take the replies to earlier hellos that have arrived.

        Returns the online nodes by id, each with the time (a text) when the node came online; none
        if Flower has ended its run, and another is started.
        """
        try:
            online = self._greet_nodes()
        except FlowerRunEnded as error:
            self._start_flower_run(error)
            return {}
        now = self._now()
        for name, site in self.sites.items():
            if site.node in online:
                self._gone_since.pop(name, None)
            else:
                self._gone_since.setdefault(name, now)
        for name in self.names:
            state = SiteState.AWAY if self.is_away(name) else SiteState.CONNECTED, ""
            if reason := self.refusals.get(name):
                state = site_state_from_reason(reason), reason
            elif name not in self.sites:
                state = SiteState.NOT_CONNECTED, ""
            if self._reported.get(name) != state:
                self._reported[name] = state
                self.events.emit(ClientChanged(name, *state))
        self.events.heartbeat()
        return online

    def _greet_nodes(self) -> dict[int, str]:
        """Send hellos that are due, take replies to earlier ones, and return the online nodes."""
        online = self._online_nodes()
        for node, since in online.items():
            is_new = self._hello_since.get(node) != since
            if is_new or self._hello_after.get(node, inf) < time.monotonic():
                self._hello_since[node] = since
                # The message or its reply may be lost: send it again before the wait is over.
                self._hello_after[node] = time.monotonic() + self.timeouts.sites / 2
                for earlier in [i for i, n in self._pending_hellos.items() if n == node][:-1]:
                    del self._pending_hellos[earlier]  # of a node that never replies
                for message_id in self._push(node, self.hello_kind, self.hello, None):
                    self._pending_hellos[message_id] = node
        for reply in self._pull(self.hello_kind, self._pending_hellos):
            if node := self._pending_hellos.pop(reply.metadata.reply_to_message_id, 0):
                self._hello_after.pop(node, None)
                if reply.has_error():
                    self._refuse(node, "", records.error_text(reply))
                else:
                    self._connect(node, reply)
        return online

    def is_away(self, name: str) -> bool:
        """Whether a site is not connected, or offline for longer than the timeout."""
        since = self._gone_since.get(name)
        missing = name not in self.sites
        return missing or (since is not None and self._now() - since > self.timeouts.reconnect)

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
        """Send requests (by site name) of a kind as "train", and yield (name, reply) on arrival.

        A reply is a message, or the error text after too many failures of the site. Ends when all
        sites have replied, or when `is_enough()` is true and `timeout` seconds (default: the
        timeout for updates) are over, or all other sites are away. Raises FedplanError if it is
        still false when then the timeout for sites is over, too. If the caller replaces an entry of
        `requests` after the reply, the new request is sent. A request without a reply is sent again
        after half of `timeout`: Flower may lose a message.
        """
        pending = {name: _PendingCall(request) for name, request in requests.items()}
        timeout = self.timeouts.updates if timeout is None else timeout
        soft = self._now() + timeout
        hard = soft + self.timeouts.sites
        while pending:
            online = self.poll_nodes()
            try:
                for name, call in pending.items():
                    self._send(kind, name, call, online, timeout / 2)
                for name, reply in self._receive(kind, pending):
                    request = requests.get(name)
                    yield name, reply
                    del reply
                    if requests.get(name) is not request:
                        pending[name] = _PendingCall(requests[name])
            except FlowerRunEnded as error:
                self._start_flower_run(error)
            now = self._now()
            if is_enough() and (now > soft or all(map(self.is_away, pending))):
                return
            if now > hard:
                missing = ", ".join(sorted(pending))
                raise FedplanError(
                    f"too few sites have answered in time, and not {missing}: start the run again "
                    "to go on with this round"
                )
            self._pause()

    def _online_nodes(self) -> dict[int, str]:
        """Return when each online node was activated ("" if unknown), and update the names."""
        try:
            nodes = self._retry(self.grid.get_nodes)
            self._node_names = {node.node_id: node.name for node in nodes if node.name}
            return {node.node_id: node.last_activated_at for node in nodes}
        except NotImplementedError:
            return dict.fromkeys(self._retry(self.grid.get_node_ids), "")

    def _connect(self, node: int, reply: FlowerMessage) -> None:
        """Add the site at a node to `sites` by its reply to the hello, or to `refusals`."""
        registered = self._node_names.get(node, "")
        try:
            name, site, fields = records.read_hello(reply.content, node)
        except (FedplanError, TypeError, ValueError) as error:
            return self._refuse(node, "", f"does not say who it is: {str(error)[:200]}")
        if reason := records.refusal_text(fields):
            return self._refuse(node, registered or name, reason)
        if registered and name != registered:
            return self._refuse(node, registered, f"says that it is {name[:80]!r}")
        if name not in self.names:
            return self._refuse(node, "", f"is {name[:80]!r}, whom the study does not name")
        other = self.sites.get(name)
        if other is not None and other.node != node and other.node in self._online_nodes():
            return self._refuse(node, "", f"says that it is {name!r}, as node {other.node} does")
        # Logged here, out of the site's reach: a rewritten egress log has another end.
        ends = re.sub("[^0-9a-f]", "?", str(fields.get("egress_head", ""))[:64])
        self.events.emit(Notice("site hello", f"egress log ends with hash {ends}", "info", name))
        self.refusals.pop(name, None)
        self.sites[name] = site

    def _refuse(self, node: int, name: str, reason: str) -> None:
        self._hello_after[node] = time.monotonic() + HELLO_RETRY
        name, reason = name or self._node_names.get(node, ""), printable(reason)
        name = name if name in self.names else f"node {node}"
        if self.refusals.get(name) != reason:
            log.warning("%s: %s", name, reason)
        self.refusals[name] = reason

    def _send(
        self, kind: str, name: str, call: _PendingCall, online: dict[int, str], patience: float
    ) -> None:
        """Send a pending call to an online site that has not got it, or is silent for long."""
        if call.grid is not self.grid:
            call.grid, call.message_ids = self.grid, set()
        site = self.sites.get(name)
        if site is None or site.node not in online or time.monotonic() < call.after:
            return
        same_node = (call.node, call.since) == (site.node, online[site.node])
        if call.message_ids and same_node and self._now() < call.due:
            return
        message, blobs = call.make_message()
        message_ids = self._push(site.node, kind, message, blobs)
        if not message_ids:
            return  # the SuperLink did not take it: it is sent again at the next poll
        call.node, call.since = site.node, online[site.node]
        call.due = self._now() + patience
        call.message_ids.update(message_ids)
        if kind != HELLO:  # which asks for no work
            self.sent.add(name)
            self.events.emit(ClientChanged(name, SiteState.REQUESTED))

    def _push(
        self, node: int, kind: str, message: Message, blobs: records.BlobRecord | None
    ) -> list[str]:
        """Send a message to a node; return a list of the id from Flower, or an empty list."""
        envelope = FlowerMessage(records.to_records(message, blobs), node, kind)
        return [i for i in self._retry(lambda: self.grid.push_messages([envelope])) if i]

    def _retry(self, call: Callable[[], Iterable[Item]]) -> list[Item]:
        """Return the items of a call to the grid; repeat the call while the SuperLink is away.

        Raises FlowerRunEnded if Flower has ended the run, LinkUnreachable if the SuperLink rejects
        the call for longer than the timeout for sites, and errors of the call itself at once.
        """
        start, pause = time.monotonic(), self.timeouts.poll_interval
        since = f"since {datetime.now(UTC):%H:%M} UTC"
        while True:
            attempt = time.monotonic()
            try:
                items = list(call())
            except RunNotRunningException as error:  # no subclass of Exception
                raise FlowerRunEnded(ENDED) from error
            except FINAL_ERRORS:
                raise
            except Exception as error:
                code = error.response.status_code if isinstance(error, httpx.HTTPStatusError) else 0
                if code in ENDED_STATUS:
                    raise FlowerRunEnded(ENDED) from error
                if isinstance(error, FedplanError) and not isinstance(error, LinkUnreachable):
                    raise
                is_away = code >= 500 or isinstance(error, AWAY_ERRORS)
                symptom = "does not answer" if is_away else f"fails by {type(error).__name__}"
                symptom = f"answers {code}" if code else symptom
                reason = str(error) if isinstance(error, FedplanError) else repr(error)
                if not is_away and time.monotonic() - start > self.timeouts.sites:
                    raise LinkUnreachable(
                        f"the SuperLink {symptom} {since}, for longer than timeouts.sites "
                        f"({self.timeouts.sites:.0f} s): {reason[:200]}"
                    ) from error
                if pause == self.timeouts.poll_interval:
                    log.warning("the SuperLink %s %s; trying again: %s", symptom, since, reason)
            else:
                self.events.emit(RunStalled(""))
                return items
            self.events.emit(RunStalled(f"the SuperLink {symptom} {since}; trying again"))
            self._wait(pause)
            self._outage_seconds += time.monotonic() - attempt
            pause = min(30.0, 2 * pause)

    def _start_flower_run(self, error: FlowerRunEnded) -> None:
        """Go on with another Flower run, and greet all sites again; without one raise `error`."""
        if self.renew_grid is None:
            raise error
        log.warning("Flower has ended its run; another one is started")
        self.events.emit(RunStalled("the SuperLink has ended Flower's run; another one is started"))
        self._wait(min(5.0, 10 * self.timeouts.poll_interval))
        self._grid = self._open_grid()
        self._pending_hellos, self._hello_since, self._hello_after = {}, {}, {}

    def _pause(self) -> None:
        """Wait until the next poll: longer after a slow one, so that the SuperLink can serve sites.

        The SuperLink spends some milliseconds on each call and on each message that it looks up.
        """
        pause = min(MAX_PAUSE, PAUSE_RATIO * self._empty_pull_seconds)
        self._empty_pull_seconds = 0.0
        if pause > self.timeouts.poll_interval:
            return self._wait(pause)
        time.sleep(self.timeouts.poll_interval)

    def _wait(self, seconds: float) -> None:
        """Sleep, with heartbeats of the run; a stop ends a run that has no grid yet."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self.events.heartbeat()
            if self._grid is None and (reason := self.events.stop_reason()):
                raise StopRequested(reason)
            time.sleep(min(left, 1.0))

    def _now(self) -> float:
        """Return monotonic seconds without those in which the SuperLink did not answer."""
        return time.monotonic() - self._outage_seconds

    def _pull(self, kind: str, message_ids: Iterable[str]) -> Iterator[FlowerMessage]:
        """Yield the replies that have arrived to messages of a kind, without waiting.

        Asks for as many at a time as take BATCH_BYTES by the largest reply of this kind so far;
        before the first one of full size (see `reply_bytes`), for one.
        """
        waiting = list(message_ids)
        if waiting and isinstance(self.grid, ReplyGrid):
            self.grid.reply_limit = self.reply_limit
        while waiting:
            count = max(1, BATCH_BYTES // self._reply_bytes.get(kind, BATCH_BYTES))
            batch, waiting = waiting[:count], waiting[count:]
            start = self._now()
            replies = self._retry(lambda ids=batch: self.grid.pull_messages(ids))
            self._empty_pull_seconds += 0.0 if replies else self._now() - start
            replies = [each for each in replies if each.metadata.reply_to_message_id in batch]
            while replies:  # none is kept here while the next one is fetched
                if size := records.reply_bytes(replies[0], needs_blobs=kind not in WITHOUT_TENSORS):
                    self._reply_bytes[kind] = max(size, self._reply_bytes.get(kind, 0))
                yield replies.pop(0)

    def _receive(
        self, kind: str, pending: dict[str, _PendingCall]
    ) -> Iterator[tuple[str, Message | str]]:
        """Yield (name, reply) for calls that have a reply, and remove them from `pending`."""
        calls = {i: (name, call) for name, call in pending.items() for i in call.message_ids}
        for message in self._pull(kind, calls):
            name, call = calls[message.metadata.reply_to_message_id]
            call.message_ids.discard(message.metadata.reply_to_message_id)
            reply = self._parse_reply(name, call, message)
            del message
            # A second reply to an old request is not the reply to the next request.
            if reply is not None and pending.get(name) is call:
                del pending[name]
                yield name, reply
            del reply

    def _parse_reply(
        self, name: str, call: _PendingCall, reply: FlowerMessage
    ) -> Message | str | None:
        """Return a reply's message, an error text, or None if the request is to be sent again.

        An error reply counts as a failure only if the node is online and the message is not just
        lost at the SuperLink; as many failures as tries make it final.
        """
        if not reply.has_error():
            try:
                return records.from_records(reply.content)
            except FedplanError as error:
                return printable(str(error))
        reason = records.error_text(reply)
        log.warning("%s: %s", name, reason)
        call.after = time.monotonic() + min(5.0, 10 * self.timeouts.poll_interval)
        # The SuperLink gives a reply out once: if the link breaks then, it is not the site's fault.
        if reply.error.code not in LOST_CODES and call.node in self._online_nodes():
            call.failures += 1
        return f"no answer: {reason}" if call.failures >= self.timeouts.tries else None
