# SPDX-License-Identifier: Apache-2.0
"""Laws of the masked sum: the bits of the plain one, for whoever dies at whatever step."""

from __future__ import annotations

import itertools
import random
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import masked
import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from fedplan.secagg.crypto import CHUNK, KeyStream, node_public_key, sign, verify_signature
from fedplan.secagg.masks import mask_context, self_mask_key
from fedplan.secagg.terms import Slot


@given(st.integers(0, 2**32))
def test_the_masked_sum_is_the_plain_sum_of_the_survivors(seed: int) -> None:
    made = masked.federation(seed)
    wanted = masked.plain(made)
    if wanted is None:
        assert masked.refusal(made.play)
    else:
        found = made.play()
        assert found is not None
        assert masked.said(found, made) == wanted


def test_half_of_the_random_federations_open_and_many_lose_sites() -> None:
    """So that the law above is not about rounds that are given up."""
    made = [masked.federation(seed) for seed in range(200)]
    opened = [each for each in made if masked.plain(each) is not None]
    assert len(opened) > 100
    assert sum(bool(each.gone) for each in opened) > 40


def test_memory_does_not_grow_with_the_sites() -> None:
    """Neither that of a site as it masks, nor that of the server as it adds and opens."""
    few, many = peaks(3), peaks(12)
    size = 8 * WIDE_ENOUGH
    for step in few:
        assert many[step] < few[step] + size / 10, (step, few, many)
        assert few[step] < 3.5 * size, step


WIDE_ENOUGH = 2**18
"""Numbers whose bytes are far more than all keys and shares."""


def peaks(count: int) -> dict[str, int]:
    """The most memory that each step takes beside what it is given, in a round that loses a site."""
    sites = [f"site {n:02}" for n in range(count)]
    numbers = {"body": np.ones(WIDE_ENOUGH, np.uint64)}
    agreed = masked.terms([Slot("body", WIDE_ENOUGH)], threshold=count - 1, floor=2)
    made = masked.Round(agreed, dict.fromkeys(sites, numbers), dict.fromkeys(sites, 1))
    made.gone = {sites[-1]: 2}
    made.play(until=2)
    held = {name: made.server.shares_for(name) for name in sites}
    found = dict.fromkeys(("mask", "add", "open"), 0)
    for name in sites[:-1]:
        said, peak = measured(lambda name=name: made.sites[name].mask_input(held[name], numbers, 1))
        found["mask"] = max(found["mask"], peak)
        found["add"] = max(
            found["add"], measured(lambda said=said: made.server.add_masked_input(said))[1]
        )
    made.consent()
    made.answer()
    opened, found["open"] = measured(made.server.unmask)
    assert set(opened.numbers["body"].tolist()) == {count - 1}
    return found


