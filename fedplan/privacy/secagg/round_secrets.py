# SPDX-License-Identifier: Apache-2.0
"""Secrets of one client in a round: its keys and seeds, and their encrypted shares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from fedplan.privacy.secagg.crypto import (
    KEY_SIZE,
    KeyStream,
    SecAggError,
    aes_gcm_decrypt,
    aes_gcm_encrypt,
    hkdf,
    length_prefixed,
    x25519_public_key,
    x25519_shared_secret,
)
from fedplan.privacy.secagg.messages import KeyAdvert
from fedplan.privacy.secagg.shamir import PRIME, SHARE_SIZE, split_secret
from fedplan.privacy.secagg.terms import SlotGroup


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
        return KeyAdvert(self.terms_digest, client, encryption_key, masking_key, slots)

    def split(
        self,
        groups: Sequence[SlotGroup],
        clients: Sequence[str],
        roster_digest: bytes,
        threshold: int,
    ) -> dict[str, list[bytes]]:
        """Split the masking secret and each group's self mask seed into Shamir shares.

        clients: the roster; a client's point is its position, from 1. roster_digest: part of each
        seed. threshold: number of shares that reconstruct a secret. Returns, by client, the shares
        for this client: of the masking secret, then of each group's seed.
        """
        shares = {client: list[bytes]() for client in clients}
        seeds = (self.self_mask_seed(group.name, roster_digest) for group in groups)
        for number, secret in enumerate((self.masking_secret, *seeds)):
            stream = KeyStream(self._derive("coefficients", roster_digest, number))
            # Twice the bits of the field, so that its numbers are practically uniform.
            coefficients = [
                int.from_bytes(stream.bytes(2 * KEY_SIZE)) % PRIME for _ in range(1, threshold)
            ]
            points = range(1, len(clients) + 1)
            values = split_secret(int.from_bytes(secret), coefficients, points)
            for client, value in zip(clients, values, strict=True):
                shares[client].append(value.to_bytes(SHARE_SIZE))
        return shares

    def encrypt_shares(
        self, own: str, receiver: KeyAdvert, roster_digest: bytes, shares: Sequence[bytes]
    ) -> bytes:
        """Encrypt shares of the client `own` to the client of the advert `receiver`."""
        key = self._encryption_key(receiver, roster_digest, own, receiver.client)
        return aes_gcm_encrypt(key, b"".join(shares), length_prefixed(own, receiver.client))

    def decrypt_shares(
        self, own: str, sender: KeyAdvert, roster_digest: bytes, ciphertext: bytes, count: int
    ) -> list[bytes]:
        """Decrypt `count` shares that a sender encrypted to the client `own`.

        Raises a SecAggError for a ciphertext of another round or roster, or with another number of
        shares.
        """
        key = self._encryption_key(sender, roster_digest, sender.client, own)
        content = aes_gcm_decrypt(key, ciphertext, length_prefixed(sender.client, own))
        if content is None:
            raise SecAggError(
                f"the shares of {sender.client} do not decrypt: they are of another round, or were "
                "changed"
            )
        if len(content) != SHARE_SIZE * count:
            raise SecAggError(
                f"the shares of {sender.client} have {len(content)} bytes, not {SHARE_SIZE * count}"
            )
        return [content[at : at + SHARE_SIZE] for at in range(0, len(content), SHARE_SIZE)]

    def _encryption_key(
        self, other: KeyAdvert, roster_digest: bytes, sender: str, receiver: str
    ) -> bytes:
        shared = x25519_shared_secret(self.encryption_secret, other.encryption_key)
        return hkdf(shared, roster_digest, "shares", sender, receiver)
