# SPDX-License-Identifier: Apache-2.0
"""Committed Shamir shares: a client deals shares of its secrets beside a hash of each share.

A holder compares its shares with the hashes before it relies on them; the server compares each
share that a holder returns, and the secret that the shares give. So a wrong share has one author:
the dealer, if its holder complained in time, else the holder. A hash hides its share, since a share
has 256 random bits for everybody who may not know it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedplan.secagg.crypto import (
    KEY_SIZE,
    PRIME,
    SHARE_SIZE,
    KeyStream,
    hkdf,
    lagrange_weights,
    sha256_of,
    split_secret,
)

HASH_SIZE = 32
"""Bytes of a commitment."""


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

    holders: a holder's point is its position, from 1. key: secret from which all coefficients
    follow; use one for one call only. context: digest of the roster, part of each hash. threshold:
    number of shares that reconstruct a secret.
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
    """Return the secret of as many shares as the threshold, by point; None if it is too large.

    Wrong shares give a wrong secret: compare it with its commitment.
    """
    weights = lagrange_weights(list(shares))
    pairs = zip(weights, shares.values(), strict=True)
    secret = sum(weight * int.from_bytes(share) for weight, share in pairs) % PRIME
    return None if secret >> (8 * KEY_SIZE) else secret.to_bytes(KEY_SIZE)
