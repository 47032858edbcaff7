# SPDX-License-Identifier: Apache-2.0
"""A client's side of secure aggregation: its own terms, its input, and its protocol messages.

An update leaves the client only under masks. It stays in the client's journal until the round ends,
so a client that is killed between two messages can continue.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch import Tensor

from fedplan.federation.aggregation.distributed_dp import (
    client_change,
    noised_words,
    round_mechanism,
)
from fedplan.federation.aggregation.mean import MeanAggregator
from fedplan.federation.aggregation.secure_input import (
    COUNTS_SLOT,
    SCORES_SLOT,
    SQUARE_PREFIX,
    VALUE_PREFIX,
    client_words,
    counts_slots,
    round_terms,
    score_steps,
    scoring_slots,
)
from fedplan.federation.agreement import Agreement
from fedplan.federation.client import (
    Client,
    client_turn,
    received_digests,
    received_values,
    require_same_start,
)
from fedplan.federation.client_round import BASE, TURN, WEIGHT
from fedplan.federation.ledger.egress import REVEAL_LOG
from fedplan.federation.ledger.records import WHOLE_SUM
from fedplan.federation.messages import Request, RequestRefused, Update, turn_digest
from fedplan.models.params import Block, Params
from fedplan.secagg.client import KeyDirectory, ProtocolClient
from fedplan.secagg.crypto import NodeKey, sha256_of
from fedplan.secagg.messages import read_terms_digest, to_json
from fedplan.secagg.progress import DiskProgressStore, RevealLog, RoundProgress
from fedplan.secagg.terms import Slot, Terms
from fedplan.storage.store import Store
from fedplan.tensors.message import Message
from fedplan.tensors.named import Tensors, number_digest, param_key
from fedplan.tensors.ring import Words, words_from_ints
from fedplan.tensors.serialization import JSON

SumKind = Literal["round", "scoring", "evaluation"]
"""Secure sums of a round: of updates, of layer scores before it, and of score counts after it."""
PROGRESS: dict[SumKind, str] = {
    "round": "secagg",
    "scoring": "secagg_scoring",
    "evaluation": "secagg_evaluation",
}
"""Folders beside a client's journal, with the protocol's progress in the last sum of a kind."""
NUMBERS: dict[SumKind, str] = {"scoring": "layer_scores", "evaluation": "score_counts"}
"""Folders beside a client's journal, with the last numbers of a kind of sum."""


