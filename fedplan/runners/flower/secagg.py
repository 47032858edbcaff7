# SPDX-License-Identifier: Apache-2.0
"""Secure aggregation over Flower's grid: carries the messages of `SecureRound`.

A sum that cannot be unmasked is tried once more; then the round changes nothing, and its record
says why.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from fedplan.errors import FedplanError
from fedplan.federation.aggregation.secure import SecureAggregator, SecureSum
from fedplan.federation.aggregation.secure_input import scoring_slots
from fedplan.federation.messages import Request, turn_digest
from fedplan.federation.rounds import RoundState
from fedplan.federation.server import Server
from fedplan.runners.flower.records import refusal_text
from fedplan.runners.flower.rpc import HELLO, MessageFactory, SiteRpc
from fedplan.secagg.round import ROUND_CHECKPOINT, SCORING_CHECKPOINT, SecureRound
from fedplan.secagg.terms import Terms
from fedplan.tensors.message import Message
from fedplan.tensors.serialization import unpack_message

log = logging.getLogger("fedplan")
GONE = "dropped out before its masked input arrived"
"""Rejection of a client that trained, but sent no masked input."""


def announce_commit(rpc: SiteRpc, hello: Message) -> None:
    """Tell online sites of the last committed round, whose secrets they can then erase."""
    requests: dict[str, MessageFactory] = {
        name: lambda: (hello, None) for name in rpc.present_sites()
    }
    # The run is complete: a link that is gone by now must not make it fail.
    with suppress(FedplanError):
        for _ in rpc.call(HELLO, requests, lambda: True, timeout=rpc.timeouts.reconnect):
            pass


class SecAggTransport:
    """A secure sum of updates, layer scores or score counts, with the sites that `rpc` reaches.

    `total` receives the result. `requests`: those that start an attempt, by client; each attempt
    changes them. Clients in `late` have trained, but are not summed. While `begin_attempt` returns
    True, send `requests`, and give the key adverts in the replies to `run_attempt`. `dropouts`: by
    client, why it is not in the sum.
    """

    def __init__(
        self,
        rpc: SiteRpc,
        total: SecureSum,
        requests: dict[str, Request],
        file: Path,
        *,
        late: Collection[str] = (),
    ) -> None:
        self.rpc, self.total, self.requests, self._late = rpc, total, requests, set(late)
        self._turn_digest = ""

        def make_terms(attempt: int) -> Terms:
            return self.total.terms(self._turn_digest, attempt)

        self._drive = SecureRound(self.total.round_number, make_terms, self._ask, file)

    def begin_attempt(self) -> bool:
        """Write an attempt's checkpoint and requests; False if the sum is done or none is left."""
        if not self._drive.begin_attempt():
            return False
        for name, request in self.requests.items():
            self.requests[name] = replace(
                request, base_digests=self.total.base_digests, attempt=self._drive.attempt
            )
            self._turn_digest = turn_digest(request.turn)
        return True

    def run_attempt(self, adverts: Mapping[str, Any]) -> None:
        """Run the protocol with the sites' key adverts (JSON by name), and set sum or failure."""
        drive, total = self._drive, self.total
        on_time = {name: fields for name, fields in adverts.items() if name not in self._late}
        drive.run_attempt(on_time, {name: site.key for name, site in self.rpc.sites.items()})
        total.unmasked, total.failure = drive.unmasked, drive.failure
        total.discarded = drive.discarded
        if drive.unmasked is None:
            log.warning("round %d: %s", total.round_number, drive.failure)
            total.faults = drive.earlier_faults | drive.dropouts
        else:
            total.sites = drive.survivors
            # The reasons of clients that are not in the sum are among the round's rejections.
            present = {n: why for n, why in drive.dropouts.items() if n in drive.survivors}
            total.faults = drive.earlier_faults | present
        for name, reason in total.faults.items():
            log.warning("round %d, %s: %s", total.round_number, name, reason)

    @property
    def dropouts(self) -> dict[str, str]:
        """By client, why it dropped out of the last attempt, or what it did wrong."""
        return self._drive.dropouts

    def _ask(self, step: str, messages: Mapping[str, Message]) -> Iterator[tuple[str, Message]]:
        """Send the messages of a step, and yield the replies; other sites drop out."""
        requests: dict[str, MessageFactory] = {
            name: (lambda message=message: (message, None)) for name, message in messages.items()
        }
        without_reply, dropouts = set(requests), self.dropouts
        for name, reply in self.rpc.call(f"query.{step}", requests, lambda: True):
            without_reply.discard(name)
            if isinstance(reply, str):
                dropouts.setdefault(name, reply.splitlines()[0])
                continue
            try:
                reason = refusal_text(unpack_message(Message(reply.header))[1])
            except FedplanError:
                reason = "its reply cannot be read"
            if reason:
                log.warning("%s at %s: %s", name, step, reason)
                dropouts.setdefault(name, f"{step}: {reason}")
            else:
                yield name, reply
            del reply
        for name in without_reply:
            dropouts.setdefault(name, f"no answer at {step}")


def collect_secagg(
    rpc: SiteRpc,
    server: Server,
    round_state: RoundState,
    collect_adverts: Callable[[], Mapping[str, Any]],
    late: Collection[str],
) -> None:
    """Sum the updates of an open round; a failed sum is tried again with new key adverts.

    `collect_adverts` lets the clients train, and returns their key adverts. Clients that are not in
    the sum are rejected. The record of each counts the bytes of the masked inputs that arrived.
    """
    total = cast("SecureAggregator", round_state.aggregator).secure_sum
    file = server.folder / ROUND_CHECKPOINT
    secagg = SecAggTransport(rpc, total, round_state.cohort, file, late=late)
    while secagg.begin_attempt():
        secagg.run_attempt(collect_adverts())
    for name in round_state.responded:
        if total.unmasked is None:
            round_state.rejected.setdefault(name, f"not summed: {total.failure}"[:300])
        elif name in total.sites:
            round_state.aggregated.append(name)
            round_state.rejected.pop(name, None)
        else:
            reason = "late" if name in late else secagg.dropouts.get(name, GONE)
            round_state.rejected.setdefault(name, reason)
        inputs = (name in total.sites) + total.discarded.get(name, 0)
        record = round_state.records[name]
        round_state.records[name] = replace(record, upload_bytes=inputs * record.upload_bytes)


def open_layer_scoring(rpc: SiteRpc, server: Server, round_state: RoundState) -> SecAggTransport:
    """Return the secure sum of layer scores before an open round."""
    total = cast("SecureAggregator", round_state.aggregator).secure_sum
    total = replace(total, slots=scoring_slots(server.agreement))
    return SecAggTransport(rpc, total, round_state.cohort, server.folder / SCORING_CHECKPOINT)
