# SPDX-License-Identifier: Apache-2.0
"""Secure aggregation of a round over Flower's grid: carries the messages of `SecureRound`.

A sum that cannot be unmasked is tried once more; then the round changes nothing, and its record
says why.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, cast

from fedplan.errors import FedplanError
from fedplan.federation.aggregation.secure import SecureAggregator
from fedplan.federation.messages import turn_digest
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
    """Send the sites that are online a hello with the last committed round, at the end of a run.

    A site then erases its secrets of that round; those of an earlier round it has erased at the
    first request of the next. Waits no longer than for a site to reconnect.
    """
    requests: dict[str, MessageFactory] = {
        name: lambda: (hello, None) for name in rpc.present_sites()
    }
    # The run is complete: a link that is gone by now must not make it fail.
    with suppress(FedplanError):
        for _ in rpc.call(HELLO, requests, lambda: True, timeout=rpc.timeouts.reconnect):
            pass


class SecAggRound:
    """The secure sum of an open round, with the sites that `rpc` reaches.

    `server` is the run's server, with the checkpoint of the sum in its folder. `total` receives the
    result: the sum of the aggregator of `round_state`, or with `scoring` that of layer scores.
    Clients in `late` have trained, but are not summed.

    While `begin_attempt` returns True, send the requests in `round_state`, and give the key adverts
    in the replies to `run_attempt`. If the sum fails, `total.failure` is set, and `begin_attempt`
    returns True again while attempts are left. After the loop call `record_result`, also without a
    sum, but not with `scoring`.
    """

    def __init__(
        self,
        rpc: SiteRpc,
        server: Server,
        round_state: RoundState,
        *,
        late: Collection[str] = (),
        scoring: bool = False,
    ) -> None:
        self.rpc, self.round_state, self._late = rpc, round_state, set(late)
        self.total = cast("SecureAggregator", round_state.aggregator).secure_sum
        if scoring:
            self.total = replace(self.total, scoring=True)
        file = server.folder / (SCORING_CHECKPOINT if scoring else ROUND_CHECKPOINT)
        self._turn_digest = ""

        def make_terms(attempt: int) -> Terms:
            return self.total.terms(self._turn_digest, attempt)

        self._drive = SecureRound(self.total.round_number, make_terms, self._ask, file)

    def begin_attempt(self) -> bool:
        """Start an attempt: write the checkpoint, and put the attempt into the round's requests.

        Returns False, and changes nothing, if the sum is done or no attempt is left.
        """
        if not self._drive.begin_attempt():
            return False
        for name, request in self.round_state.cohort.items():
            self.round_state.cohort[name] = replace(
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

    def record_result(self) -> None:
        """Add the clients in the sum to the round's aggregated clients, after all attempts.

        Other clients that responded are rejected, with the reason of the dropout or failure.
        """
        round_state = self.round_state
        for name in round_state.responded:
            if self.total.unmasked is None:
                round_state.rejected.setdefault(name, f"not summed: {self.total.failure}"[:300])
            elif name in self.total.sites:
                round_state.aggregated.append(name)
                round_state.rejected.pop(name, None)
            else:
                reason = "late" if name in self._late else self._drive.dropouts.get(name, GONE)
                round_state.rejected.setdefault(name, reason)

    def _ask(self, step: str, messages: Mapping[str, Message]) -> Iterator[tuple[str, Message]]:
        """Send the messages of a protocol step by site, and yield (name, reply) on arrival.

        Sites that refuse, fail or do not reply in time drop out.
        """
        requests: dict[str, MessageFactory] = {
            name: (lambda message=message: (message, None)) for name, message in messages.items()
        }
        without_reply, dropouts = set(requests), self._drive.dropouts
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
