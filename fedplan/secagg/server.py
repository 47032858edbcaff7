# SPDX-License-Identifier: Apache-2.0
"""Server side of the secure aggregation protocol: collects messages, sums inputs, unmasks once.

Asking for the next message to the clients closes a step: whoever has not answered by then has
dropped out. The memory is that of one sum, for any number of clients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from fedplan.secagg.client import KeyDirectory, require_valid_advert
from fedplan.secagg.crypto import (
    KEY_SIZE,
    PRIME,
    SecAggError,
    lagrange_weights,
    verify_signature,
    x25519_public_key,
)
from fedplan.secagg.masks import (
    GroupVector,
    mask_context,
    pairwise_mask_keys,
    self_mask_key,
)
from fedplan.secagg.messages import (
    EncryptedShares,
    ForwardedShares,
    KeyAdvert,
    KeyRoster,
    MaskedInput,
    SignatureList,
    SurvivorList,
    SurvivorSignature,
    UnmaskShares,
    survivors_digest,
)
from fedplan.secagg.terms import HEADER, MAX_CLIENT_WEIGHT, SlotGroup, Terms, group_slots
from fedplan.tensors.ring import Words

ADVERTS, SHARES, INPUTS = "adverts", "shares", "inputs"
"""Steps that close: a message that comes later is refused."""


@dataclass(frozen=True)
class UnmaskedSums:
    """Result of a round; all fields are by slot name.

    numbers: the sums; senders: the clients that a sum is of; weights: total weight of the senders.
    withheld: the reason for each slot that is not unmasked; these slots are in no other field.
    Slots that no client declared are in no field.
    """

    numbers: dict[str, Words]
    senders: dict[str, tuple[str, ...]]
    weights: dict[str, int]
    withheld: dict[str, str] = field(default_factory=dict[str, str])


class ProtocolServer:
    """The server's side of one secure aggregation round, in memory.

    terms: of the round; directory: the public node keys of all clients, by name.
    Call in turn: accept_advert for each client, roster; accept_shares, shares_for;
    add_masked_input, survivor_list; accept_signature, signature_list; accept_unmask_shares, unmask.
    Reading the roster, the forwarded shares or the survivor list closes the step before: a client
    that has not sent its message by then has dropped out. Methods raise a SecAggError for invalid
    or late messages, and for fewer clients than the threshold.
    """

    def __init__(self, terms: Terms, directory: KeyDirectory) -> None:
        self.terms, self._directory = terms, directory
        self._closed_steps = set[str]()
        self._adverts = dict[str, KeyAdvert]()
        self._ciphertexts = dict[str, Mapping[str, bytes]]()
        self._input_senders = set[str]()
        self._sums = dict[str, GroupVector]()
        self._signatures = dict[str, SurvivorSignature]()
        self._unmask_shares = dict[str, UnmaskShares]()

    def accept_advert(self, advert: KeyAdvert) -> None:
        """Step 1: accept the public keys of a client."""
        self._require_open(ADVERTS, advert.client)
        require_valid_advert(self.terms, advert, self._directory)
        self._adverts[advert.client] = advert

    def roster(self) -> KeyRoster:
        """Close step 1; return all key adverts, for all clients."""
        return self._roster

    def accept_shares(self, shares: EncryptedShares) -> None:
        """Step 2: accept the encrypted shares of a client, one for each other client."""
        self._require_member(shares.client, self._roster_names, shares.terms_digest)
        self._require_open(SHARES, shares.client)
        if set(shares.ciphertexts) != set(self._roster_names) - {shares.client}:
            raise SecAggError(f"{shares.client} has not sent shares for each other client")
        self._ciphertexts[shares.client] = dict(shares.ciphertexts)

    def sharing_clients(self) -> tuple[str, ...]:
        """Close step 2; return the clients whose shares have arrived, sorted."""
        return self._sharing

    def shares_for(self, client: str) -> ForwardedShares:
        """Close step 2; return the shares encrypted to one client, by all that shared."""
        self._require_member(client, self._sharing, self.terms.digest)
        senders = (sender for sender in self._sharing if sender != client)
        ciphertexts = {sender: self._ciphertexts[sender][client] for sender in senders}
        return ForwardedShares(self.terms.digest, ciphertexts)

    def add_masked_input(self, masked: MaskedInput) -> None:
        """Step 3: add the masked input of a client to the sums.

        Raises a SecAggError, with the sums unchanged, for a second input of the client, for a
        vector of a wrong size, and for other slot groups than those that the client declared and
        that have at least `min_senders` senders.
        """
        client = masked.client
        self._require_member(client, self._sharing, masked.terms_digest)
        self._require_open(INPUTS, client)
        if client in self._input_senders:
            raise SecAggError(f"{client} was added before")
        groups = {g.name: g for g in self._revealable_groups(self._sharing) if client in g.clients}
        if set(masked.vectors) != set(groups):
            raise SecAggError(f"{client} sends other slots than it declared")
        vectors = {
            name: GroupVector.from_bytes(groups[name], content)
            for name, content in masked.vectors.items()
        }
        for name, vector in vectors.items():
            self._sums.setdefault(name, GroupVector.empty(groups[name])).add(vector)
        self._input_senders.add(client)

    def survivor_list(self) -> SurvivorList:
        """Close step 3; return the clients whose input was added."""
        return SurvivorList(self.terms.digest, self._survivors)

    def accept_signature(self, signature: SurvivorSignature) -> None:
        """Step 4: accept a survivor's signature of the survivor list; replaces an earlier one.

        Raises a SecAggError for an invalid signature, and for a client that is no survivor.
        """
        client = signature.client
        self._require_member(client, self._survivors, signature.terms_digest)
        body = survivors_digest(self._context, self._survivors)
        if not verify_signature(self._directory[client], body, signature.signature):
            raise SecAggError(f"{client} has signed other survivors")
        self._signatures[client] = signature

    def signature_list(self) -> SignatureList:
        """All signatures so far; raises a SecAggError for fewer than the threshold."""
        self._require_enough(len(self._signatures), "have signed the survivors")
        signatures = tuple(signature for _, signature in sorted(self._signatures.items()))
        return SignatureList(self.terms.digest, signatures)

    def accept_unmask_shares(self, shares: UnmaskShares) -> None:
        """Step 5: accept a survivor's unmask shares; they are checked by `unmask`."""
        self._require_member(shares.client, self._survivors, shares.terms_digest)
        self._unmask_shares[shares.client] = shares

    def unmask(self) -> UnmaskedSums:
        """Unmask the sums of all slots with at least `min_senders` surviving senders.

        Call once: changes the sums. Raises a SecAggError if fewer clients than the threshold have
        sent unmask shares, if shares are missing or wrong, and if a group's header (count of
        clients, sum of weights) is impossible, so that an input or a share was wrong.
        """
        self._require_enough(len(self._unmask_shares), "have revealed unmask shares")
        groups, withheld = self._revealable_groups(self._survivors), dict[str, str]()
        for group in self._groups:
            if group not in groups:
                left = len(group.senders_among(self._survivors))
                # This text is written into the ledger.
                reason = f"{left} of {self.terms.min_senders} senders are left"
                withheld |= {slot.name: reason for slot in group.slots}
        self._remove_masks(groups)
        sums = UnmaskedSums({}, {}, {}, withheld)
        for group in groups:
            vector, senders = self._sums[group.name], group.senders_among(self._survivors)
            count, weight = (int(number) for number in vector.narrow[:HEADER])
            if count != len(senders) or not count <= weight <= count * MAX_CLIENT_WEIGHT:
                raise SecAggError(
                    f"slot group {group.name} cannot be unmasked: one of "
                    f"{', '.join(group.clients)} has sent wrong masked input or wrong shares; the "
                    "round fails"
                )
            for name, numbers in vector.numbers(group).items():
                sums.numbers[name], sums.senders[name] = numbers, senders
                sums.weights[name] = weight
        return sums

    def _remove_masks(self, groups: Sequence[SlotGroup]) -> None:
        """Subtract all masks from the sums of some slot groups, by reconstructed secrets.

        Subtracts the self masks of survivors, and cancels the pairwise masks between survivors and
        clients that dropped out. Raises a SecAggError for missing shares, and for wrong shares of a
        masking secret. Wrong shares of a seed leave a mask, which `unmask` finds in the header.
        """
        used = dict(sorted(self._unmask_shares.items())[: self.terms.threshold])
        weights = lagrange_weights([self._roster_names.index(client) + 1 for client in used])
        for group in groups:
            shares = {
                sender: each.self_mask_shares.get(group.name, {}) for sender, each in used.items()
            }
            for client in group.senders_among(self._survivors):
                seed = _reconstruct(weights, shares, client)
                key = self_mask_key(seed, self._context, group.name, client)
                self._sums[group.name].apply_mask(key, subtract=True)
        key_shares = {sender: u.masking_key_shares for sender, u in used.items()}
        for dropped in (client for client in self._sharing if client not in self._survivors):
            affected = [group for group in groups if dropped in group.clients]
            if not affected:
                continue
            secret = _reconstruct(weights, key_shares, dropped)
            if x25519_public_key(secret) != self._adverts[dropped].masking_key:
                raise SecAggError(f"the shares of the key of {dropped} do not match it")
            for other in self._survivors:
                common = sorted({group.name for group in affected if other in group.clients})
                if common:
                    peer = (other, self._adverts[other].masking_key)
                    keys = pairwise_mask_keys(secret, self._context, dropped, peer, common)
                    # The dropped client's side of the masks, which its own input would have had.
                    for name, key in keys.items():
                        self._sums[name].apply_mask(key, subtract=dropped > other)

    @cached_property
    def _roster(self) -> KeyRoster:
        self.terms.require_client_count(len(self._adverts))
        self._closed_steps.add(ADVERTS)
        return KeyRoster(self.terms.digest, tuple(a for _, a in sorted(self._adverts.items())))

    @cached_property
    def _roster_names(self) -> list[str]:
        return [advert.client for advert in self._roster.adverts]

    @cached_property
    def _groups(self) -> tuple[SlotGroup, ...]:
        slots = {advert.client: advert.slots for advert in self._roster.adverts}
        return group_slots(self.terms, slots)

    @cached_property
    def _sharing(self) -> tuple[str, ...]:
        self._require_enough(len(self._ciphertexts), "have sent encrypted shares")
        self._closed_steps.add(SHARES)
        return tuple(sorted(self._ciphertexts))

    @cached_property
    def _context(self) -> bytes:
        return mask_context(self.terms.digest, self._roster.digest, self._sharing)

    @cached_property
    def _survivors(self) -> tuple[str, ...]:
        self._require_enough(len(self._input_senders), "have sent masked input")
        self._closed_steps.add(INPUTS)
        return tuple(sorted(self._input_senders))

    def _revealable_groups(self, clients: Sequence[str]) -> list[SlotGroup]:
        least = self.terms.min_senders
        return [group for group in self._groups if len(group.senders_among(clients)) >= least]

    def _require_enough(self, clients: int, did: str) -> None:
        """Raise a SecAggError for fewer clients than the threshold.

        did: what these clients have done, as a part of the error's text ("have sent ...").
        """
        if clients < self.terms.threshold:
            # This text is written into the ledger.
            raise SecAggError(
                f"{clients} clients {did}, and the threshold is {self.terms.threshold}: the "
                "attempt fails"
            )

    def _require_member(self, client: str, members: Sequence[str], terms_digest: bytes) -> None:
        if client not in members or terms_digest != self.terms.digest:
            raise SecAggError(f"{client!r} is not, or no longer, in this round")

    def _require_open(self, step: str, client: str) -> None:
        if step in self._closed_steps:
            raise SecAggError(f"{client!r} comes too late: the others have gone on")


def _reconstruct(
    weights: Sequence[int], revealed: Mapping[str, Mapping[str, bytes]], client: str
) -> bytes:
    """Reconstruct a secret of a client from the shares that some senders revealed.

    weights: Lagrange weights of the senders; revealed: by sender, the shares by client. Raises a
    SecAggError if a sender has no share of the client, or if the result has more than 32 bytes.
    Wrong shares usually raise nothing, and give a wrong secret.
    """
    secret = 0
    for weight, (sender, shares) in zip(weights, revealed.items(), strict=True):
        if client not in shares:
            raise SecAggError(f"{sender} has given no share of {client}")
        secret += weight * int.from_bytes(shares[client])
    secret %= PRIME
    if secret >> (8 * KEY_SIZE):
        raise SecAggError(f"the shares of {client} do not match each other")
    return secret.to_bytes(KEY_SIZE)
