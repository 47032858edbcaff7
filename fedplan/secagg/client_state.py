# SPDX-License-Identifier: Apache-2.0
"""State of a client in a round, derived from its stored progress: keys, seeds, shares and masks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from fedplan.secagg.crypto import (
    SHARE_SIZE,
    SecAggError,
    aes_gcm_decrypt,
    aes_gcm_encrypt,
    hkdf,
    length_prefixed,
    x25519_public_key,
    x25519_shared_secret,
)
from fedplan.secagg.masks import GroupVector, mask_context, pairwise_mask_keys, self_mask_key
from fedplan.secagg.messages import (
    EncryptedShares,
    KeyAdvert,
    KeyRoster,
    UnmaskShares,
    survivors_digest,
)
from fedplan.secagg.progress import RoundProgress
from fedplan.secagg.sharing import Dealing, deal, share_hashes
from fedplan.secagg.terms import SlotGroup, Terms, group_slots
from fedplan.tensors.ring import Words


@dataclass(frozen=True)
class RoundSecrets:
    """All keys and seeds of a client in a round, derived from one random 32-byte secret.

    terms_digest: digest of the round's terms. Equal fields give equal keys, seeds and shares.
    """

    secret: bytes
    terms_digest: bytes

    def _derive(self, *words: str | int | bytes) -> bytes:
        return hkdf(self.secret, self.terms_digest, *words)

    @cached_property
    def encryption_secret(self) -> bytes:
        """Private X25519 key for encrypting and decrypting shares."""
        return self._derive("encryption")

    @cached_property
    def masking_secret(self) -> bytes:
        """Private X25519 key for pairwise masks."""
        return self._derive("masking")

    def self_mask_seed(self, group: str, roster_digest: bytes) -> bytes:
        """Seed of the client's self mask for a slot group."""
        return self._derive("seed", group, roster_digest)

    def make_advert(self, client: str, slots: tuple[str, ...]) -> KeyAdvert:
        """The client's key advert, without a signature."""
        encryption_key = x25519_public_key(self.encryption_secret)
        masking_key = x25519_public_key(self.masking_secret)
        return KeyAdvert(encryption_key, masking_key, b"", self.terms_digest, client, slots)

    def deal(
        self,
        own: str,
        groups: Sequence[SlotGroup],
        clients: Sequence[str],
        roster_digest: bytes,
        threshold: int,
    ) -> Dealing:
        """Deal shares of the secrets of the client `own`: masking secret, then each group's seed.

        clients: the roster; a client's point is its position, from 1. roster_digest: part of each
        seed. threshold: number of shares that reconstruct a secret.
        """
        seeds = (self.self_mask_seed(group.name, roster_digest) for group in groups)
        secrets, key = (self.masking_secret, *seeds), self._derive("shares", roster_digest)
        return deal(own, secrets, clients, key=key, context=roster_digest, threshold=threshold)

    def encrypt_shares(
        self,
        own: str,
        receiver: KeyAdvert,
        roster_digest: bytes,
        shares: Sequence[bytes],
        hashes: Sequence[bytes],
    ) -> bytes:
        """Encrypt shares of the client `own`, with their hashes, to the client of `receiver`.

        The ciphertext authenticates the hashes: nobody but the client can have changed them.
        """
        key = self._encryption_key(receiver, roster_digest, own, receiver.client)
        data = length_prefixed(own, receiver.client, *hashes)
        return aes_gcm_encrypt(key, b"".join(shares), data)

    def decrypt_shares(
        self,
        own: str,
        sender: KeyAdvert,
        roster_digest: bytes,
        ciphertext: bytes,
        hashes: Sequence[bytes],
    ) -> list[bytes]:
        """Decrypt the shares that a sender encrypted to the client `own`, and check their hashes.

        Raises a SecAggError for a ciphertext of another round, roster or list of hashes, and for
        shares that do not match the hashes, which only the sender can have made.
        """
        key = self._encryption_key(sender, roster_digest, sender.client, own)
        data = length_prefixed(sender.client, own, *hashes)
        content = aes_gcm_decrypt(key, ciphertext, data)
        if content is None:
            raise SecAggError(
                f"the shares of {sender.client} do not decrypt: they are of another round, or were "
                "changed"
            )
        shares = [content[at : at + SHARE_SIZE] for at in range(0, len(content), SHARE_SIZE)]
        if share_hashes(roster_digest, sender.client, own, shares) != tuple(hashes):
            raise SecAggError(
                f"{sender.client} has dealt wrong shares: they do not match its commitments"
            )
        return shares

    def _encryption_key(
        self, other: KeyAdvert, roster_digest: bytes, sender: str, receiver: str
    ) -> bytes:
        shared = x25519_shared_secret(self.encryption_secret, other.encryption_key)
        return hkdf(shared, roster_digest, "shares", sender, receiver)


