# SPDX-License-Identifier: Apache-2.0
"""Secure aggregation of a round over Flower's grid: four message steps after the training turns.

A site without a reply at a step has dropped out. A sum that cannot be unmasked is tried once more;
then the round changes nothing, and its record says why.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

from flwr.app import ArrayRecord

from fedplan.errors import FedplanError
from fedplan.federation import secagg_config
from fedplan.federation.error_codes import KINDS, describe_code
from fedplan.federation.messages import turn_digest
from fedplan.federation.rounds import RoundState
from fedplan.federation.secagg_aggregator import SecureAggregator, SecureScoring
from fedplan.federation.secagg_checkpoint import (
    POLL_CHECKPOINT,
    ROUND_CHECKPOINT,
    SecAggCheckpoint,
    read_secagg_checkpoint,
    write_secagg_checkpoint,
)
from fedplan.federation.secagg_messages import (
    encrypted_shares_from_json,
    encrypted_shares_to_json,
    forwarded_shares_to_json,
    key_advert_from_json,
    key_advert_to_json,
    key_roster_to_json,
    read_masked_input,
    read_secagg_message,
    secagg_message,
    signature_list_to_json,
    survivor_list_to_json,
    survivor_signature_from_json,
    unmask_shares_from_json,
)
from fedplan.federation.server import Server
from fedplan.privacy.secagg.crypto import SecAggError
from fedplan.privacy.secagg.messages import KeyAdvert
from fedplan.privacy.secagg.server import ProtocolServer, UnmaskedSums
from fedplan.runners.flower.rpc import MessageFactory, SiteRpc
from fedplan.storage.failpoints import failpoint
from fedplan.tensors.message import Message
from fedplan.tensors.serialization import JSON, SerializationError, unpack_message

log = logging.getLogger("fedplan")
ATTEMPTS = 2
"""Attempts at a round's sum per process: a slow site may reply the second time."""
GONE = "gone before the masked sum was closed"
"""Rejection of a client that trained, but sent no masked input."""


