# SPDX-License-Identifier: Apache-2.0
"""Messages of a secure aggregation round, in the order of the protocol (Bonawitz et al., 2017).

Each carries the digest of the round's terms. Clients send a key advert, encrypted shares, a masked
input, a signature of the survivor list, and unmask shares. The server answers each but the last.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fedplan.privacy.secagg.crypto import sha256_of


@dataclass(frozen=True)
class KeyAdvert:
    """Client to server: the client's public keys of a round, and the names of the slots to be sent.

    terms_digest: digest of the round's terms, as in all messages.
    encryption_key: public X25519 key for encrypting shares to this client.
    masking_key: public X25519 key for pairwise masks.
    signature: of `body`, by the client's node key, so that the server cannot replace the keys.
    """

    terms_digest: bytes
    client: str
    encryption_key: bytes
    masking_key: bytes
    slots: tuple[str, ...]
    signature: bytes = b""

    @property
    def body(self) -> bytes:
        """Digest of all fields but the signature, to be signed."""
        fields = (self.terms_digest, self.client, self.encryption_key, self.masking_key)
        return sha256_of("advert", *fields, *self.slots)


@dataclass(frozen=True)
class KeyRoster:
    """Server to all clients: the key adverts of the round with these terms, sorted by client."""

    terms_digest: bytes
    adverts: tuple[KeyAdvert, ...]

    @property
    def digest(self) -> bytes:
        """Digest of terms, clients, keys and slots; signatures excluded."""
        return sha256_of("roster", self.terms_digest, *(advert.body for advert in self.adverts))


@dataclass(frozen=True)
class EncryptedShares:
    """Client to server: shares of the client's secrets, encrypted, by receiving client."""

    terms_digest: bytes
    client: str
    ciphertexts: Mapping[str, bytes]


@dataclass(frozen=True)
class ForwardedShares:
    """Server to one client: the ciphertexts of shares encrypted to this client, by sender.

    The senders and the receiver are the clients that mask their input for each other.
    """

    terms_digest: bytes
    ciphertexts: Mapping[str, bytes]


@dataclass(frozen=True)
class MaskedInput:
    """Client to server: the client's masked vector for each slot group, by group name."""

    terms_digest: bytes
    client: str
    vectors: Mapping[str, bytes]


@dataclass(frozen=True)
class SurvivorList:
    """Server to all clients: the clients whose masked input has arrived, sorted."""

    terms_digest: bytes
    clients: tuple[str, ...]


@dataclass(frozen=True)
class SurvivorSignature:
    """Client to server: the client's signature of the survivor list, by its node key."""

    terms_digest: bytes
    client: str
    signature: bytes


@dataclass(frozen=True)
class SignatureList:
    """Server to all survivors: the signatures, which prove that all received the same list."""

    terms_digest: bytes
    signatures: tuple[SurvivorSignature, ...]


@dataclass(frozen=True)
class UnmaskShares:
    """Client to server: the shares that the client has of all clients' secrets, to unmask the sum.

    self_mask_shares: of the self mask seeds of survivors, by group name and client.
    masking_key_shares: of the masking secrets of clients that dropped out, by client.
    No client is in both.
    """

    terms_digest: bytes
    client: str
    self_mask_shares: Mapping[str, Mapping[str, bytes]]
    masking_key_shares: Mapping[str, bytes]


def survivors_digest(context: bytes, survivors: tuple[str, ...]) -> bytes:
    """Digest that a survivor signature signs: the mask context of the round, and the survivors."""
    return sha256_of("survivors", context, *survivors)
