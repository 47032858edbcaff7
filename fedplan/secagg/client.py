# SPDX-License-Identifier: Apache-2.0
"""Client side of the secure aggregation protocol. It trusts no unsigned statement of the server.

Each step is stored before its message is returned. A step may be repeated with the same arguments,
and then returns the same message; with other arguments it is refused.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from fedplan.secagg import config, crypto, messages
from fedplan.secagg.client_state import ClientRoundState
from fedplan.secagg.crypto import NodeKey, SecAggError
from fedplan.secagg.progress import ProgressStore, RevealLog, RoundProgress
from fedplan.secagg.terms import MAX_CLIENT_WEIGHT, Terms
from fedplan.tensors.message import Message
from fedplan.tensors.ring import Words

log = logging.getLogger("fedplan")
KeyDirectory = Mapping[str, bytes]
"""Public node key of every client, in DER form. Not to be taken from the server alone."""


class ProtocolClient:
    """One client of the secure aggregation protocol, over all rounds of a run.

    node: the client's private node key; directory: the public node keys of all clients by name;
    raises a SecAggError if `name` has another key there, or none, or if two clients have one key.
    store: stores the progress of the last round; reveal_log: sums unmasked in all runs, None in
    simulations; cohort: returns the clients of a round by its number, the only ones that a roster
    may have; None allows all of the directory.
    Call the five steps of a round in order, each with the server's last message, and send the
    result; `answer` does so for messages in bytes. A step that is repeated with the same arguments
    returns the same message; only ECDSA signatures differ. Every step raises a SecAggError for an
    invalid message, for a message of another round, and for steps out of order, and the errors of
    `store` and `reveal_log`.
    """

    def __init__(
        self,
        name: str,
        node: NodeKey,
        directory: KeyDirectory,
        store: ProgressStore,
        reveal_log: RevealLog | None = None,
        *,
        cohort: Callable[[int], Collection[str]] | None = None,
    ) -> None:
        if directory.get(name) != crypto.node_public_key(node):
            raise SecAggError(f"the directory has another key of {name} than its node key")
        if len(set(directory.values())) < len(directory):
            raise SecAggError("two clients of the directory have one key: they could be one client")
        self.name, self._node, self._directory = name, node, dict(directory)
        self._store, self._reveal_log, self._cohort = store, reveal_log, cohort

    def answer(
        self, step: str, message: Message, make_input: Callable[[], tuple[Mapping[str, Words], int]]
    ) -> Message:
        """Return the reply to a step's message, in bytes; `make_input` is called to mask it."""
        progress = self._progress(messages.read_terms_digest(message))
        match step:
            case config.SHARES_STEP:
                reply = self.share_secrets(
                    messages.decode(messages.KeyRoster, message, progress.terms)
                )
            case config.MASKED_INPUT_STEP:
                reply = self.mask_input(
                    messages.decode(messages.ForwardedShares, message), *make_input()
                )
            case config.SIGNATURE_STEP:
                reply = self.sign_survivors(messages.decode(messages.SurvivorList, message))
            case _:
                reply = self.reveal_shares(messages.decode(messages.SignatureList, message))
        return messages.encode(progress.terms.run, reply)

    def advertise_keys(
        self, terms: Terms, slots: Sequence[str], input_digest: str = ""
    ) -> messages.KeyAdvert:
        """Step 1: start a round; return the signed public keys and the slots that will be sent.

        terms: computed by the client itself from the server's request, not taken from the server.
        slots: names of the slots to send, all in the terms. input_digest: digest of everything that
        the input depends on, for the reveal log. The terms of the last call may be repeated, with
        the same slots. Raises a SecAggError for other terms that are not of a later round or
        attempt, for another run, and for a round that was unmasked.
        """
        declared = tuple(slot.name for slot in terms.slots if slot.name in set(slots))
        if unknown := set(slots) - set(declared):
            raise SecAggError(f"{min(unknown)!r} is no slot of this round")
        progress = self._store.read()
        if progress is None or progress.terms != terms:
            if progress is not None:
                _require_later(terms, progress)
            progress = RoundProgress(terms, os.urandom(crypto.KEY_SIZE), declared, input_digest)
            self._store.write(progress)
        _require_open(progress)
        if progress.slots != declared:
            raise SecAggError(f"round {terms.round} was started with other slots")
        advert = ClientRoundState(self.name, progress).unsigned_advert()
        return replace(advert, signature=crypto.sign(self._node, advert.body))

    def share_secrets(self, roster: messages.KeyRoster) -> messages.EncryptedShares:
        """Step 2: check and store the roster; return this client's shares for all other clients.

        Raises a SecAggError for a client outside the cohort, a wrong number or order of clients, a
        key that is there twice, invalid or not this client's own, and another roster than before.
        """
        progress = self._progress(roster.terms_digest)
        state = ClientRoundState(self.name, progress)
        if progress.adverts:
            # By digest: a client that signs again may produce another signature.
            _require_same("the roster", roster.digest, state.roster_digest, progress)
        else:
            names = [advert.client for advert in roster.adverts]
            # With outsiders, two groups of clients could each unmask a sum of the round.
            cohort = set(names if self._cohort is None else self._cohort(progress.terms.round))
            if outsiders := sorted(set(names) - cohort):
                raise SecAggError(
                    f"{outsiders[0]!r} is in the roster, and not in the cohort of round "
                    f"{progress.terms.round}"
                )
            if names != sorted(set(names)):
                raise SecAggError("the roster names a client twice, or is not sorted")
            progress.terms.require_client_count(len(names))
            keys = [key for a in roster.adverts for key in (a.encryption_key, a.masking_key)]
            if len(set(keys)) < len(keys):
                raise SecAggError("two clients of the roster have one key")
            own = state.unsigned_advert()
            if not any(advert.body == own.body for advert in roster.adverts):
                raise SecAggError(f"the roster has other keys of {self.name} than its own, or none")
            for advert in roster.adverts:
                require_valid_advert(progress.terms, advert, self._directory)
            progress = replace(progress, adverts=roster.adverts)
            self._store.write(progress)
        return ClientRoundState(self.name, progress).encrypted_shares

    def mask_input(
        self, shares: messages.ForwardedShares, numbers: Mapping[str, Words], weight: int
    ) -> messages.MaskedInput:
        """Step 3: check the other clients' shares; return this client's masked input.

        numbers: the input by slot name, for exactly the declared slots; weight: 1 to 2**27, adds to
        the total weight and does not multiply the numbers. Slot groups with fewer than
        `min_senders` senders are left out. The message complains of clients whose shares are wrong;
        the round goes on, since its sum needs the threshold of shares only. Raises a SecAggError
        for right shares of fewer clients than the threshold, for shares of unknown clients, for
        numbers of a wrong shape or so large that the sum could overflow, and for another input than
        was masked before under these terms.
        """
        progress = self._progress(shares.terms_digest)
        _require_step(progress.adverts, "shares arrived before the roster")
        ciphertexts, hashes = dict(shares.ciphertexts), dict(shares.share_hashes)
        if progress.ciphertexts:
            new, accepted = (ciphertexts, hashes), (progress.ciphertexts, progress.share_hashes)
            _require_same("the set of encrypted shares", new, accepted, progress)
        progress = replace(progress, ciphertexts=ciphertexts, share_hashes=hashes)
        state = ClientRoundState(self.name, progress)
        if unknown := set(ciphertexts) - (state.adverts.keys() - {self.name}):
            raise SecAggError(
                f"shares are of {min(unknown)!r}, which is no other client of the roster"
            )
        state.terms.require_client_count(len(ciphertexts) + 1)
        for reason in state.wrong_shares.values():
            log.warning("%s: %s", self.name, reason)
        if len(state.sharing) - len(state.wrong_shares) < state.terms.threshold:
            raise SecAggError(next(iter(state.wrong_shares.values())))
        if set(numbers) != set(progress.slots):
            raise SecAggError(
                f"numbers of {len(numbers)} slots were given, and {len(progress.slots)} were "
                "declared: give those"
            )
        if not 0 < weight <= MAX_CLIENT_WEIGHT:
            raise SecAggError(f"the weight is {weight}: give a whole number from 1 to 2**27")
        vectors = state.masked_vectors(numbers, weight)
        hasher = hashlib.sha256()
        for name, content in vectors.items():
            hasher.update(name.encode())
            hasher.update(content)
        digest = hasher.hexdigest()
        if progress.masked_digest not in ("", digest):
            raise SecAggError(
                f"round {progress.terms.round} was masked with other numbers: the same masks on "
                "both would reveal their difference; start another attempt"
            )
        if not progress.masked_digest:
            self._store.write(replace(progress, masked_digest=digest))
        complaints = tuple(sorted(state.wrong_shares))
        signature = crypto.sign(self._node, messages.input_digest(state.context))
        return messages.MaskedInput(shares.terms_digest, self.name, vectors, complaints, signature)

    def sign_survivors(self, survivors: messages.SurvivorList) -> messages.SurvivorSignature:
        """Step 4: check and store the survivor list; return this client's signature of the list.

        One list per attempt: another one raises a SecAggError, as does a list without this client,
        with fewer clients than the threshold, with clients that did not share secrets, with a
        client whose input is not signed as masked with the same clients as this one's, or that the
        reveal log does not allow.
        """
        progress = self._progress(survivors.terms_digest)
        _require_step(progress.masked_digest, "survivors were named before the input was masked")
        if progress.survivors:
            _require_same("the survivor list", survivors.clients, progress.survivors, progress)
        else:
            state = ClientRoundState(self.name, progress)
            if list(survivors.clients) != sorted(set(survivors.clients)):
                raise SecAggError("the survivor list names a client twice, or is not sorted")
            if unknown := set(survivors.clients) - set(state.sharing):
                raise SecAggError(
                    f"{min(unknown)!r} cannot have survived: it did not share its secrets"
                )
            if self.name not in survivors.clients:
                raise SecAggError(
                    f"{self.name} is not among the survivors, and has sent its masked input: "
                    "shares of both of its secrets would reveal it"
                )
            if len(survivors.clients) < state.terms.threshold:
                raise SecAggError(
                    f"{len(survivors.clients)} clients have survived, and the threshold is "
                    f"{state.terms.threshold}: nothing is unmasked"
                )
            if not state.terms.revealable(state.groups, survivors.clients):
                raise SecAggError(
                    f"no slot has {state.terms.min_senders} senders left: nothing is unmasked"
                )
            # A client that was given shares of fewer clients has fewer pairwise masks: the secrets
            # of those that the list drops would unmask its input alone.
            for client in survivors.clients:
                signature = survivors.input_signatures.get(client, b"")
                body = messages.input_digest(state.context)
                if not crypto.verify_signature(self._directory[client], body, signature):
                    raise SecAggError(f"the input of {client} is not masked with the same clients")
            if self._reveal_log is not None:
                senders = state.senders_by_slot(survivors.clients)
                self._reveal_log.require_consistent(progress.terms, progress.input_digest, senders)
            progress = replace(progress, survivors=survivors.clients)
            self._store.write(progress)
        body = ClientRoundState(self.name, progress).survivors_digest
        return messages.SurvivorSignature(
            survivors.terms_digest, self.name, crypto.sign(self._node, body)
        )

    def reveal_shares(self, signatures: messages.SignatureList) -> messages.UnmaskShares:
        """Step 5: check the signatures; return the shares that unmask the survivors' sum.

        Writes the sums to the reveal log first. Raises a SecAggError for an invalid signature of
        the survivor list, a signer that is no survivor, and fewer signers than the threshold.
        """
        progress = self._progress(signatures.terms_digest)
        _require_step(progress.survivors, "signatures arrived before the survivor list")
        state, signers = ClientRoundState(self.name, progress), set[str]()
        for signature in signatures.signatures:
            client = signature.client
            if client not in progress.survivors:
                raise SecAggError(f"{client!r} signed, and is not among the survivors")
            public_key = self._directory[client]
            if not crypto.verify_signature(public_key, state.survivors_digest, signature.signature):
                raise SecAggError(f"{client} has not signed these survivors")
            signers.add(client)
        if len(signers) < state.terms.threshold:
            raise SecAggError(
                f"{len(signers)} clients have signed the survivors, and the threshold is "
                f"{state.terms.threshold}: nothing is unmasked"
            )
        if not progress.revealed:
            if self._reveal_log is not None:
                senders = state.senders_by_slot(progress.survivors)
                self._reveal_log.record(progress.terms, progress.input_digest, senders)
            progress = replace(progress, revealed=True)
            self._store.write(progress)
        return ClientRoundState(self.name, progress).unmask_shares()

    def erase_until(self, round_number: int) -> None:
        """Erase the secrets of a round that the server has committed; it is refused then."""
        progress = self._store.read()
        if progress is not None and progress.secret and progress.terms.round <= round_number:
            self._store.write(
                replace(progress, secret=b"", adverts=(), ciphertexts={}, share_hashes={})
            )

    def _progress(self, terms_digest: bytes) -> RoundProgress:
        """The last round's progress; a SecAggError for other terms, or erased secrets."""
        progress = self._store.read()
        if progress is None or progress.terms.digest != terms_digest:
            started = f"it has started round {progress.terms.round}" if progress else "it has none"
            raise SecAggError(f"{self.name} got a message of a round of other terms: {started}")
        _require_open(progress)
        return progress


