# SPDX-License-Identifier: Apache-2.0
"""Cryptographic primitives of secure aggregation, all from the package `cryptography`.

X25519 for shared secrets, HKDF-SHA256 for keys, AES-256 in counter mode for masks, AES-256-GCM for
shares, and signatures by a client's node key: ECDSA on P-384 or Ed25519. Secrets are shared by
Shamir, How to share a secret, Communications of the ACM, 1979: the secret is the value at zero of a
random polynomial over a prime field, a share its value at a point, and fewer shares than the
threshold reveal nothing.

Shares are committed: a client deals shares of its secrets beside a hash of each share. A holder
compares its shares with the hashes before it relies on them; the server compares each share that a
holder returns, and the secret that the shares give. So a wrong share has one author: the dealer, if
its holder complained in time, else the holder. A hash hides its share, since a share has 256 random
bits for everybody who may not know it.
"""

from __future__ import annotations

import builtins
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fedplan.errors import FedplanError, needs_extra
from fedplan.tensors.ring import Words

with needs_extra("secure aggregation"):
    from cryptography.exceptions import InvalidSignature, InvalidTag
    from cryptography.hazmat.primitives.asymmetric.ec import ECDSA
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey as CurvePrivate
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey as CurvePublic
    from cryptography.hazmat.primitives.asymmetric.ed25519 import (
        Ed25519PrivateKey,
        Ed25519PublicKey,
    )
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    from cryptography.hazmat.primitives.ciphers.algorithms import AES
    from cryptography.hazmat.primitives.ciphers.modes import CTR
    from cryptography.hazmat.primitives.hashes import SHA256, SHA384
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        PublicFormat,
        load_der_public_key,
    )

NodeKey = CurvePrivate | Ed25519PrivateKey
"""Long-term private key of a client, which the others know it by."""
KEY_SIZE = 32
"""Bytes of a key, of a public X25519 key and of a secret."""
CHUNK = 2**15
"""Words of a mask generated at a time, so that they stay in the cache."""
PRIME = 2**256 + 297
"""The smallest prime above 2**256: every secret of 32 bytes is a number of the field."""
SHARE_SIZE = 33
"""Bytes of a share."""
TAG_SIZE = 16
"""Bytes that AES-GCM adds to a plaintext."""
HASH_SIZE = 32
"""Bytes of a commitment."""
_ZEROS = bytes(8 * CHUNK)
_NONCE = bytes(12)
"""A constant nonce of AES-GCM: each key encrypts one message."""


class SecAggError(FedplanError):
    """A client or the server refuses a step of secure aggregation."""

    code = "secagg"


def length_prefixed(*words: str | int | bytes) -> bytes:
    """Concatenate words, each behind its type and length: different lists give different bytes."""
    frames = list[bytes]()
    for word in words:
        content = word if isinstance(word, bytes) else str(word).encode()
        frames += [f"{type(word).__name__} {len(content)}:".encode(), content]
    return b"".join(frames)


def sha256_of(*words: str | int | bytes) -> bytes:
    """SHA-256 of length-prefixed words."""
    return hashlib.sha256(length_prefixed(*words)).digest()


def hkdf(secret: bytes, context: bytes, *words: str | int | bytes) -> bytes:
    """Derive a key of KEY_SIZE bytes by HKDF-SHA256: context is the salt, words are the info."""
    return HKDF(SHA256(), KEY_SIZE, context, length_prefixed(*words)).derive(secret)


def x25519_public_key(secret: bytes) -> bytes:
    """Public X25519 key of a private one."""
    return X25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw()


def x25519_shared_secret(secret: bytes, public: bytes) -> bytes:
    """Secret of one's private and another's public key; a SecAggError if that is invalid."""
    try:
        peer = X25519PublicKey.from_public_bytes(public)
        return X25519PrivateKey.from_private_bytes(secret).exchange(peer)
    except ValueError as error:  # a wrong length, or a point of low order
        raise SecAggError(f"a public key of {len(public)} bytes is invalid") from error


def aes_gcm_encrypt(key: bytes, plaintext: bytes, associated_data: bytes) -> bytes:
    """Encrypt and authenticate a message. One message per key only: the nonce is constant."""
    return AESGCM(key).encrypt(_NONCE, plaintext, associated_data)


def aes_gcm_decrypt(key: bytes, ciphertext: bytes, associated_data: bytes) -> bytes | None:
    """Decrypt a message; None if key, ciphertext or associated data do not match."""
    try:
        return AESGCM(key).decrypt(_NONCE, ciphertext, associated_data)
    except InvalidTag:
        return None


def sign(key: NodeKey, content: bytes) -> bytes:
    """Sign a content by a node key: ECDSA with SHA-384, or Ed25519."""
    if isinstance(key, CurvePrivate):
        return key.sign(content, ECDSA(SHA384()))
    return key.sign(content)


def verify_signature(public: bytes, content: bytes, signature: bytes) -> bool:
    """Whether a signature of `content` is valid under a public node key in DER form.

    False for a key of another type. Raises ValueError for bytes that are no key.
    """
    key = load_der_public_key(public)
    try:
        if isinstance(key, CurvePublic):
            key.verify(signature, content, ECDSA(SHA384()))
        elif isinstance(key, Ed25519PublicKey):
            key.verify(signature, content)
        else:
            return False
    except InvalidSignature:
        return False
    return True


