# SPDX-License-Identifier: Apache-2.0
"""Shamir's shares against vectors of the literature, and against what fewer of them say."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedplan.secagg.crypto import PRIME, SHARE_SIZE, lagrange_weights, split_secret

ED25519 = 2**252 + 27742317777372353535851937790883648493
"""The order of the group: RFC 9591, Appendix E.1, has shares over it, in little endian."""
SECRET = "7b1c33d3f5291d85de664833beb1ad469f7fb6025a0ec78b3a790c6e13a98304"
COEFFICIENT = "178199860edd8c62f5212ee91eff1295d0d670ab4ed4506866bae57e7030b204"
SHARES = (
    "929dcc590407aae7d388761cddb0c0db6f5627aea8e217f4a033f2ec83d93509",
    "a91e66e012e4364ac9aaa405fcafd370402d9859f7b6685c07eed76bf409e80d",
    "d3cb090a075eb154e82fdb4b3cb507f110040905468bb9c46da8bdea643a9a02",
)
WIKIPEDIA = {1: 1494, 2: 329, 3: 965, 4: 176, 5: 1188, 6: 775}
"""Of the secret 1234 by 166 and 94, modulo 1613."""


def number(text: str) -> int:
    return int.from_bytes(bytes.fromhex(text), "little")


def secret_of(shares: dict[int, int], *, prime: int = PRIME) -> int:
    weights = lagrange_weights(list(shares), prime=prime)
    return sum(w * share for w, share in zip(weights, shares.values(), strict=True)) % prime


def test_the_shares_of_rfc_9591() -> None:
    found = split_secret(number(SECRET), [number(COEFFICIENT)], range(1, 4), prime=ED25519)
    assert found == [number(each) for each in SHARES]
    for one, two in itertools.combinations(range(3), 2):
        pair = {one + 1: found[one], two + 1: found[two]}
        assert secret_of(pair, prime=ED25519) == number(SECRET)


def test_the_shares_of_a_textbook() -> None:
    assert split_secret(1234, [166, 94], WIKIPEDIA, prime=1613) == list(WIKIPEDIA.values())
    for places in itertools.combinations(WIKIPEDIA, 3):
        assert secret_of({place: WIKIPEDIA[place] for place in places}, prime=1613) == 1234


def test_the_field_is_one_and_holds_every_secret() -> None:
    assert PRIME > 2**256 and PRIME < 2 ** (8 * SHARE_SIZE)
    dice = random.Random(0)
    for _ in range(40):  # Miller and Rabin
        base, odd, twos = dice.randrange(2, PRIME - 1), PRIME - 1, 0
        while odd % 2 == 0:
            odd, twos = odd // 2, twos + 1
        value = pow(base, odd, PRIME)
        found = value in (1, PRIME - 1)
        for _ in range(twos - 1):
            value = value * value % PRIME
            found |= value == PRIME - 1
        assert found


@given(st.binary(min_size=32, max_size=32), st.integers(2, 9), st.integers(0, 5), st.integers(0))
def test_any_threshold_of_shares_gives_the_secret_back(
    secret: bytes, threshold: int, more: int, seed: int
) -> None:
    whole, count, dice = int.from_bytes(secret), threshold + more, random.Random(seed)
    others = [dice.randrange(PRIME) for _ in range(threshold - 1)]
    shares = dict(
        zip(range(1, count + 1), split_secret(whole, others, range(1, count + 1)), strict=True)
    )
    some = dict(dice.sample(sorted(shares.items()), threshold))
    assert secret_of(some) == whole


@pytest.mark.parametrize("threshold", [2, 3])
def test_fewer_shares_fit_every_secret_alike(threshold: int) -> None:
    """In a small field all polynomials can be counted."""
    prime, seen = 7, dict[tuple[int, ...], dict[int, int]]()
    for secret in range(prime):
        for others in itertools.product(range(prime), repeat=threshold - 1):
            few = tuple(split_secret(secret, others, range(1, threshold), prime=prime))
            held = seen.setdefault(few, dict.fromkeys(range(prime), 0))
            held[secret] += 1
    assert len(seen) == prime ** (threshold - 1)
    assert all(len(set(counts.values())) == 1 for counts in seen.values())
