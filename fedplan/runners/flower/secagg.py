# SPDX-License-Identifier: Apache-2.0
"""Secure aggregation of a round over Flower's grid: four message steps after the training turns.

A site without a reply at a step has dropped out. A sum that cannot be unmasked is tried once more;
then the round changes nothing, and its record says why.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

from fedplan.errors import FedplanError
from fedplan.federation import secagg_config
from fedplan.federation.aggregation.secure import SecureAggregator, SecureSum
from fedplan.federation.messages import turn_digest
from fedplan.federation.rounds import RoundState
from fedplan.federation.secagg_checkpoint import (
    ROUND_CHECKPOINT,
    SCORING_CHECKPOINT,
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
from fedplan.privacy.secagg.server import ProtocolServer
from fedplan.runners.flower.records import refusal_text
from fedplan.runners.flower.rpc import MessageFactory, SiteRpc
from fedplan.storage.files import failpoint
from fedplan.tensors.message import Message
from fedplan.tensors.serialization import JSON, SerializationError, unpack_message

log = logging.getLogger("fedplan")
ATTEMPTS = 2
"""Attempts at a round's sum per process: a slow site may reply the second time."""
GONE = "dropped out before its masked input arrived"
"""Rejection of a client that trained, but sent no masked input."""


class SecAggRound:
    """The secure sum of an open round, in attempts that a checkpoint file makes resumable.

    `rpc` reaches the sites, `server` is the run's server, with the checkpoint in its folder.
    `total` receives the result: the aggregator of `round_state`, or with `poll` the sum of layer
    scores. Clients in `late` have trained, but are not summed.

    While `begin_attempt` returns True, send the requests in `round_state`, and give the key adverts
    in the replies to `run_attempt`. If the sum fails, `total.failure` is set, and `begin_attempt`
    returns True again while attempts are left. After the loop call `record_result`, also without a
    sum, but not with `poll`.
    """

    def __init__(
        self,
        rpc: SiteRpc,
        server: Server,
        round_state: RoundState,
        *,
        late: Collection[str] = (),
        poll: SecureSum | None = None,
    ) -> None:
        self.rpc, self.round_state, self._late = rpc, round_state, set(late)
        self.total = poll or _round_sum(round_state)
        self._run = server.agreement.run
        self._file = server.folder / (ROUND_CHECKPOINT if poll is None else SCORING_CHECKPOINT)
        self._checkpoint = read_secagg_checkpoint(self._file, self.total.round_number)
        self._attempts_left = ATTEMPTS
        self._base_digests, self._turn_digest = self.total.base_digests, ""
        self._dropouts = dict[str, str]()

    def begin_attempt(self) -> bool:
        """Start an attempt: write the checkpoint, and put the attempt into the round's requests.

        Returns False, and changes nothing, if the sum is done or no attempt is left.
        """
        if self.total.unmasked is not None or not self._attempts_left:
            return False
        self._attempts_left -= 1
        self._save()
        for name, request in self.round_state.cohort.items():
            self.round_state.cohort[name] = replace(
                request, base_digests=self._base_digests, attempt=self._checkpoint.attempt
            )
            self._turn_digest = turn_digest(request.turn)
        return True

    def run_attempt(self, adverts: Mapping[str, Any]) -> None:
        """Run the four protocol steps with the sites' key adverts (JSON by name), and set the sum.

        Waits for the sites at each step. If too few sites are left or the sums cannot be unmasked,
        `total.failure` is set instead, and the checkpoint moves to the next attempt.
        """
        try:
            server = self._collect_adverts(adverts)
            self._collect_shares(server)
            self._collect_masked_inputs(server)
            survivors = self._checkpoint.survivors
            message = secagg_message(self._run, survivor_list_to_json(server.survivor_list()))
            messages = dict.fromkeys(survivors, message)
            for name, reply in self._call(secagg_config.SIGNATURE_STEP, messages):
                with self._dropout_on_error(name):
                    signature = read_secagg_message(reply, survivor_signature_from_json)
                    server.accept_signature(signature)
            failpoint("secagg.signed")
            message = secagg_message(self._run, signature_list_to_json(server.signature_list()))
            messages = dict.fromkeys(survivors, message)
            for name, reply in self._call(secagg_config.UNMASK_STEP, messages):
                with self._dropout_on_error(name):
                    shares = read_secagg_message(reply, unmask_shares_from_json)
                    server.accept_unmask_shares(shares)
            failpoint("secagg.unmask_shares")
            self.total.unmasked = server.unmask()
            self.total.sites = survivors
        except (SecAggError, SerializationError) as error:
            self.total.failure = str(error)
            log.warning("round %d: %s", self.total.round_number, error)
            self._checkpoint = self._checkpoint.next_attempt()

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
                reason = "late" if name in self._late else self._dropouts.get(name, GONE)
                round_state.rejected.setdefault(name, reason)

    def _save(self, **changes: Any) -> None:
        """Write the checkpoint, with changed fields, to disk."""
        checkpoint = replace(self._checkpoint, **changes)
        self._checkpoint = write_secagg_checkpoint(self._file, checkpoint)

    def _collect_adverts(self, replies: Mapping[str, Any]) -> ProtocolServer:
        """Return the protocol's server with the key adverts, and write them to the checkpoint.

        `replies` are key adverts as JSON by site; late sites are left out. After a restart the
        adverts in the checkpoint are used instead. A site with an invalid advert drops out.
        """
        terms = self.total.terms(self._turn_digest, self._checkpoint.attempt)
        node_keys = {name: site.key for name, site in self.rpc.sites.items()}
        server = ProtocolServer(terms, node_keys)
        on_time = {name: fields for name, fields in replies.items() if name not in self._late}
        adverts = dict[str, KeyAdvert]()
        for name, fields in (self._checkpoint.adverts or on_time).items():
            with self._dropout_on_error(name):
                adverts[name] = key_advert_from_json(fields, terms)
        for name, advert in adverts.items():
            if self._is_sender(name, advert.client):
                with self._dropout_on_error(name):
                    server.accept_advert(advert)
        roster = server.roster()
        accepted = {each.client: key_advert_to_json(each, terms) for each in roster.adverts}
        self._save(adverts=accepted)
        failpoint("secagg.roster")
        self._roster = secagg_message(self._run, key_roster_to_json(roster, terms))
        return server

    def _collect_shares(self, server: ProtocolServer) -> None:
        """Give the protocol's server the encrypted shares of the sites with adverts.

        Takes the shares from the checkpoint after a restart; else asks the sites for shares, and
        writes them to the checkpoint. Raises SecAggError if too few sites are left.
        """
        if self._checkpoint.encrypted_shares:
            for fields in self._checkpoint.encrypted_shares.values():
                server.accept_shares(encrypted_shares_from_json(fields))
            return
        shares_by_site = dict[str, JSON]()
        messages = dict.fromkeys(self._checkpoint.adverts, self._roster)
        for name, reply in self._call(secagg_config.SHARES_STEP, messages):
            with self._dropout_on_error(name):
                shares = read_secagg_message(reply, encrypted_shares_from_json)
                if self._is_sender(name, shares.client):
                    server.accept_shares(shares)
                    shares_by_site[name] = encrypted_shares_to_json(shares)
        server.sharing_clients()
        self._save(encrypted_shares=shares_by_site)
        failpoint("secagg.encrypted_shares")

    def _collect_masked_inputs(self, server: ProtocolServer) -> None:
        """Give the protocol's server the masked inputs of the sites with shares.

        Writes the survivors (sites with a masked input) to the checkpoint. After a restart only the
        survivors in the checkpoint get a request; SecAggError if one of them does not reply again.
        """
        earlier = self._checkpoint.survivors
        names = earlier or tuple(sorted(self._checkpoint.encrypted_shares))
        messages = {
            name: secagg_message(self._run, forwarded_shares_to_json(server.shares_for(name)))
            for name in names
        }
        for name, reply in self._call(secagg_config.MASKED_INPUT_STEP, messages):
            masked_input = None
            with self._dropout_on_error(name):
                masked_input = read_masked_input(reply)
                if self._is_sender(name, masked_input.client):
                    server.add_masked_input(masked_input)
            # Else they would stay in memory while the next reply is fetched.
            del reply, masked_input
        survivors = server.survivor_list().clients
        if earlier and earlier != survivors:
            raise SecAggError("not all survivors of the interrupted attempt responded again")
        self._save(survivors=survivors)
        failpoint("secagg.survivors")

    def _call(self, step: str, messages: Mapping[str, Message]) -> Iterator[tuple[str, Message]]:
        """Send the messages of a protocol step by site, and yield (name, reply) on arrival.

        Sites that refuse, fail or do not reply in time drop out.
        """
        requests: dict[str, MessageFactory] = {
            name: (lambda message=message: (message, None)) for name, message in messages.items()
        }
        without_reply = set(requests)
        for name, reply in self.rpc.call(f"query.{step}", requests, lambda: True):
            without_reply.discard(name)
            if isinstance(reply, str):
                self._dropouts.setdefault(name, reply.splitlines()[0])
                continue
            try:
                reason = refusal_text(unpack_message(Message(reply.header))[1])
            except FedplanError:
                reason = "its reply cannot be read"
            if reason:
                log.warning("%s at %s: %s", name, step, reason)
                self._dropouts.setdefault(name, f"{step}: {reason}")
            else:
                yield name, reply
            del reply
        for name in without_reply:
            self._dropouts.setdefault(name, f"no answer at {step}")

    def _is_sender(self, name: str, claimed: str) -> bool:
        """Return whether the site `name` writes under this name; else the site drops out."""
        if claimed != name:
            self._dropouts.setdefault(name, f"it writes as {claimed[:80]!r}")
        return claimed == name

    @contextmanager
    def _dropout_on_error(self, name: str) -> Generator[None]:
        """Let the site `name` drop out if the body, which reads the site's message, raises."""
        try:
            yield
        except (SecAggError, FedplanError) as error:
            log.warning("%s: %s", name, error)
            self._dropouts.setdefault(name, str(error).splitlines()[0][:300])
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            self._dropouts.setdefault(name, f"its message cannot be read: {str(error)[:80]}")


def make_masked_poll(round_state: RoundState) -> SecureSum:
    """Return the empty secure sum of layer scores for a round, with its threshold of sites."""
    return replace(_round_sum(round_state), scoring=True)


def _round_sum(round_state: RoundState) -> SecureSum:
    return cast("SecureAggregator", round_state.aggregator).secure_sum