class SecAggRound:
    """The secure sum of an open round, with its attempts and its checkpoint on disk.

    `total` is the sum: the round's aggregator, or with `poll` the sum of layer scores. Clients in
    `late` have trained, but are not summed.
    """

    def __init__(
        self,
        rpc: SiteRpc,
        server: Server,
        round_state: RoundState,
        *,
        late: Collection[str] = (),
        poll: SecureScoring | None = None,
    ) -> None:
        self.rpc, self.round_state, self._late = rpc, round_state, set(late)
        self.total = poll or cast("SecureAggregator", round_state.aggregator)
        self._run = server.agreement.run
        self._file = server.folder / (ROUND_CHECKPOINT if poll is None else POLL_CHECKPOINT)
        self._checkpoint = read_secagg_checkpoint(self._file, self.total.round_number)
        self._attempts_left = ATTEMPTS
        self._base_digests, self._turn_digest = self.total.base_digests, ""
        self._dropouts = dict[str, str]()

    def begin_attempt(self) -> bool:
        """Start an attempt: write the checkpoint, and put the attempt into all requests.

        Returns False, and changes nothing, if the sum is done or no attempt is left.
        """
        if self.total.unmasked is not None or not self._attempts_left:
            return False
        self._attempts_left -= 1
        self._save(self._checkpoint)
        for name, request in self.round_state.cohort.items():
            self.round_state.cohort[name] = replace(
                request, base_digests=self._base_digests, attempt=self._checkpoint.attempt
            )
            self._turn_digest = turn_digest(request.turn)
        return True

    def run_attempt(self, adverts: Mapping[str, Any]) -> None:
        """Run the protocol steps with the sites' key adverts (JSON by name), and set the sum.

        If they fail, the reason is set instead, and the checkpoint moves to the next attempt.
        """
        try:
            self.total.unmasked = self._run_protocol(adverts)
            self.total.sites = self._checkpoint.survivors
        except (SecAggError, SerializationError) as error:
            self.total.failure = str(error)
            log.warning("round %d: %s", self.total.round_number, error)
            self._checkpoint = self._checkpoint.next_attempt()

    def record_result(self) -> None:
        """Record the clients in the sum as aggregated, and why the others are rejected."""
        round_state = self.round_state
        for name in round_state.responded:
            if self.total.unmasked is None:
                round_state.rejected.setdefault(name, f"not summed: {self.total.failure}"[:300])
            elif name in self.total.sites:
                round_state.aggregated.append(name)
                round_state.rejected.pop(name, None)
            else:
                reason = "late" if name in self._late else self._dropouts.get(name, GONE)
                round_state.rejected.setdefault(name, reason)

    def _save(self, checkpoint: SecAggCheckpoint) -> None:
        self._checkpoint = write_secagg_checkpoint(self._file, checkpoint)

    def _run_protocol(self, adverts: Mapping[str, Any]) -> UnmaskedSums:
        """Run all steps and return the sums; SecAggError if too few sites are left."""
        server = self._collect_adverts(adverts)
        self._collect_shares(server)
        self._collect_masked_inputs(server)
        survivors = self._checkpoint.survivors
        message = secagg_message(self._run, survivor_list_to_json(server.survivor_list()))
        for name, reply in self._call(
            secagg_config.SIGNATURE_STEP, dict.fromkeys(survivors, message)
        ):
            self._accept(
                name,
                lambda r=reply: server.accept_signature(
                    read_secagg_message(r, survivor_signature_from_json)
                ),
            )
        failpoint("masking.consented")
        message = secagg_message(self._run, signature_list_to_json(server.signature_list()))
        for name, reply in self._call(secagg_config.UNMASK_STEP, dict.fromkeys(survivors, message)):
            self._accept(
                name,
                lambda r=reply: server.accept_unmask_shares(
                    read_secagg_message(r, unmask_shares_from_json)
                ),
            )
        failpoint("masking.answered")
        return server.unmask()

    def _collect_adverts(self, replies: Mapping[str, Any]) -> ProtocolServer:
        """Make the protocol's server with the key adverts, and write them to the checkpoint.

        After a restart the adverts of the checkpoint are used, and not those of the replies.
        """
        terms = self.total.terms(self._turn_digest, self._checkpoint.attempt)
        node_keys = {name: site.key for name, site in self.rpc.sites.items()}
        server = ProtocolServer(terms, node_keys)
        on_time = {name: fields for name, fields in replies.items() if name not in self._late}
        adverts = dict[str, KeyAdvert]()
        for name, fields in (self._checkpoint.adverts or on_time).items():

            def parse(name: str = name, fields: Any = fields) -> None:
                adverts[name] = key_advert_from_json(fields, terms)

            self._accept(name, parse)
        for name, advert in adverts.items():
            if self._is_sender(name, advert.client):
                self._accept(name, lambda a=advert: server.accept_advert(a))
        roster = server.roster()
        accepted = {each.client: key_advert_to_json(each, terms) for each in roster.adverts}
        self._save(replace(self._checkpoint, adverts=accepted))
        failpoint("masking.roster")
        self._roster = secagg_message(self._run, key_roster_to_json(roster, terms))
        return server

    def _collect_shares(self, server: ProtocolServer) -> None:
        """Give the server the sites' encrypted shares: those of the checkpoint, or new ones."""
        if self._checkpoint.boxes:
            for fields in self._checkpoint.boxes.values():
                server.accept_shares(encrypted_shares_from_json(fields))
            return
        shares_by_site = dict[str, JSON]()
        for name, reply in self._call(
            secagg_config.SHARES_STEP, dict.fromkeys(self._checkpoint.adverts, self._roster)
        ):

            def accept(name: str = name, reply: Message = reply) -> None:
                shares = read_secagg_message(reply, encrypted_shares_from_json)
                if self._is_sender(name, shares.client):
                    server.accept_shares(shares)
                    shares_by_site[name] = encrypted_shares_to_json(shares)

            self._accept(name, accept)
        server.sharing_clients()
        self._save(replace(self._checkpoint, boxes=shares_by_site))
        failpoint("masking.boxes")

    def _collect_masked_inputs(self, server: ProtocolServer) -> None:
        """Give the server the sites' masked inputs, and write the survivors to the checkpoint.

        After a restart only the survivors of the checkpoint are asked; SecAggError if not all of
        them reply again.
        """
        earlier = self._checkpoint.survivors
        names = earlier or tuple(sorted(self._checkpoint.boxes))
        messages = {
            name: secagg_message(self._run, forwarded_shares_to_json(server.shares_for(name)))
            for name in names
        }
        for name, reply in self._call(secagg_config.MASKED_INPUT_STEP, messages):

            def accept(name: str = name, reply: Message = reply) -> None:
                masked_input = read_masked_input(reply)
                if self._is_sender(name, masked_input.client):
                    server.add_masked_input(masked_input)

            self._accept(name, accept)
            del reply, accept  # else it would stay in memory while the next one is fetched
        survivors = server.survivor_list().clients
        if earlier and earlier != survivors:
            raise SecAggError("not all are there again whose sum was to be opened")
        self._save(replace(self._checkpoint, survivors=survivors))
        failpoint("masking.survivors")

    def _call(self, step: str, messages: Mapping[str, Message]) -> Iterator[tuple[str, Message]]:
        """Send a step's messages, and yield the replies; sites that refuse or fail drop out."""
        requests = {name: _message_factory(message) for name, message in messages.items()}
        without_reply = set(requests)
        for name, reply in self.rpc.call(f"query.{step}", requests, lambda: True):
            without_reply.discard(name)
            if isinstance(reply, str):
                self._dropouts.setdefault(name, reply.splitlines()[0])
            elif reason := _refusal(reply):
                log.warning("%s at %s: %s", name, step, reason)
                self._dropouts.setdefault(name, f"{step}: {reason}")
            else:
                yield name, reply
            del reply
        for name in without_reply:
            self._dropouts.setdefault(name, f"no answer at {step}")

    def _is_sender(self, name: str, claimed: str) -> bool:
        """Whether the name in a message is that of its sender; else the sender drops out."""
        if claimed != name:
            self._dropouts.setdefault(name, f"it writes as {claimed[:80]!r}")
        return claimed == name

    def _accept(self, name: str, accept: Callable[[], object]) -> None:
        """Call a function that accepts a site's message; if it raises, the site drops out."""
        try:
            accept()
        except (SecAggError, FedplanError) as error:
            log.warning("%s: %s", name, error)
            self._dropouts.setdefault(name, str(error).splitlines()[0][:300])
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            self._dropouts.setdefault(name, f"its letter cannot be read: {str(error)[:80]}")


def make_masked_poll(server: Server, round_state: RoundState) -> SecureScoring:
    """Make the secure sum of layer scores before a round."""
    total = cast("SecureAggregator", round_state.aggregator)
    return SecureScoring(server.agreement, total.base_digests, total.round_number, total.threshold)


def _message_factory(message: Message) -> MessageFactory:
    def make_message() -> tuple[Message, ArrayRecord | None]:
        return message, None

    return make_message


def _refusal(reply: Message) -> str:
    """Return the reason if a reply is a refusal or unreadable, else an empty text."""
    try:
        fields = unpack_message(Message(reply.header))[1]
    except FedplanError:
        return "its answer cannot be read"
    kind = next((kind for kind in KINDS if kind in fields), "")
    return describe_code(kind, str(fields[kind])) if kind else ""