class SecAggClient:
    """A client's side of the secure aggregation of one run, with its state on disk.

    For each round, layer scoring before a round, and evaluation after it, call `advertise_round`,
    `advertise_scoring` or `advertise_evaluation`, and then `answer` for each message of the server.
    A client that is killed continues with the next message. The folders of progress are locked
    while the object exists. All clients of `directory` take part in an evaluation.

    `agreement`: settings that server and clients fixed before round 1. `client`: model, journal and
    privacy account of the client. `node`: the client's private node key. `directory`: public node
    keys of all clients by name, exchanged without the server. `folder`: is created if missing, and
    keeps the protocol's progress. `cohort`: returns the clients of a round by its number; the
    threshold follows from the cohort of round 1, and not from the server. Raises RequestRefused if
    the agreement has distributed DP and the client has no noise guard, StoreError if another
    process has locked the progress, and as `resolve_threshold`.
    """

    def __init__(
        self,
        agreement: Agreement,
        client: Client,
        node: NodeKey,
        directory: KeyDirectory,
        folder: Path,
        *,
        cohort: Callable[[int], Sequence[str]],
    ) -> None:
        self.agreement, self.client, self._directory = agreement, client, dict(directory)
        self.threshold = agreement.secagg.resolve_threshold(len(cohort(1)))
        if agreement.distributed_dp and client.privacy.noise_guard is None:
            raise RequestRefused(
                f"{client.name} cannot add its noise share: give it an account"
            ).with_code("secagg")
        encryption = client.journal.encryption
        account, self._cohort = client.privacy.account, cohort
        reveal_log = RevealLog((account.folder if account is not None else folder) / REVEAL_LOG)
        self._stores = dict[SumKind, DiskProgressStore]()
        self._protocols = dict[SumKind, ProtocolClient]()

        def everyone(_: int) -> Sequence[str]:
            return sorted(directory)

        cohorts = {"round": cohort, "scoring": cohort, "evaluation": everyone}
        for kind, name in PROGRESS.items():
            if kind == "evaluation" and client.eval_set is None:
                continue
            store = self._stores[kind] = DiskProgressStore(folder / name, encryption=encryption)
            self._protocols[kind] = ProtocolClient(
                client.name, node, directory, store, reveal_log, cohort=cohorts[kind]
            )
        self._number_stores = {
            kind: Store(folder / name, keep=1, encryption=encryption)
            for kind, name in NUMBERS.items()
        }

    def advertise_round(self, request: Request, update: Update) -> dict[str, JSON]:
        """Begin the protocol of a round, and return the client's key advert as JSON.

        `update` is the client's update of this round, which must be in the journal. Stores the
        progress. Raises RequestRefused if the journal has no update of the round, or if the request
        names other base values, another phase or other scores than the update was trained with.
        Raises PrivacyError if the budget entry of the last masked input is lost, and SecAggError
        for a round or attempt that is over.
        """
        _, meta = self._journaled_update(request.turn.round)
        require_same_start(self.client, request, meta[BASE])
        if meta[TURN] != turn_digest(request.turn):
            raise RequestRefused(
                f"{self.client.name} trained round {request.turn.round} with another phase or "
                "other scores than the request now gives"
            ).with_code("unexpected-values")
        last, guard = self._stores["round"].read(), self.client.privacy.noise_guard
        if guard is not None and last is not None and last.masked_digest:
            guard.require_charged(self.agreement.request_name(last.terms.round, self.client.name))
        shared = {param_key(name) for name in update.values}
        if self.agreement.distributed_dp:
            shared = {p.key for p in self.agreement.public_params(request.turn)}
        keys = [p.key for p in self.agreement.exchanged if p.key in shared]
        squares = [SQUARE_PREFIX + key for key in keys if key in self.agreement.tracks_drift]
        slots = [WHOLE_SUM, *(VALUE_PREFIX + key for key in keys), *squares]
        terms = self._make_terms(request)
        input_digest = self._input_digest("round", request.turn.round, meta[BASE])
        advert = self._protocols["round"].advertise_keys(terms, slots, input_digest)
        return to_json(advert, terms)

    def advertise_scoring(self, request: Request, scores: Mapping[Block, float]) -> dict[str, JSON]:
        """Begin the protocol of a layer scoring, and return the client's key advert as JSON.

        Stores the progress and the client's scores by block, which `answer` masks later. Raises
        RequestRefused if the request names other base values than the client has, and SecAggError
        for a round or attempt that is over.
        """
        state, _ = self.client.journal.client_state(request.name)
        steps = score_steps(scores)
        texts = [str(steps.get(block, 0)) for block in self.agreement.blocks]
        slots = scoring_slots(self.agreement)
        return self._advertise_numbers("scoring", request, state, slots, {"scores": texts})

    def advertise_evaluation(self, request: Request, counts: Sequence[int]) -> dict[str, JSON]:
        """Begin the protocol of an evaluation, and return the client's key advert as JSON.

        `counts`: the client's score counts, with noise if the agreement promises it. Stores them,
        for `answer` to mask, and the progress. Without noise all sums in the reveal log must be of
        the same clients. Raises as `advertise_scoring`.
        """
        numbers, slots = {"counts": list(counts)}, counts_slots(len(counts))
        return self._advertise_numbers("evaluation", request, {}, slots, numbers)

    def _advertise_numbers(
        self,
        kind: SumKind,
        request: Request,
        state: Tensors,
        slots: tuple[Slot, ...],
        numbers: Mapping[str, Any],
    ) -> dict[str, JSON]:
        """Begin a sum of a kind of `numbers`, and store them; `state`: values in the journal."""
        number, turn = request.turn.round, client_turn(self.client, request)
        base_digests = received_digests(self.agreement, self.client, turn, state)
        require_same_start(self.client, request, base_digests)
        threshold, input_digest = self.threshold, sha256_of("input", kind).hex()
        if kind == "evaluation":
            threshold = self.agreement.secagg.resolve_threshold(len(self._directory))
        # Of score counts without noise all sums in the log count as of one input. Whatever the
        # model, an example counts once, in the row of its label: two sums of other clients would
        # reveal how many examples of each label a client has, and a study may select almost the
        # same examples in many ways.
        if kind != "evaluation" or self.agreement.guarantee is not None:
            input_digest = self._input_digest(kind, number, base_digests)
        terms, names = self._make_terms(request, slots, threshold), [slot.name for slot in slots]
        advert = self._protocols[kind].advertise_keys(terms, names, input_digest)
        # After the advert: a request that the protocol refuses leaves the last numbers as they are.
        self._number_stores[kind].write({}, {"round": number, **numbers}, number=number)
        return to_json(advert, terms)

    def _make_terms(
        self, request: Request, slots: tuple[Slot, ...] = (), threshold: int = 0
    ) -> Terms:
        """Return the protocol terms for a request, with the client's own agreement.

        `slots`: of a sum before or after the round; empty for the round. `threshold`: of that sum;
        0 for that of rounds.
        """
        return round_terms(
            self.agreement,
            request.turn.round,
            threshold or self.threshold,
            request.base_digests,
            turn_digest=turn_digest(request.turn),
            attempt=request.attempt,
            slots=slots,
        )

    def answer(self, step: str, message: Message) -> Message:
        """Return the client's reply to a message of the server in a step of SECAGG_STEPS.

        The digest in `message` decides to which of the sums that were begun last it belongs.
        Stores the progress before the reply is returned; masked input may spend privacy budget.
        Raises SerializationError if the message is invalid, RequestRefused if the stored input is
        missing, and SecAggError if no protocol was begun, if the roster has a client outside the
        cohort, or if the protocol forbids the reply.
        """
        kind = self.sum_kind(message)
        words = self._update_words if kind == "round" else partial(self._number_words, kind)
        return self._protocols[kind].answer(step, message, words)

    def erase_until(self, round_number: int, evaluated: int) -> None:
        """Erase the secrets of rounds and layer scorings up to `round_number`, which is committed.

        Those of evaluations up to the round `evaluated`. Messages of these sums are refused from
        then on.
        """
        for kind, protocol in self._protocols.items():
            protocol.erase_until(evaluated if kind == "evaluation" else round_number)

    def sum_kind(self, message: Message) -> SumKind:
        """Return to which of the sums begun last a message belongs; "round" if to none."""
        digest = read_terms_digest(message)
        for kind, store in self._stores.items():
            progress = store.read()
            if progress is not None and progress.terms.digest == digest:
                return kind
        return "round"

    @property
    def public_key(self) -> bytes:
        """The client's public node key, as the directory has it."""
        return self._directory[self.client.name]

    @property
    def peer_key_digests(self) -> dict[str, str]:
        """SHA-256 of each client's public node key, by name."""
        keys = sorted(self._directory.items())
        return {name: hashlib.sha256(key).hexdigest() for name, key in keys}

    def round_and_sites(self, kind: SumKind) -> tuple[int, tuple[str, ...]]:
        """Return (round number, client names) of the sum of a kind that was begun last.

        The clients are the survivors; before these are known, the clients that sent shares; before
        that, the roster. Raises RequestRefused if no protocol was begun.
        """
        progress = self._progress(kind)
        senders = (*progress.ciphertexts, self.client.name) if progress.ciphertexts else ()
        present = tuple(sorted(senders or {advert.client for advert in progress.adverts}))
        return progress.terms.round, progress.survivors or present

    @property
    def shared_params(self) -> Params:
        """The params that the client sends in the round that it began last."""
        slots = set(self._progress().slots)
        return tuple(p for p in self.agreement.exchanged if VALUE_PREFIX + p.key in slots)

    def _progress(self, kind: SumKind = "round") -> RoundProgress:
        """Return the stored progress of the sum of a kind that was begun last.

        Raises RequestRefused if none was begun.
        """
        progress = self._stores[kind].read()
        if progress is None:
            raise RequestRefused(
                f"{self.client.name} has not begun a secure aggregation"
            ).with_code("secagg")
        return progress

    def _number_words(self, kind: SumKind) -> tuple[dict[str, Words], int]:
        """Return (stored numbers to mask in the sum of a kind that was begun last, weight 1).

        Raises RequestRefused if there are none or of another round.
        """
        number, stored = self._progress(kind).terms.round, self._number_stores[kind].read_newest()
        if stored is None or stored.meta["round"] != number:
            name = NUMBERS[kind].replace("_", " ")
            raise RequestRefused(f"{self.client.name} has no {name} of round {number}").with_code(
                "secagg"
            )
        if kind == "scoring":
            return {SCORES_SLOT: words_from_ints(map(int, stored.meta["scores"]))}, 1
        return {COUNTS_SLOT: np.array(stored.meta["counts"], np.int64).view(np.uint64)}, 1

    def _journaled_update(self, number: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return (encoded values, metadata) of the client's update of round `number`.

        Reads the journal. Raises RequestRefused if the journal has no update of this round.
        """
        client = self.client
        reply = client.journal.reply_for(self.agreement.request_name(number, client.name))
        if reply is None:
            raise RequestRefused(
                f"{client.name} has no update of round {number} any more"
            ).with_code("secagg")
        return reply

    def _base_values(
        self, keys: Iterable[str], number: int, base_digests: Mapping[str, str]
    ) -> dict[str, Tensor]:
        """Return the global values that the input of round `number` is made from, by key.

        Raises RequestRefused if a value has another digest than in `base_digests`.
        """
        base = received_values(self.client, keys)
        for key, value in base.items():
            if self.client.setup.digests.full_digest(value) != base_digests[key]:
                raise RequestRefused(
                    f"{self.client.name} has another {key} than its update of round {number} "
                    "started from"
                ).with_code("secagg")
        return base

    def _input_digest(self, kind: SumKind, number: int, base_digests: Mapping[str, str]) -> str:
        """Return a digest of the numbers that an input of a kind of sum is made from.

        Models that differ in the sign of zeros or in the bits of NaN have one digest: training from
        them gives the same update, so their sums may not be of different clients. Raises as
        `_base_values`.
        """
        values = self._base_values(base_digests, number, base_digests)
        words = (word for key in sorted(values) for word in (key, number_digest(values[key])))
        return sha256_of("input", kind, *words).hex()

    def _update_words(self) -> tuple[dict[str, Words], int]:
        """Return (integers to mask by slot, weight) of the client's update in the current round.

        With a noise guard, the update is clipped and noised, the weight is 1, and the round is
        entered in the client's privacy budget. Raises RequestRefused if the journal has no update
        of the round, or if the client's base values have changed since the update was trained.
        """
        agreement, client, terms = self.agreement, self.client, self._progress().terms
        number, wide = terms.round, agreement.secagg.wide_integers
        coded, meta = self._journaled_update(number)
        base = self._base_values({param_key(name) for name in coded}, number, meta[BASE])
        values = agreement.method.compression.decode(coded, base)
        if (guard := client.privacy.noise_guard) is not None:
            change = client_change(values, base)
            shared = received_values(client, [p.key for p in self.shared_params])
            mechanism = round_mechanism(guard, agreement, shared, len(self._cohort(number)))
            request_name = agreement.request_name(number, client.name)
            share = guard.noisy_share(mechanism, change, number, request_name, terms.digest)
            return noised_words(share, wide=wide), 1
        own = MeanAggregator(agreement, base, 1)
        own.require(values, {}, meta[WEIGHT])
        own.add(client.name, values, {}, meta[WEIGHT])
        return client_words(own, base, wide=wide), meta[WEIGHT]
