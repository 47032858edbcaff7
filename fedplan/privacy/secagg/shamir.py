# SPDX-License-Identifier: Apache-2.0
"""Shamir's secret sharing: a threshold of shares gives the secret, fewer reveal nothing.

Shamir, How to share a secret, Communications of the ACM, 1979. The secret is the value at zero of a
random polynomial over a prime field, and a share its value at a point.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

PRIME = 2**256 + 297
"""The smallest prime above 2**256: every secret of 32 bytes is a number of the field."""
SHARE_SIZE = 33
"""Bytes of a share."""


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
    """Weights, modulo `prime`, with which shares at these points sum up to the secret."""
    weights = list[int]()
    for point in points:
        numerator, denominator = 1, 1
        for other in points:
            if other != point:
                numerator = numerator * other % prime
                denominator = denominator * (other - point) % prime
        weights.append(numerator * pow(denominator, -1, prime) % prime)
    return weights


def reconstruct_secret(shares: Mapping[int, int], *, prime: int = PRIME) -> int:
    """Reconstruct a secret from its shares by point; too few or wrong shares give a wrong number.

    >>> reconstruct_secret({2: 329, 4: 176, 5: 1188}, prime=1613)
    1234
    """
    weights = lagrange_weights(list(shares), prime=prime)
    return sum(w * share for w, share in zip(weights, shares.values(), strict=True)) % prime