@dataclass(frozen=True)
class ClientRoundState:
    """Values of client `name` in a round, derived from the client's stored progress.

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

    @cached_property
    def secrets(self) -> RoundSecrets:
        """The client's keys and seeds of the round."""
        return RoundSecrets(self.progress.secret, self.terms.digest)

    @cached_property
    def adverts(self) -> dict[str, KeyAdvert]:
        """Key adverts of the roster, by client."""
        return {advert.client: advert for advert in self.progress.adverts}

    @cached_property
    def roster_digest(self) -> bytes:
        """Digest of the roster."""
        return KeyRoster(self.terms.digest, self.progress.adverts).digest

    @cached_property
    def groups(self) -> tuple[SlotGroup, ...]:
        """Slots grouped by the clients that declared them."""
        slots = {advert.client: advert.slots for advert in self.progress.adverts}
        return group_slots(self.terms, slots)

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
        return survivors_digest(self.context, self.progress.survivors)

    def groups_of(self, client: str) -> list[SlotGroup]:
        """Slot groups that a client declared."""
        return [group for group in self.groups if client in group.clients]

    def revealable_groups(self, clients: Sequence[str]) -> list[SlotGroup]:
        """Slot groups that have at least `min_senders` senders among `clients`."""
        least = self.terms.min_senders
        return [group for group in self.groups if len(group.senders_among(clients)) >= least]

    def senders_by_slot(self, clients: Sequence[str]) -> dict[str, tuple[str, ...]]:
        """For each slot that `clients` could unmask, by name: the senders among `clients`."""
        groups = self.revealable_groups(clients)
        return {slot.name: group.senders_among(clients) for group in groups for slot in group.slots}

    @cached_property
    def dealing(self) -> Dealing:
        """Shares of this client's secrets for all clients of the roster, and their commitments."""
        groups, clients = self.groups_of(self.name), list(self.adverts)
        threshold = self.terms.threshold
        return self.secrets.deal(self.name, groups, clients, self.roster_digest, threshold)

    @cached_property
    def encrypted_shares(self) -> EncryptedShares:
        """Message to the server: this client's shares, each encrypted to its receiver."""
        dealing = self.dealing
        ciphertexts = {
            client: self.secrets.encrypt_shares(
                self.name,
                advert,
                self.roster_digest,
                dealing.shares[client],
                dealing.share_hashes[client],
            )
            for client, advert in self.adverts.items()
            if client != self.name
        }
        commitments = dealing.share_hashes, dealing.secret_hashes
        return EncryptedShares(self.terms.digest, self.name, ciphertexts, *commitments)

    def shares_of(self, client: str) -> Sequence[bytes]:
        """Shares that this client has of the secrets of `client`: masking secret, then each seed.

        Decrypts the forwarded shares; raises a SecAggError if decryption fails, or if they do not
        match the commitments. For this client's own name, returns the shares it keeps.
        """
        if client == self.name:
            return self.dealing.shares[client]
        hashes = self.progress.share_hashes.get(client, ())
        if len(hashes) != len(self.groups_of(client)) + 1:
            raise SecAggError(f"{client} has not committed to each of its secrets")
        return self.secrets.decrypt_shares(
            self.name,
            self.adverts[client],
            self.roster_digest,
            self.progress.ciphertexts[client],
            hashes,
        )

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
        groups = [g for g in self.revealable_groups(self.sharing) if self.name in g.clients]
        count, secret = len(self.sharing), self.secrets.masking_secret
        vectors = {group.name: GroupVector.of(group, numbers, weight, count) for group in groups}
        for group in groups:
            seed = self.secrets.self_mask_seed(group.name, self.roster_digest)
            vectors[group.name].apply_mask(self_mask_key(seed, self.context, group.name, self.name))
        for client in self.sharing:
            common = [g.name for g in groups if client in g.clients and client != self.name]
            if common:
                other = (client, self.adverts[client].masking_key)
                keys = pairwise_mask_keys(secret, self.context, self.name, other, common)
                for name, key in keys.items():
                    vectors[name].apply_mask(key, subtract=self.name > client)
        return {name: vectors.pop(name).to_bytes() for name in list(vectors)}  # frees each at once

    def unmask_shares(self) -> UnmaskShares:
        """Make the message to the server that unmasks the sum of the survivors.

        The message has shares of the self mask seeds of survivors, and of the masking secrets of
        clients that dropped out, both only for slot groups with enough surviving senders, and none
        of clients whose shares to this client were wrong.
        """
        survivors, seeds = self.progress.survivors, dict[str, dict[str, bytes]]()
        usable = [client for client in self.sharing if client not in self.wrong_shares]
        shares = {client: self.shares_of(client) for client in usable}
        dropped = set[str]()
        for group in self.revealable_groups(survivors):
            senders = group.senders_among(survivors)
            seeds[group.name] = {
                client: shares[client][1 + self.groups_of(client).index(group)]
                for client in senders
                if client in shares
            }
            dropped |= set(group.senders_among(usable)) - set(senders)
        keys = {client: shares[client][0] for client in sorted(dropped)}
        return UnmaskShares(self.terms.digest, self.name, seeds, keys)