def require_valid_advert(terms: Terms, advert: messages.KeyAdvert, directory: KeyDirectory) -> None:
    """Raise a SecAggError for a key advert of other terms, slots or keys, or not of its client."""
    client = advert.client
    if client not in directory:
        raise SecAggError(f"{client!r} is not in the directory")
    if advert.terms_digest != terms.digest:
        raise SecAggError(
            f"the keys of {client} are of other terms: of another round or attempt, of another "
            "agreement, or it was sent another model"
        )
    if not crypto.verify_signature(directory[client], advert.body, advert.signature):
        raise SecAggError(f"the keys of {client} are not signed by its node key")
    if set(advert.slots) - {slot.name for slot in terms.slots}:
        raise SecAggError(f"{client} declares slots that this round does not have")
    for key in (advert.encryption_key, advert.masking_key):
        # One form for each key: a second form of another client's key would pass as a new one.
        if int.from_bytes(key, "little") >= 2**255 - 19:
            raise SecAggError(f"a key of {client} is not in its canonical form")
        # Of a point of low order every private key makes the same secret, zero, which raises.
        crypto.x25519_shared_secret(bytes(crypto.KEY_SIZE), key)


def _require_later(terms: Terms, last: RoundProgress) -> None:
    """Raise a SecAggError unless `terms` are of a later round or attempt than `last`."""
    if terms.run != last.terms.run:
        raise SecAggError(f"this store is of run {last.terms.run!r}: use one for each run")
    if terms.round < last.terms.round:
        raise SecAggError(
            f"round {terms.round} is over: this client has started round {last.terms.round}"
        )
    if terms.round > last.terms.round:
        return
    _require_open(last)
    if last.revealed:
        raise SecAggError(
            f"round {terms.round} was unmasked in attempt {last.terms.attempt}: a client reveals a "
            "round once"
        )
    if terms.attempt <= last.terms.attempt:
        raise SecAggError(
            f"round {terms.round} was started under other terms, as attempt "
            f"{last.terms.attempt}: another attempt has a higher number"
        )


def _require_open(progress: RoundProgress) -> None:
    if not progress.secret:
        raise SecAggError(f"round {progress.terms.round} is over: its secrets are erased")


def _require_step(done: object, reason: str) -> None:
    if not done:
        raise SecAggError(reason)


def _require_same(what: str, new: object, accepted: object, progress: RoundProgress) -> None:
    if new != accepted:
        raise SecAggError(
            f"{what} differs from the one this client accepted before in round "
            f"{progress.terms.round}"
        )
