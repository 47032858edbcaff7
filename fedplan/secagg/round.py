# SPDX-License-Identifier: Apache-2.0
"""The server's drive through a secure aggregation round: four message steps after the key adverts.

A client without a reply at a step has dropped out. Clients accept one roster, one set of encrypted
shares and one survivor list in an attempt, so a restarted server must send the same again: they are
written to a checkpoint, without secrets, before they are sent.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from fedplan.errors import FedplanError, StoreError
from fedplan.secagg.client import KeyDirectory, ProtocolClient
from fedplan.secagg.config import MASKED_INPUT_STEP, SHARES_STEP, SIGNATURE_STEP, UNMASK_STEP
from fedplan.secagg.crypto import Ed25519PrivateKey, SecAggError, node_public_key
from fedplan.secagg.messages import (
    EncryptedShares,
    KeyAdvert,
    MaskedInput,
    SurvivorSignature,
    UnmaskShares,
    decode,
    encode,
    from_json,
    to_json,
)
from fedplan.secagg.progress import MemoryProgressStore
from fedplan.secagg.server import ProtocolServer, UnmaskedSums
from fedplan.secagg.terms import Terms
from fedplan.storage.files import failpoint, write_atomic
from fedplan.tensors.message import Message
from fedplan.tensors.ring import Words
from fedplan.tensors.serialization import SerializationError

log = logging.getLogger("fedplan")
ROUND_CHECKPOINT, SCORING_CHECKPOINT = "secagg.json", "secagg_scoring.json"
EVALUATION_CHECKPOINT = "secagg_evaluation.json"
"""Files in a run's folder: the open round, the layer scoring before it, and the evaluation after.
"""
ATTEMPTS = 2
"""Attempts at a round's sum per process: a slow client may reply the second time."""

Reply = TypeVar("Reply", EncryptedShares, MaskedInput, SurvivorSignature, UnmaskShares)
Ask = Callable[[str, Mapping[str, Message]], Iterator[tuple[str, Message]]]
"""Sends the messages of a step of SECAGG_STEPS by client, and yields (client, reply) on arrival,
of the clients that reply in time."""


@dataclass(frozen=True)
class SecAggCheckpoint:
    """Messages that the server has sent in one attempt; an empty field is one not yet sent.

    `excluded`: clients that dealt wrong shares in an earlier attempt, with the reason. `discarded`:
    by client, the number of masked inputs of attempts that failed.
    """

    round: int
    attempt: int = 1
    adverts: Mapping[str, Any] = field(default_factory=dict[str, Any])
    encrypted_shares: Mapping[str, Any] = field(default_factory=dict[str, Any])
    survivors: tuple[str, ...] = ()
    excluded: Mapping[str, str] = field(default_factory=dict[str, str])
    discarded: Mapping[str, int] = field(default_factory=dict[str, int])


