# SPDX-License-Identifier: Apache-2.0
"""Shares: a secret cut so that some of its shares give it back, and fewer say nothing of it.

Shamir, How to share a secret, Communications of the ACM, 1979. The secret is the value at zero of a
random polynomial over a prime field, and a share its value at a place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

PRIME = 2**256 + 297
"""The smallest prime above 2**256: every secret of 32 bytes is a number of the field."""
SIZE = 33
"""Bytes of a share."""


def split(
    secret: int, others: Sequence[int], places: Iterable[int], *, prime: int = PRIME
) -> list[int]:
    """The shares at some places; with the secret, `others` are the coefficients: so many and one
    more shares give it back.

    >>> split(1234, [166, 94], range(1, 7), prime=1613)
    [1494, 329, 965, 176, 1188, 775]
    """
    found = list[int]()
    for place in places:
        value = 0
        for each in (*reversed(others), secret):
            value = (value * place + each) % prime
        found.append(value)
    return found


def pulls(places: Sequence[int], *, prime: int = PRIME) -> list[int]:
    """How much each place counts for the value at zero (Lagrange)."""
    found = list[int]()
    for own in places:
        above, below = 1, 1
        for other in places:
            if other != own:
                above, below = above * other % prime, below * (other - own) % prime
        found.append(above * pow(below, -1, prime) % prime)
    return found


def restored(shares: Mapping[int, int], *, prime: int = PRIME) -> int:
    """The secret of which these are shares, by their places.

    >>> restored({2: 329, 4: 176, 5: 1188}, prime=1613)
    1234
    """
    weights = pulls(list(shares), prime=prime)
    return sum(w * each for w, each in zip(weights, shares.values(), strict=True)) % prime
