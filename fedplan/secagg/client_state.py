# SPDX-License-Identifier: Apache-2.0
"""State of a client in a round, derived from its stored progress: keys, seeds, shares and masks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from fedplan.secagg import crypto, messages
from fedplan.secagg.crypto import SHARE_SIZE, SecAggError
from fedplan.secagg.masks import GroupVector, mask_context, pairwise_mask_keys, self_mask_key
from fedplan.secagg.messages import EncryptedShares, KeyAdvert, KeyRoster, UnmaskShares
from fedplan.secagg.progress import RoundProgress
from fedplan.secagg.terms import SlotGroup, Terms
from fedplan.tensors.ring import Words


@dataclass(frozen=True)
class ClientRoundState:
    """Values of client `name` in a round, derived from the client's stored progress.

    All keys, seeds and shares follow from one random secret: equal progress gives equal ones.
    Changes nothing and stores nothing. The progress must have reached the step that a property
    needs: `groups` and `encrypted_shares` need the roster, `sharing`, `context`, `shares_of` and
    `masked_vectors` the forwarded shares, `survivors_digest` and `unmask_shares` the survivor list.
    """

    name: str
    progress: RoundProgress

    @property
    def terms(self) -> Terms:
        """Terms of the round."""
        return self.progress.terms

    def _derive(self, *words: str | int | bytes) -> bytes:
        return crypto.hkdf(self.progress.secret, self.terms.digest, *words)

    @cached_property
    def encryption_secret(self) -> bytes:
        """Private X25519 key for encrypting and decrypting shares."""
        return self._derive("encryption")

    @cached_property
    def masking_secret(self) -> bytes:
        """Private X25519 key for pairwise masks."""
        return self._derive("masking")

    def self_mask_seed(self, group: SlotGroup) -> bytes:
        """Seed of the client's self mask for a slot group."""
        return self._derive("seed", group.name, self.roster_digest)

    def unsigned_advert(self) -> KeyAdvert:
        """The client's key advert, without a signature."""
        return KeyAdvert(
            crypto.x25519_public_key(self.encryption_secret),
            crypto.x25519_public_key(self.masking_secret),
            b"",
            self.terms.digest,
            self.name,
            self.progress.slots,
        )

    @cached_property
    def adverts(self) -> dict[str, KeyAdvert]:
        """Key adverts of the roster, by client."""
        return {advert.client: advert for advert in self.progress.adverts}

    @cached_property
    def _roster(self) -> KeyRoster:
        return KeyRoster(self.terms.digest, self.progress.adverts)

    @cached_property
    def roster_digest(self) -> bytes:
        """Digest of the roster."""
        return self._roster.digest

    @cached_property
    def groups(self) -> tuple[SlotGroup, ...]:
        """Slots grouped by the clients that declared them."""
        return self._roster.groups(self.terms)

    @cached_property
    def sharing(self) -> tuple[str, ...]:
        """Clients whose encrypted shares were forwarded, and this one, sorted."""
        return tuple(sorted((*self.progress.ciphertexts, self.name)))

    @cached_property
    def context(self) -> bytes:
        """Digest that all mask keys of the round depend on."""
        return mask_context(self.terms.digest, self.roster_digest, self.sharing)

    @property
    def survivors_digest(self) -> bytes:
        """Digest of the survivor list, which survivors sign."""
        return messages.survivors_digest(self.context, self.progress.survivors)

    def groups_of(self, client: str) -> list[SlotGroup]:
        """Slot groups that a client declared."""
        return [group for group in self.groups if client in group.clients]

    def senders_by_slot(self, clients: Sequence[str]) -> dict[str, tuple[str, ...]]:
        """For each slot that `clients` could unmask, by name: the senders among `clients`."""
        groups = self.terms.revealable(self.groups, clients)
        return {slot.name: group.senders_among(clients) for group in groups for slot in group.slots}

    @cached_property
    def dealing(self) -> crypto.Dealing:
        """Shares of the masking secret and of each group's seed, for all clients of the roster."""
        seeds = map(self.self_mask_seed, self.groups_of(self.name))
        return crypto.deal(
            self.name,
            (self.masking_secret, *seeds),
            list(self.adverts),
            key=self._derive("shares", self.roster_digest),
            context=self.roster_digest,
            threshold=self.terms.threshold,
        )

    def _share_key(self, other: KeyAdvert, sender: str, receiver: str) -> bytes:
        """Key of the shares between this client and another, in one direction."""
        shared = crypto.x25519_shared_secret(self.encryption_secret, other.encryption_key)
        return crypto.hkdf(shared, self.roster_digest, "shares", sender, receiver)

    def encrypt_shares(
        self, receiver: str, shares: Sequence[bytes], hashes: Sequence[bytes]
    ) -> bytes:
        """Encrypt shares to a client, and authenticate their hashes: nobody can change them."""
        key = self._share_key(self.adverts[receiver], self.name, receiver)
        data = crypto.length_prefixed(self.name, receiver, *hashes)
        return crypto.aes_gcm_encrypt(key, b"".join(shares), data)

    @cached_property
    def encrypted_shares(self) -> EncryptedShares:
        """Message to the server: this client's shares, each encrypted to its receiver."""
        shares, hashes = self.dealing.shares, self.dealing.share_hashes
        ciphertexts = {
            client: self.encrypt_shares(client, shares[client], hashes[client])
            for client in self.adverts
            if client != self.name
        }
        secret_hashes = self.dealing.secret_hashes
        return EncryptedShares(self.terms.digest, self.name, ciphertexts, hashes, secret_hashes)

    def shares_of(self, client: str) -> Sequence[bytes]:
        """Shares that this client has of the secrets of `client`: masking secret, then each seed.

        Raises a SecAggError for a ciphertext of another round, roster or list of hashes, and for
        shares that do not match their hashes, which only the sender can have made.
        """
        if client == self.name:
            return self.dealing.shares[client]
        hashes = self.progress.share_hashes.get(client, ())
        if len(hashes) != len(self.groups_of(client)) + 1:
            raise SecAggError(f"{client} has not committed to each of its secrets")
        key = self._share_key(self.adverts[client], client, self.name)
        data = crypto.length_prefixed(client, self.name, *hashes)
        content = crypto.aes_gcm_decrypt(key, self.progress.ciphertexts[client], data)
        if content is None:
            raise SecAggError(
                f"the shares of {client} do not decrypt: they are of another round, or were changed"
            )
        shares = [content[at : at + SHARE_SIZE] for at in range(0, len(content), SHARE_SIZE)]
        if crypto.share_hashes(self.roster_digest, client, self.name, shares) != tuple(hashes):
            raise SecAggError(f"{client} has dealt wrong shares: they do not match its commitments")
        return shares

    @cached_property
    def wrong_shares(self) -> dict[str, str]:
        """By client, why its forwarded shares are of no use; clients with right ones are absent."""
        reasons = dict[str, str]()
        for client in self.progress.ciphertexts:
            try:
                self.shares_of(client)
            except SecAggError as error:
                reasons[client] = str(error)
        return reasons

    def masked_vectors(self, numbers: Mapping[str, Words], weight: int) -> dict[str, bytes]:
        """This client's masked input, by name of slot group.

        Has the groups that this client declared and that have at least `min_senders` senders among
        the sharing clients. numbers: the input by slot name; weight: for the header of each vector,
        multiplies nothing. Raises a SecAggError for numbers of a wrong shape or so large that a sum
        could overflow.
        """
        declared = self.groups_of(self.name)
        groups = self.terms.revealable(declared, self.sharing)
        count = len(self.sharing)
        vectors = {group.name: GroupVector.of(group, numbers, weight, count) for group in groups}
        for group in groups:
            seed = self.self_mask_seed(group)
            vectors[group.name].apply_mask(self_mask_key(seed, self.context, group.name, self.name))
        for client in self.sharing:
            common = [g.name for g in groups if client in g.clients and client != self.name]
            if common:
                other = (client, self.adverts[client].masking_key)
                own = self.masking_secret
                keys = pairwise_mask_keys(own, self.context, self.name, other, common)
                for name, key in keys.items():
                    vectors[name].apply_mask(key, subtract=self.name > client)
        return {name: vectors.pop(name).to_bytes() for name in list(vectors)}  # frees each at once

    def unmask_shares(self) -> UnmaskShares:
        """Make the message to the server that unmasks the sum of the survivors.

        It has shares of survivors' seeds and of dropped clients' masking secrets, for groups with
        enough surviving senders, and none of clients whose shares to this client were wrong.
        """
        survivors, seeds = self.progress.survivors, dict[str, dict[str, bytes]]()
        usable = [client for client in self.sharing if client not in self.wrong_shares]
        shares = {client: self.shares_of(client) for client in usable}
        dropped = set[str]()
        for group in self.terms.revealable(self.groups, survivors):
            senders = group.senders_among(survivors)
            seeds[group.name] = {
                client: shares[client][1 + self.groups_of(client).index(group)]
                for client in senders
                if client in shares
            }
            dropped |= set(group.senders_among(usable)) - set(senders)
        keys = {client: shares[client][0] for client in sorted(dropped)}
        return UnmaskShares(self.terms.digest, self.name, seeds, keys)