class SecureRound:
    """The secure sum of a round, in attempts that a checkpoint file makes resumable.

    `make_terms`: returns the terms of an attempt by its number. `ask` reaches the clients. `file`:
    of the checkpoint; None for a simulation, which is not resumed. A checkpoint of another round is
    not used; StoreError if it is damaged.

    While `begin_attempt` returns True, ask the clients for key adverts of `attempt`, and give these
    to `run_attempt`. Then `unmasked` has the sums and `survivors` the clients in the sums; or
    `failure` says why there are none, and `begin_attempt` returns True while attempts are left.
    `dropouts`: by client, why it dropped out of the last attempt, or what it did wrong.
    `earlier_faults`: the same of the attempts before.
    """

    def __init__(
        self,
        round_number: int,
        make_terms: Callable[[int], Terms],
        ask: Ask,
        file: Path | None = None,
    ) -> None:
        self._number, self._make_terms, self._ask, self._file = round_number, make_terms, ask, file
        self._checkpoint = SecAggCheckpoint(round_number)
        if file is not None and file.exists():
            try:
                stored = SecAggCheckpoint(**json.loads(file.read_text(encoding="utf-8")))
            except (OSError, ValueError, TypeError) as error:
                raise StoreError(f"{file} cannot be read: {error}; restore a copy of it") from error
            if stored.round == round_number:
                self._checkpoint = replace(stored, survivors=tuple(stored.survivors))
        self._attempts_left = ATTEMPTS
        self.unmasked: UnmaskedSums | None = None
        self.failure, self.dropouts = "", dict[str, str]()
        self.earlier_faults, self._arrived = dict[str, str](), set[str]()

    @property
    def attempt(self) -> int:
        """Number of the attempt that was begun last, from 1; a restart may continue with it."""
        return self._checkpoint.attempt

    @property
    def survivors(self) -> tuple[str, ...]:
        """Clients whose masked input has arrived in the attempt."""
        return self._checkpoint.survivors

    @property
    def discarded(self) -> dict[str, int]:
        """By client, the number of masked inputs that arrived in attempts that failed."""
        return dict(self._checkpoint.discarded)

    def begin_attempt(self) -> bool:
        """Write the checkpoint of an attempt; False if the sum is done or no attempt is left."""
        if self.unmasked is not None or not self._attempts_left:
            return False
        self._attempts_left -= 1
        self._save()
        return True

    def run_attempt(self, adverts: Mapping[str, Any], directory: KeyDirectory) -> None:
        """Run the four steps with the clients' key adverts (JSON by name), and set the sum.

        If too few clients are left or the sums cannot be unmasked, sets `failure` and goes to the
        next attempt, in which clients that dealt wrong shares take no part.
        """
        excluded = dict(self._checkpoint.excluded)
        self.earlier_faults = self.dropouts | self.earlier_faults
        self.dropouts, self._arrived = dict(excluded), set[str]()
        server = ProtocolServer(self._make_terms(self.attempt), directory)
        try:
            self._collect_adverts(server, adverts)
            self._collect_shares(server)
            self._collect_masked_inputs(server)
            run = server.terms.run
            message = encode(run, server.survivor_list())
            requests = dict.fromkeys(self.survivors, message)
            self._collect(SIGNATURE_STEP, requests, SurvivorSignature, server.accept_signature)
            failpoint("secagg.signed")
            message = encode(run, server.signature_list())
            requests = dict.fromkeys(self.survivors, message)
            self._collect(UNMASK_STEP, requests, UnmaskShares, server.accept_unmask_shares)
            failpoint("secagg.unmask_shares")
            self.unmasked = server.unmask()
        except (SecAggError, SerializationError) as error:
            failures = [self.failure] if self.failure else []
            self.failure = "; then: ".join([*failures, str(error)])
            excluded |= server.false_dealers()
            discarded = dict(Counter(self.discarded) + Counter(self._arrived))
            self._checkpoint = SecAggCheckpoint(
                self._number, self.attempt + 1, excluded=excluded, discarded=discarded
            )
        false_dealers = server.false_dealers()
        for dealer, reason in false_dealers.items():
            self.dropouts.setdefault(dealer, reason)
        for dealer, accusers in server.accusations().items():
            if dealer in false_dealers:
                continue
            # One of both lies, and nobody can tell which.
            self.dropouts.setdefault(dealer, f"wrong shares, say {', '.join(accusers)}")
            for accuser in accusers:
                self.dropouts.setdefault(accuser, f"it complains of the shares of {dealer}")

    def _save(self, **changes: Any) -> None:
        """Write the checkpoint, with changed fields, to disk; call before sending messages."""
        self._checkpoint = replace(self._checkpoint, **changes)
        if self._file is not None:
            fields = asdict(self._checkpoint)
            if not fields["discarded"]:
                del fields["discarded"]
            write_atomic(self._file, json.dumps(fields))

    def _collect_adverts(self, server: ProtocolServer, replies: Mapping[str, Any]) -> None:
        """Give the server the key adverts (after a restart, the stored ones), and store them."""
        terms, excluded = server.terms, self._checkpoint.excluded
        for name, fields in (self._checkpoint.adverts or replies).items():
            if name in excluded:
                continue
            with self._dropout_on_error(name):
                advert = from_json(KeyAdvert, fields, terms)
                _require_sender(name, advert.client)
                server.accept_advert(advert)
        accepted = {each.client: to_json(each, terms) for each in server.roster().adverts}
        self._save(adverts=accepted)
        failpoint("secagg.roster")

    def _collect_shares(self, server: ProtocolServer) -> None:
        """Give the server the encrypted shares (after a restart, the stored), and store them."""
        if self._checkpoint.encrypted_shares:
            for fields in self._checkpoint.encrypted_shares.values():
                server.accept_shares(from_json(EncryptedShares, fields))
            return
        accepted = dict[str, Any]()
        message = encode(server.terms.run, server.roster(), server.terms)
        requests = dict.fromkeys(self._checkpoint.adverts, message)

        def accept(shares: EncryptedShares) -> None:
            server.accept_shares(shares)
            accepted[shares.client] = to_json(shares)

        self._collect(SHARES_STEP, requests, EncryptedShares, accept)
        _ = server.sharing  # closes the step, or fails the attempt
        self._save(encrypted_shares=accepted)
        failpoint("secagg.encrypted_shares")

    def _collect_masked_inputs(self, server: ProtocolServer) -> None:
        """Give the server the masked inputs, and store the survivors.

        After a restart the stored survivors are asked; SecAggError unless all reply again.
        """
        earlier, run = self.survivors, server.terms.run
        names = earlier or tuple(sorted(self._checkpoint.encrypted_shares))
        requests = {name: encode(run, server.shares_for(name)) for name in names}

        def accept(masked: MaskedInput) -> None:
            server.add_masked_input(masked)
            self._arrived.add(masked.client)

        self._collect(MASKED_INPUT_STEP, requests, MaskedInput, accept)
        survivors = server.survivor_list().clients
        if earlier and earlier != survivors:
            raise SecAggError("not all survivors of the interrupted attempt responded again")
        self._save(survivors=survivors)
        failpoint("secagg.survivors")

    def _collect(
        self,
        step: str,
        requests: Mapping[str, Message],
        kind: type[Reply],
        accept: Callable[[Reply], object],
    ) -> None:
        """Give the replies of a step to `accept`; a client whose reply raises drops out."""
        for name, reply in self._ask(step, requests):
            message = None
            with self._dropout_on_error(name):
                message = decode(kind, reply)
                _require_sender(name, message.client)
                accept(message)
            del reply, message  # else they would stay in memory while the next reply is fetched

    @contextmanager
    def _dropout_on_error(self, name: str) -> Generator[None]:
        """Let the client `name` drop out if the body, which reads the client's message, raises."""
        try:
            yield
        except FedplanError as error:
            log.warning("%s: %s", name, error)
            self.dropouts.setdefault(name, str(error).splitlines()[0][:300])
        except (ValueError, TypeError, LookupError) as error:
            self.dropouts.setdefault(name, f"its message cannot be read: {str(error)[:80]}")


