# SPDX-License-Identifier: Apache-2.0
"""Server side of the secure aggregation protocol: collects messages, sums inputs, unmasks once.

Asking for the next message to the clients closes a step: whoever has not answered by then has
dropped out. The memory is that of one sum, for any number of clients.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from fedplan.secagg import crypto, messages
from fedplan.secagg.client import KeyDirectory, require_valid_advert
from fedplan.secagg.crypto import SecAggError
from fedplan.secagg.masks import GroupVector, mask_context, pairwise_mask_keys, self_mask_key
from fedplan.secagg.terms import HEADER, MAX_CLIENT_WEIGHT, SlotGroup, Terms
from fedplan.tensors.ring import Words

ADVERTS, SHARES, INPUTS = "adverts", "shares", "inputs"
"""Steps that close: a message that comes later is refused."""


@dataclass(frozen=True)
class UnmaskedSums:
    """Result of a round, by slot name: sums, the clients that they are of, and their weights.

    withheld: the reason for each slot that is not unmasked; these slots are in no other field.
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
        self._adverts = dict[str, messages.KeyAdvert]()
        self._dealt = dict[str, messages.EncryptedShares]()
        self._complaints = dict[str, set[str]]()
        self._input_signatures = dict[str, bytes]()
        self._unfit = dict[str, str]()
        self._sums = dict[str, GroupVector]()
        self._signatures = dict[str, messages.SurvivorSignature]()
        self._unmask_shares = dict[str, dict[tuple[str, int], bytes]]()

    def accept_advert(self, advert: messages.KeyAdvert) -> None:
        """Step 1: accept the public keys of a client, which no other client has."""
        self._require_open(ADVERTS, advert.client)
        require_valid_advert(self.terms, advert, self._directory)
        others = (each for name, each in self._adverts.items() if name != advert.client)
        taken = {key for each in others for key in (each.encryption_key, each.masking_key)}
        if advert.encryption_key in {advert.masking_key, *taken} or advert.masking_key in taken:
            raise SecAggError(f"{advert.client} advertises a key twice, or that of another client")
        self._adverts[advert.client] = advert

    def roster(self) -> messages.KeyRoster:
        """Close step 1; return all key adverts, for all clients."""
        return self._roster

    def accept_shares(self, shares: messages.EncryptedShares) -> None:
        """Step 2: accept the encrypted shares of a client, for each other client, with hashes."""
        self._require_member(shares.client, self._roster_names, shares.terms_digest)
        self._require_open(SHARES, shares.client)
        if set(shares.ciphertexts) != set(self._roster_names) - {shares.client}:
            raise SecAggError(f"{shares.client} has not sent shares for each other client")
        count = 1 + len(self._groups_of(shares.client))
        if any(
            len(each) != crypto.SHARE_SIZE * count + crypto.TAG_SIZE
            for each in shares.ciphertexts.values()
        ):
            raise SecAggError(f"{shares.client} has not sent {count} shares to each other client")
        rows = [*shares.share_hashes.values(), shares.secret_hashes]
        complete = set(shares.share_hashes) == set(self._roster_names)
        if not complete or any(list(map(len, row)) != [crypto.HASH_SIZE] * count for row in rows):
            raise SecAggError(f"{shares.client} has not committed to each of its shares")
        self._dealt[shares.client] = shares

    @cached_property
    def sharing(self) -> tuple[str, ...]:
        """The clients whose shares have arrived, sorted; reading them closes step 2."""
        self._require_enough(len(self._dealt), "have sent encrypted shares")
        self._closed_steps.add(SHARES)
        return tuple(sorted(self._dealt))

    def shares_for(self, client: str) -> messages.ForwardedShares:
        """Close step 2; return the shares encrypted to one client, by all that shared."""
        self._require_member(client, self.sharing, self.terms.digest)
        senders = (sender for sender in self.sharing if sender != client)
        dealt = {sender: self._dealt[sender] for sender in senders}
        return messages.ForwardedShares(
            self.terms.digest,
            {sender: shares.ciphertexts[client] for sender, shares in dealt.items()},
            {sender: shares.share_hashes[client] for sender, shares in dealt.items()},
        )

    def add_masked_input(self, masked: messages.MaskedInput) -> None:
        """Step 3: add the masked input of a client to the sums.

        Raises a SecAggError, with the sums unchanged, for a second input, a wrong signature, and
        other vectors than the client must send.
        """
        client = masked.client
        self._require_member(client, self.sharing, masked.terms_digest)
        self._require_open(INPUTS, client)
        if client in self._complaints:
            raise SecAggError(f"{client} was added before")
        public_key, body = self._directory[client], messages.input_digest(self._context)
        if not crypto.verify_signature(public_key, body, masked.signature):
            raise SecAggError(f"{client} has not signed its masked input")
        groups = {
            g.name: g
            for g in self.terms.revealable(self._groups, self.sharing)
            if client in g.clients
        }
        if set(masked.vectors) != set(groups):
            raise SecAggError(f"{client} sends other slots than it declared")
        vectors = {
            name: GroupVector.from_bytes(groups[name], content)
            for name, content in masked.vectors.items()
        }
        for name, vector in vectors.items():
            self._sums.setdefault(name, GroupVector.empty(groups[name])).add(vector)
        self._input_signatures[client] = masked.signature
        self._complaints[client] = set(masked.complaints) & set(self.sharing) - {client}

    def accusations(self) -> dict[str, list[str]]:
        """By client, the clients that complain of its shares; clients without any are absent."""
        accusers = dict[str, list[str]]()
        for name, accused in sorted(self._complaints.items()):
            for dealer in sorted(accused):
                accusers.setdefault(dealer, []).append(name)
        return accusers

    def false_dealers(self) -> dict[str, str]:
        """Clients that dealt wrong shares, and why: accused by more than may lie, or by proof."""
        spare = len(self._adverts) - self.terms.threshold
        accused = {
            dealer: f"it dealt wrong shares, say {', '.join(accusers)}"
            for dealer, accusers in self.accusations().items()
            if len(accusers) > spare
        }
        return accused | self._unfit

    def survivor_list(self) -> messages.SurvivorList:
        """Close step 3; return the clients whose input was added.

        Raises a SecAggError if too few of them have right shares of a client: the sum could not be
        unmasked. No secret is revealed by then, so that another attempt is possible.
        """
        for dealer, accusers in self.accusations().items():
            if len(self._survivors) - len(accusers) < self.terms.threshold:
                raise SecAggError(
                    f"{', '.join(accusers)} complain of wrong shares of {dealer}: the attempt fails"
                )
        signatures = {name: self._input_signatures[name] for name in self._survivors}
        return messages.SurvivorList(self.terms.digest, self._survivors, signatures)

    def accept_signature(self, signature: messages.SurvivorSignature) -> None:
        """Step 4: accept a survivor's signature of the survivor list; replaces an earlier one."""
        client = signature.client
        self._require_member(client, self._survivors, signature.terms_digest)
        body = messages.survivors_digest(self._context, self._survivors)
        if not crypto.verify_signature(self._directory[client], body, signature.signature):
            raise SecAggError(f"{client} has signed other survivors")
        self._signatures[client] = signature

    def signature_list(self) -> messages.SignatureList:
        """All signatures so far; raises a SecAggError for fewer than the threshold."""
        self._require_enough(len(self._signatures), "have signed the survivors")
        signatures = tuple(signature for _, signature in sorted(self._signatures.items()))
        return messages.SignatureList(self.terms.digest, signatures)

    def accept_unmask_shares(self, shares: messages.UnmaskShares) -> None:
        """Step 5: accept a survivor's unmask shares.

        Raises a SecAggError if one does not match its commitment, or if one is missing of a client
        that this survivor has not complained of.
        """
        holder = shares.client
        self._require_member(holder, self._survivors, shares.terms_digest)
        revealed = dict[tuple[str, int], bytes]()
        for dealer, number, share in self._numbered_shares(shares):
            digest = crypto.share_hash(self._roster.digest, dealer, holder, number, share)
            if digest != self._dealt[dealer].share_hashes[holder][number]:
                raise SecAggError(f"{holder} has given a wrong share of {dealer}")
            revealed[dealer, number] = share
        accused = self._complaints[holder]
        expected = {secret for secret in self._needed_secrets if secret[0] not in accused}
        if missing := sorted(expected - revealed.keys()):
            raise SecAggError(f"{holder} has given no share of {missing[0][0]}")
        self._unmask_shares[holder] = revealed

    def unmask(self) -> UnmaskedSums:
        """Unmask the sums of all slots with at least `min_senders` surviving senders. Call once.

        Raises a SecAggError for fewer unmask shares than the threshold, for shares of another
        secret than was committed to, and if a group's header shows that an input was wrong.
        """
        self._require_enough(len(self._unmask_shares), "have revealed unmask shares")
        groups, withheld = self.terms.revealable(self._groups, self._survivors), dict[str, str]()
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
                    f"{', '.join(senders)} has sent wrong masked input; the round fails"
                )
            for name, numbers in vector.numbers(group).items():
                sums.numbers[name], sums.senders[name] = numbers, senders
                sums.weights[name] = weight
        return sums

    def _remove_masks(self, groups: Sequence[SlotGroup]) -> None:
        """Subtract survivors' self masks, and their pairwise masks with dropped clients."""
        for group in groups:
            for client in group.senders_among(self._survivors):
                seed = self._reconstruct(client, self._seed_number(client, group))
                key = self_mask_key(seed, self._context, group.name, client)
                self._sums[group.name].apply_mask(key, subtract=True)
        for dropped in (client for client in self.sharing if client not in self._survivors):
            affected = [group for group in groups if dropped in group.clients]
            if not affected:
                continue
            secret = self._reconstruct(dropped, 0)
            if crypto.x25519_public_key(secret) != self._adverts[dropped].masking_key:
                self._unfit[dropped] = "it has dealt shares of another key than it advertised"
                raise SecAggError(f"{dropped} has dealt shares of another key than it advertised")
            for other in self._survivors:
                common = sorted({group.name for group in affected if other in group.clients})
                if common:
                    peer = (other, self._adverts[other].masking_key)
                    keys = pairwise_mask_keys(secret, self._context, dropped, peer, common)
                    # The dropped client's side of the masks, which its own input would have had.
                    for name, key in keys.items():
                        self._sums[name].apply_mask(key, subtract=dropped > other)

    def _reconstruct(self, dealer: str, number: int) -> bytes:
        """Reconstruct a client's secret; SecAggError if its shares are few or do not fit."""
        shares = {
            self._roster_names.index(holder) + 1: revealed[dealer, number]
            for holder, revealed in sorted(self._unmask_shares.items())
            if (dealer, number) in revealed
        }
        self._require_enough(len(shares), f"have right shares of {dealer}")
        used = dict(list(shares.items())[: self.terms.threshold])
        secret, dealt = crypto.reconstruct(used), self._dealt[dealer]
        expected = dealt.secret_hashes[number]
        if (
            not secret
            or crypto.secret_hash(self._roster.digest, dealer, number, secret) != expected
        ):
            self._unfit[dealer] = "it has dealt shares that do not fit together"
            raise SecAggError(f"{dealer} has dealt shares that do not fit together")
        return secret

    def _numbered_shares(self, shares: messages.UnmaskShares) -> Iterator[tuple[str, int, bytes]]:
        """Yield dealer, number of the secret and share; leaves out what is not needed."""
        groups = {group.name: group for group in self._groups}
        for name, seeds in shares.self_mask_shares.items():
            for dealer, share in seeds.items():
                if name in groups and dealer in groups[name].clients:
                    number = self._seed_number(dealer, groups[name])
                    if (dealer, number) in self._needed_secrets:
                        yield dealer, number, share
        for dealer, share in shares.masking_key_shares.items():
            if (dealer, 0) in self._needed_secrets:
                yield dealer, 0, share

    @cached_property
    def _needed_secrets(self) -> set[tuple[str, int]]:
        """The secrets that unmask the sum of the survivors, as client and number of the secret."""
        needed = set[tuple[str, int]]()
        for group in self.terms.revealable(self._groups, self._survivors):
            senders = group.senders_among(self._survivors)
            needed |= {(client, self._seed_number(client, group)) for client in senders}
            dropped = set(group.senders_among(self.sharing)) - set(senders)
            needed |= {(client, 0) for client in dropped}
        return needed

    def _groups_of(self, client: str) -> list[SlotGroup]:
        return [group for group in self._groups if client in group.clients]

    def _seed_number(self, client: str, group: SlotGroup) -> int:
        """Number of a client's seed of a group among its secrets; 0 is its masking secret."""
        return 1 + self._groups_of(client).index(group)

    @cached_property
    def _roster(self) -> messages.KeyRoster:
        self.terms.require_client_count(len(self._adverts))
        self._closed_steps.add(ADVERTS)
        return messages.KeyRoster(
            self.terms.digest, tuple(a for _, a in sorted(self._adverts.items()))
        )

    @cached_property
    def _roster_names(self) -> list[str]:
        return [advert.client for advert in self._roster.adverts]

    @cached_property
    def _groups(self) -> tuple[SlotGroup, ...]:
        return self._roster.groups(self.terms)

    @cached_property
    def _context(self) -> bytes:
        return mask_context(self.terms.digest, self._roster.digest, self.sharing)

    @cached_property
    def _survivors(self) -> tuple[str, ...]:
        self._require_enough(len(self._complaints), "have sent masked input")
        self._closed_steps.add(INPUTS)
        return tuple(sorted(self._complaints))

    def _require_enough(self, clients: int, did: str) -> None:
        """Raise a SecAggError, that says what they `did`, for fewer clients than the threshold."""
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