def node_public_key(key: NodeKey) -> bytes:
    """Public key of a node key in DER form, as key directories hold it."""
    return key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


class KeyStream:
    """Pseudorandom stream of a 32-byte key: AES-256 in counter mode. One stream per key only.

    `words` and `bytes` go on where the last call ended.
    """

    def __init__(self, key: bytes) -> None:
        self._cipher = Cipher(AES(key), CTR(bytes(16))).encryptor()
        self._buffer = bytearray(8 * CHUNK)

    def words(self, count: int) -> Iterator[tuple[slice, Words]]:
        """Yield the next words as (slice of the whole, words), valid until the next chunk."""
        for start in range(0, count, CHUNK):
            size = min(CHUNK, count - start)
            self._cipher.update_into(memoryview(_ZEROS)[: 8 * size], memoryview(self._buffer))
            yield slice(start, start + size), np.frombuffer(self._buffer, dtype="<u8", count=size)

    def bytes(self, count: int) -> bytes:
        """The next `count` bytes."""
        return self._cipher.update(builtins.bytes(count))


def split_secret(
    secret: int, coefficients: Sequence[int], points: Iterable[int], *, prime: int = PRIME
) -> list[int]:
    """Shares of a secret: values of a polynomial at some points, modulo `prime`.

    The polynomial is secret + coefficients[0] x + coefficients[1] x**2 + ... Any
    `len(coefficients) + 1` shares at different points, none of them 0, reconstruct the secret.

    >>> split_secret(1234, [166, 94], range(1, 7), prime=1613)
    [1494, 329, 965, 176, 1188, 775]
    """
    shares = list[int]()
    for point in points:
        value = 0
        for coefficient in (*reversed(coefficients), secret):
            value = (value * point + coefficient) % prime
        shares.append(value)
    return shares


def lagrange_weights(points: Sequence[int], *, prime: int = PRIME) -> list[int]:
    """Weights, modulo `prime`, with which shares at these points sum up to the secret.

    >>> weights = lagrange_weights([2, 4, 5], prime=1613)
    >>> sum(w * share for w, share in zip(weights, [329, 176, 1188])) % 1613
    1234
    """
    weights = list[int]()
    for point in points:
        numerator, denominator = 1, 1
        for other in points:
            if other != point:
                numerator = numerator * other % prime
                denominator = denominator * (other - point) % prime
        weights.append(numerator * pow(denominator, -1, prime) % prime)
    return weights


@dataclass(frozen=True)
class Dealing:
    """Shares of one client's secrets, and commitments to them.

    shares: by holder, the share of each secret. share_hashes: by holder, the hash of each share;
    secret_hashes: the hash of each secret.
    """

    shares: Mapping[str, tuple[bytes, ...]]
    share_hashes: Mapping[str, tuple[bytes, ...]]
    secret_hashes: tuple[bytes, ...]


def deal(
    dealer: str,
    secrets: Sequence[bytes],
    holders: Sequence[str],
    *,
    key: bytes,
    context: bytes,
    threshold: int,
) -> Dealing:
    """Split the secrets of a dealer, of 32 bytes each, into Shamir shares with commitments.

    A holder's point is its position, from 1. All coefficients follow from `key`: use it for one
    call only. context: digest of the roster, part of each hash.
    """
    shares = {holder: list[bytes]() for holder in holders}
    for number, secret in enumerate(secrets):
        stream = KeyStream(hkdf(key, context, "coefficients", number))
        # Twice the bits of the field, so that its numbers are practically uniform.
        coefficients = [
            int.from_bytes(stream.bytes(2 * KEY_SIZE)) % PRIME for _ in range(1, threshold)
        ]
        values = split_secret(int.from_bytes(secret), coefficients, range(1, len(holders) + 1))
        for holder, value in zip(holders, values, strict=True):
            shares[holder].append(value.to_bytes(SHARE_SIZE))
    return Dealing(
        {holder: tuple(own) for holder, own in shares.items()},
        {holder: share_hashes(context, dealer, holder, own) for holder, own in shares.items()},
        tuple(secret_hash(context, dealer, number, s) for number, s in enumerate(secrets)),
    )


def share_hash(context: bytes, dealer: str, holder: str, number: int, share: bytes) -> bytes:
    """Commitment to a holder's share of secret `number` of a dealer."""
    return sha256_of("share", context, dealer, holder, number, share)


def share_hashes(
    context: bytes, dealer: str, holder: str, shares: Sequence[bytes]
) -> tuple[bytes, ...]:
    """Commitments to all shares that a holder has of a dealer's secrets."""
    return tuple(share_hash(context, dealer, holder, n, each) for n, each in enumerate(shares))


def secret_hash(context: bytes, dealer: str, number: int, secret: bytes) -> bytes:
    """Commitment to secret `number` of a dealer."""
    return sha256_of("secret", context, dealer, number, secret)


def reconstruct(shares: Mapping[int, bytes]) -> bytes | None:
    """The secret of shares by point, to be compared with its commitment; None if too large."""
    weights = lagrange_weights(list(shares))
    pairs = zip(weights, shares.values(), strict=True)
    secret = sum(weight * int.from_bytes(share) for weight, share in pairs) % PRIME
    return None if secret >> (8 * KEY_SIZE) else secret.to_bytes(KEY_SIZE)