def _require_sender(name: str, claimed: str) -> None:
    if claimed != name:
        raise SecAggError(f"it writes as {claimed[:80]!r}")


@dataclass(frozen=True)
class ClientInput:
    """Input of one client: its numbers by slot name, and its weight."""

    numbers: Mapping[str, Words]
    weight: int


def simulate_secagg_round(terms: Terms, inputs: Mapping[str, ClientInput]) -> UnmaskedSums:
    """Run a round in this process with new keys and no dropouts; return the unmasked sums."""
    keys = {name: Ed25519PrivateKey.generate() for name in inputs}
    directory = {name: node_public_key(key) for name, key in keys.items()}
    clients = {
        name: ProtocolClient(name, keys[name], directory, MemoryProgressStore()) for name in inputs
    }

    def ask(step: str, messages: Mapping[str, Message]) -> Iterator[tuple[str, Message]]:
        for name, message in messages.items():
            own = inputs[name].numbers, inputs[name].weight
            yield name, clients[name].answer(step, message, lambda own=own: own)

    drive = SecureRound(terms.round, lambda _: terms, ask)
    adverts = {
        name: to_json(client.advertise_keys(terms, list(inputs[name].numbers)), terms)
        for name, client in clients.items()
    }
    drive.run_attempt(adverts, directory)
    if drive.unmasked is None:
        raise SecAggError(drive.failure)
    return drive.unmasked
