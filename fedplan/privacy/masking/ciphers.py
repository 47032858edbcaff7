# SPDX-License-Identifier: Apache-2.0
"""Ciphers: what a masked sum takes from `cryptography`, and nothing of it is our own.

X25519 agrees on secrets, HKDF-SHA256 makes keys of them, AES-256 in counter mode makes masks,
AES-256-GCM closes boxes, and a site's node key signs: ECDSA on P-384 as its keys are made, or
Ed25519.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

from fedplan.errors import FedplanError
from fedplan.privacy.errors import EXTRA, PrivacyError
from fedplan.tensors.modular import Words

try:
    from cryptography.exceptions import InvalidSignature, InvalidTag
    from cryptography.hazmat.primitives.asymmetric.ec import ECDSA
    from cryptography.hazmat.primitives.asymmetric.ec import (
        EllipticCurvePrivateKey as CurvePrivate,
    )
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
except ImportError as error:
    raise PrivacyError(f"masking takes cryptography: pip install '{EXTRA}'") from error

if TYPE_CHECKING:
    from collections.abc import Iterator

NodeKey = CurvePrivate | Ed25519PrivateKey
"""A site's own key, by which the others know it."""
KEY = 32
"""Bytes of a key, of a public key and of a secret."""
CHUNK = 2**15
"""Words of a mask made at a time: both stay in a core's cache."""
_ZEROS = bytes(8 * CHUNK)
_ONCE = bytes(12)
"""The nonce of a box: its key closes that box and no other."""


class MaskingError(FedplanError):
    """What a site or a server refuses in a masked sum, and why."""

    code = "masked"


def framed(*words: str | int | bytes) -> bytes:
    """Words one after the other, each with its type and its length: no two lists look alike."""
    found = list[bytes]()
    for word in words:
        content = word if isinstance(word, bytes) else str(word).encode()
        found += [f"{type(word).__name__} {len(content)}:".encode(), content]
    return b"".join(found)


def digest_of(*words: str | int | bytes) -> bytes:
    """A digest of words."""
    return hashlib.sha256(framed(*words)).digest()


def key_from(secret: bytes, context: bytes, *words: str | int | bytes) -> bytes:
    """A key for what the words say, in a context."""
    return HKDF(SHA256(), KEY, context, framed(*words)).derive(secret)


def public_of(secret: bytes) -> bytes:
    """The public side of a secret of X25519."""
    return X25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw()


def agreed_secret(secret: bytes, public: bytes) -> bytes:
    """What two agree on, each by its own secret and the other's public key."""
    try:
        known = X25519PublicKey.from_public_bytes(public)
        return X25519PrivateKey.from_private_bytes(secret).exchange(known)
    except ValueError as error:  # of the wrong length, or a point that leaves no secret
        raise MaskingError(f"a public key of {len(public)} bytes agrees on nothing") from error


def closed_box(key: bytes, content: bytes, about: bytes) -> bytes:
    """A content that only who has the key can read, or could have written."""
    return AESGCM(key).encrypt(_ONCE, content, about)


def opened_box(key: bytes, box: bytes, about: bytes) -> bytes | None:
    """The content of a box, None if it was not closed so."""
    try:
        return AESGCM(key).decrypt(_ONCE, box, about)
    except InvalidTag:
        return None


def signed(key: NodeKey, content: bytes) -> bytes:
    """A node key's signature."""
    if isinstance(key, CurvePrivate):
        return key.sign(content, ECDSA(SHA384()))
    return key.sign(content)


def is_signed(public: bytes, content: bytes, signature: bytes) -> bool:
    """Whether the node of a public key has signed this."""
    known = load_der_public_key(public)
    try:
        if isinstance(known, CurvePublic):
            known.verify(signature, content, ECDSA(SHA384()))
        elif isinstance(known, Ed25519PublicKey):
            known.verify(signature, content)
        else:
            return False
    except InvalidSignature:
        return False
    return True


def node_public(key: NodeKey) -> bytes:
    """The public side of a node key, as directories have it."""
    return key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


class KeyStream:
    """The words of a mask, from a key that makes no other."""

    def __init__(self, key: bytes) -> None:
        self._cipher = Cipher(AES(key), CTR(bytes(16))).encryptor()
        self._room = bytearray(8 * CHUNK)

    def words(self, count: int) -> Iterator[tuple[slice, Words]]:
        """The next words, chunk by chunk: a chunk is gone when the next is asked for."""
        for start in range(0, count, CHUNK):
            size = min(CHUNK, count - start)
            self._cipher.update_into(memoryview(_ZEROS)[: 8 * size], memoryview(self._room))
            yield slice(start, start + size), np.frombuffer(self._room, dtype="<u8", count=size)

    def bytes(self, count: int) -> bytes:
        """The next bytes, for what is no mask."""
        return self._cipher.update(_ZEROS[:count])