def measured(asked: Callable[[], Any]) -> tuple[Any, int]:
    tracemalloc.start()
    try:
        said = asked()
        return said, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("words", [2**14, pytest.param(10**6, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("value", [0, 1, 2**64 - 1])
def test_masked_words_are_uniform(words: int, value: int) -> None:
    """Whatever is masked: each byte of the words comes as often as another (chi-squared)."""
    sites = [f"site {n}" for n in range(3)]
    numbers = {"body": np.full(words, value, np.uint64)}
    agreed = masked.terms([Slot("body", words)], threshold=3)
    made = masked.Round(agreed, dict.fromkeys(sites, numbers), dict.fromkeys(sites, 1))
    made.play(until=2)
    for name in sites:
        said = made.sites[name].mask_input(made.server.shares_for(name), numbers, 1)
        (content,) = said.vectors.values()
        columns = np.frombuffer(content, dtype=np.uint8).reshape(-1, 8)
        for column in columns.T:
            # 24 tests, whose secrets are drawn anew each time: none is this far off by chance.
            assert chisquare(np.bincount(column, minlength=256)).pvalue > 1e-9


def test_one_bit_of_anything_that_is_agreed_changes_every_mask() -> None:
    """Two rounds of one secret that differ in one thing have masks that are nothing alike."""
    secret, part = bytes(range(32)), "p"
    agreed = masked.terms([Slot("body", 8)], threshold=2)
    others = [
        replace(agreed, **{field: value})
        for field, value in (
            *(
                ("experiment", "lawt"),
                ("run", "b"),
                ("agreement_digest", "e" + "f" * 15),
                ("round", 2),
            ),
            *(("base_digest", "c" * 16), ("threshold", 3), ("min_senders", 3), ("attempt", 2)),
            ("slots", (Slot("body", 9),)),
        )
    ]
    contexts = [mask_context(each.digest, b"roster", ["ada", "bea"]) for each in (agreed, *others)]
    contexts += [mask_context(agreed.digest, b"rostes", ["ada", "bea"])]
    contexts += [mask_context(agreed.digest, b"roster", ["ada", "bea", "cleo"])]
    keys = [self_mask_key(secret, context, part, "ada") for context in contexts]
    keys += [
        self_mask_key(secret, contexts[0], "q", "ada"),
        self_mask_key(secret, contexts[0], part, "bea"),
    ]
    streams = [next(KeyStream(key).words(64))[1].copy() for key in keys]
    for one, other in itertools.combinations(streams, 2):
        differing = sum(int(word).bit_count() for word in one ^ other)
        assert abs(differing - 32 * 64) < 6 * 32  # six standard deviations


def test_a_key_stream_gives_as_many_bytes_as_are_asked_for() -> None:
    for count in (0, 1, 8 * CHUNK, 8 * CHUNK + 9):
        assert len(KeyStream(bytes(32)).bytes(count)) == count
    whole, pieces = KeyStream(bytes(32)), KeyStream(bytes(32))
    assert whole.bytes(9 * CHUNK) == pieces.bytes(7) + pieces.bytes(9 * CHUNK - 7)


def test_a_part_with_too_few_senders_stays_closed_and_the_others_open() -> None:
    dice, sites = random.Random(3), [f"site {n}" for n in range(4)]
    slots = [Slot("body", 4), Slot("head", 2), Slot("own", 2)]
    sent = {s: slots[:2] if n < 3 else slots[:1] for n, s in enumerate(sites)}
    sent[sites[0]] = slots
    numbers = {s: {slot.name: masked.drawn(dice, slot) for slot in sent[s]} for s in sites}
    agreed = masked.terms(slots, threshold=3, floor=3)
    made = masked.Round(agreed, numbers, dict.fromkeys(sites, 2), {sites[1]: 2})
    found = made.play()
    assert found is not None and masked.said(found, made) == masked.plain(made)
    assert found.senders == {"body": tuple(s for s in sites if s != sites[1])}
    # One was never sent: only one site had it. The other was, and a sender has gone since.
    assert found.withheld == {
        "head": "2 of 3 senders are left",
        "own": "1 of 3 senders are left",
    }
    assert all("own" not in str(each.self_mask_shares) for each in made.answers.values())
    part = next(p for p in made.server._groups if p.slots == (slots[1],))
    assert all(part.name not in each.self_mask_shares for each in made.answers.values())


@pytest.mark.parametrize("word", ["count", "weight"])
def test_a_sum_with_an_impossible_header_is_not_opened(word: str) -> None:
    sites = [f"site {n}" for n in range(4)]
    numbers = {"body": np.ones(3, np.uint64)}
    agreed = masked.terms([Slot("body", 3)], threshold=3)
    made = masked.Round(agreed, dict.fromkeys(sites, numbers), dict.fromkeys(sites, 1))
    made.play(until=3)
    (held,) = made.server._sums.values()
    held.words[int(word == "weight")] += np.uint64(2**39)
    made.consent()
    made.answer()
    said = masked.refusal(made.server.unmask)
    assert "cannot be unmasked" in said and all(name in said for name in sites)


def test_node_keys_of_a_site_sign_too() -> None:
    """As `fedplan site keys` makes them: ECDSA on P-384."""
    key, other = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    signature = sign(key, b"advert")
    assert verify_signature(node_public_key(key), b"advert", signature)
    assert not verify_signature(node_public_key(key), b"another", signature)
    assert not verify_signature(node_public_key(other), b"advert", signature)
    assert not verify_signature(node_public_key(masked.node("ada")), b"advert", signature)
