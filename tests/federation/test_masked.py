# SPDX-License-Identifier: Apache-2.0
"""Masked runs: the bits of the plain ones, for every method that shares, and what is refused."""

from __future__ import annotations

import copy
import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zoo
from clients import Few, loss
from hypothesis import given, settings
from hypothesis import strategies as st
from often import first, often
from settings import PROMPTED, SETTINGS
from torch import Tensor

from fedplan.audits import verify_lines
from fedplan.errors import FedplanError
from fedplan.federation.aggregation import Outcome, PlainSum
from fedplan.federation.agreement import Agreement
from fedplan.federation.defence import Defence
from fedplan.federation.masked import ALL, MaskedMean, MaskedSum, slots_of, terms_of
from fedplan.federation.masked_letters import advert_of
from fedplan.federation.masking import Masking, require_masking
from fedplan.federation.messages import Rejected, asked_of
from fedplan.federation.participation import Participation
from fedplan.federation.record import MaskedRecord, parted
from fedplan.language.plan import Best, share
from fedplan.language.turn import Turn
from fedplan.methods.method import Method
from fedplan.methods.phases import Planned, Sign
from fedplan.methods.registry import METHODS, method_named
from fedplan.models.description import describe
from fedplan.models.params import Block, Kind, Param
from fedplan.privacy.masking.rehearsal import Contribution, rehearsed
from fedplan.privacy.masking.server import Opened
from fedplan.privacy.masking.terms import HEAVIEST, Slot, Terms
from fedplan.runners.faults import Faults
from fedplan.runners.local import Federation
from fedplan.storage.lines import read_lines
from fedplan.tensors.devices import forked
from fedplan.tensors.named import digests, same_bits
from fedplan.tensors.sums import LARGEST_WEIGHT
from fedplan.testing import PACE
from fedplan.training.fit import Pace

MASKED = Masking("masked")
PARAMS = (
    Param("q", Kind.QUERY, (3, 4)),
    Param("k", Kind.QUERY, (5,)),
    Param("v", Kind.VALUE, (7,), "bfloat16"),
)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class WhenApart:
    """A rule that may look at how far changes lie apart."""

    phases = ()

    def __call__(self, sign: Sign) -> str:
        return ""


DRIFTING = Method(share(), announce=WhenApart())


def agreed(method: Method | None = None, **said: Any) -> Agreement:
    return Agreement("laws", PARAMS, method or Method(share()), PACE, run="ab" * 8, **said)


def drawn(seed: int, scale: float) -> dict[str, Tensor]:
    dice = torch.Generator().manual_seed(seed)
    return {
        p.key: (torch.randn(p.shape, generator=dice) * scale).to(DTYPES[p.dtype]) for p in PARAMS
    }


def same(one: Outcome, other: Outcome) -> None:
    assert one.means.keys() == other.means.keys() and one.riders.keys() == other.riders.keys()
    assert all(same_bits(one.means[key], value) for key, value in other.means.items())
    assert all(same_bits(one.riders[key], value) for key, value in other.riders.items())
    assert (one.drift, one.products) == (other.drift, other.products)


@settings(max_examples=often(400))
@given(
    st.lists(
        st.tuples(
            st.integers(1, 5000),
            st.sets(st.sampled_from("qkv")),
            st.integers(0, 2**32),
            st.sampled_from((1e-9, 1e-3, 0.1, 1.0)),
        ),
        min_size=2,
        max_size=5,
    ),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_a_masked_sum_closes_as_the_plain_sum_of_what_is_open(
    clients: list[tuple[int, set[str], int, float]], absent: bool, wide: bool, apart: bool
) -> None:
    apart = apart and len(clients) > 3  # how far they lie apart is opened of four and more
    method = Method(share(), absent=absent, announce=WhenApart() if apart else Planned())
    held = Masking("masked", floor=4 if apart else 2, wide=wide)
    base = drawn(0, 3.0)
    threshold = held.least(len(clients))
    masked = MaskedSum(agreed(method, masking=held), base, len(clients), 1, threshold)
    plain = PlainSum(agreed(method), base, len(clients))
    senders = {key: sum(key in keys for _, keys, *_ in clients) for key in "qkv"}
    for number, (weight, keys, seed, scale) in enumerate(clients):
        moved = {key: base[key] + each for key, each in drawn(seed, scale).items() if key in keys}
        masked.require(moved, {}, weight)
        masked.add(f"client {number}", moved, {}, weight)
        open_ = {key: value for key, value in moved.items() if senders[key] >= held.floor}
        plain.add(f"client {number}", open_, {}, weight)
    found, wanted = masked.close(), plain.close()
    same(found, wanted if apart else replace(wanted, drift={}))
    assert found.masked is not None
    few = {key for key, count in senders.items() if 0 < count < held.floor}
    assert set(found.masked.closed) == few


def federation(
    method: Method, folder: Path, masking: Masking, pace: Pace = PACE, **said: Any
) -> Federation:
    model = zoo.build("bert")
    if method.adapt is not None:
        with forked(seed=0):
            model = method.adapt(model)
    rows = {f"client {n}": Few("bert", n, 2 + n) for n in range(4)}
    agreement = Agreement("laws", describe(model), method, pace, masking=masking)
    folder.mkdir()
    return Federation(agreement, copy.deepcopy(model), rows, loss, folder, rounds=2, **said)


def is_one_sum(name: str) -> bool:
    """Whether a method needs one linear sum of each change, and no second one."""
    made = method_named(name, SETTINGS.get(name))
    return not made.riders and made.product.apart


TRIED = [n for n in METHODS if n not in (*PROMPTED, "local-only") and is_one_sum(n)]


@pytest.mark.parametrize("name", first(2, TRIED))
def test_every_method_that_shares_gives_the_bits_of_the_plain_sum(
    name: str, tmp_path: Path
) -> None:
    method = method_named(name, SETTINGS.get(name))
    alone = any(isinstance(each, Best) for each in method.plan.within()) and not method.together
    plain = federation(method, tmp_path / "plain", Masking())
    masked = federation(method, tmp_path / "masked", MASKED)
    for _ in range(1 if alone else 2):
        one, other = plain.round(), masked.round()
        assert other.counted == one.counted and other.masked is not None
        closed = other.masked.closed
        assert alone or not closed
        kept = {key: value for key, value in plain.world.values.items() if key not in closed}
        assert digests({key: masked.world.values[key] for key in kept}) == digests(kept)
        assert (masked.world.drift, other.products) == ({}, None)  # that would be a second sum
        plain.commit(one)
        masked.commit(other)
    lines = read_lines(tmp_path / "masked" / "ledger.jsonl")
    assert not verify_lines(masked.agreement, lines)
    rounds = [line for line in lines if line["kind"] == "round"]
    assert all(len(line["masked"]["sites"]) == 4 for line in rounds)


def test_clients_that_drop_out_are_not_in_the_sum_and_too_few_change_nothing(
    tmp_path: Path,
) -> None:
    """The same who drop out: the same bits; and a round of too few is given up, with a reason."""
    faults = Faults(dropped=0.3)
    made = {
        word: federation(Method(share()), tmp_path / word, held, faults=faults)
        for word, held in (("plain", Masking()), ("masked", MASKED))
    }
    reached = set[bool]()
    for _ in range(8):
        before = digests(made["masked"].world.values)
        one, other = (each.round() for each in made.values())
        assert one.counted == other.counted and other.masked is not None
        enough = len(other.counted) >= MASKED.least(4)
        reached.add(enough)
        after = {word: digests(each.world.values) for word, each in made.items()}
        assert after["masked"] == (after["plain"] if enough else before)
        assert ("threshold is 3" in other.masked.closed.get(ALL, "")) != enough
        for word, tally in zip(made, (one, other), strict=True):
            made[word].commit(tally)
        if not enough:  # from here on they are two runs
            break
    assert len(made["masked"].server.history) >= 1 and reached


def test_a_record_does_not_tell_whether_a_guess_at_what_was_shared_is_right(
    tmp_path: Path,
) -> None:
    """A server sends its guess as the next world, and sees to it that nothing is learned there."""
    made = federation(Method(share()), tmp_path / "run", MASKED, replace(PACE, rate=1e-30))
    told = list[dict[str, str]]()
    for _ in range(2):
        tally = made.round()
        told.append(parted(made.agreement.params, tally.lines["client 0"].after))
        made.commit(tally)
    first, second = told
    assert len(first) > 20 and all(first[key] != second[key] for key in first)


def test_the_terms_of_a_round_hold_all_that_was_agreed_and_not_64_bits_of_it() -> None:
    told = agreed(masking=MASKED)
    said = terms_of(told, 1, 2, {}, asked="").agreed
    assert said == hashlib.sha256(told.text.encode()).hexdigest()


@pytest.mark.parametrize("alike", [False, True])
def test_where_all_count_alike_two_sums_that_differ_by_a_client_do_not_tell_its_rows(
    alike: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = set[int]()

    def seen(terms: Terms, held: dict[str, Contribution]) -> Opened:
        weights.update(each.weight for each in held.values())
        return rehearsed(terms, held)

    monkeypatch.setattr("fedplan.federation.masked.rehearsed", seen)
    run = federation(Method(share()), tmp_path / "run", Masking("masked", alike=alike))
    assert run.round().masked
    assert weights == ({1} if alike else {2, 3, 4, 5})  # as many as their rows


def test_what_needs_more_than_one_word_is_rejected_and_fits_two() -> None:
    base = drawn(0, 1.0)
    far = {"q": base["q"] + 100}
    for wide in (False, True):
        held = Masking("masked", wide=wide)
        made = MaskedSum(agreed(masking=held), base, 3, 1, 2)
        made.require(far, {}, 1000)
        if wide:
            made.add("one", far, {}, 1000)
            assert set(made.held) == {"one"}
        else:
            with pytest.raises(Rejected, match=r"say aggregation\.wide"):
                made.add("one", far, {}, 1000)
            assert not made.held


def test_a_change_whose_square_fits_no_two_words_is_rejected() -> None:
    base = drawn(0, 1.0)
    held = Masking("masked", floor=4, wide=True)
    made = MaskedSum(agreed(DRIFTING, masking=held), base, 4, 1, 3)
    with pytest.raises(Rejected, match="squared length"):
        made.add("one", {"q": base["q"] + 1e6}, {}, 1000)
    assert not made.held


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"defence": Defence(rule="median")}, "looks at each update"),
        ({"defence": Defence(weight_cap=3)}, "looks at each update"),
    ],
)
def test_what_looks_at_single_updates_is_refused(said: dict[str, Any], words: str) -> None:
    agreed(**said)
    with pytest.raises(FedplanError, match=words):
        agreed(masking=MASKED, **said)


def test_scores_that_are_no_numbers_or_too_large_have_no_say() -> None:
    made = MaskedMean(agreed(masking=MASKED), Participation())
    one, other = Block("", 0), Block("", 1)
    polled = {"a": {one: 0.1, other: 2.0}, "b": {one: 0.2, other: 1e-20}}
    odd = {"c": {one: float("nan")}, "d": {one: 1e30}}
    assert made.chosen(1, polled | odd) == made.chosen(1, polled)
    assert made.chosen(1, polled) == pytest.approx({one: 0.3, other: 2.0}, abs=2**-46)


def test_both_ends_agree_on_the_mask_and_plain_runs_say_nothing_of_it() -> None:
    texts = {agreed(masking=held).fingerprint for held in (Masking(), MASKED, Masking("masked", 3))}
    assert len(texts) == 3
    assert "masking" not in agreed().text and "masking masking(" in agreed(masking=MASKED).text


@pytest.mark.parametrize(
    ("asked", "threshold", "words"),
    [
        *((2, 3, "takes 3"), (1, 0, "takes 2"), (6, 3, "two halves"), (4, 2, "take 3 at least")),
        (2, 0, "floor is 3"),
    ],
)
def test_a_threshold_that_does_not_hold_is_refused_before_a_round(
    asked: int, threshold: int, words: str
) -> None:
    with pytest.raises(FedplanError, match=words):
        Masking("masked", threshold).least(asked)


def test_two_thirds_and_one_always_hold_and_two_sites_must_be_meant() -> None:
    for asked in range(3, 101):
        assert 2 <= MASKED.least(asked) <= asked < 2 * MASKED.least(asked)
    assert Masking("masked", floor=2).least(2) == 2


def test_a_record_of_a_masked_sum_reads_as_it_was_written() -> None:
    from fedplan.federation.record import RoundRecord, read_round

    told = MaskedRecord(3, ("a", "b", "c"), {"q": "1 of 2 senders are left"})
    made = RoundRecord(1, "", ("a", "b", "c"), {}, {}, {}, 0, 0, masked=told)
    assert read_round(made.json()) == made
    assert "masked" not in replace(made, masked=None).json()


@pytest.mark.parametrize(
    ("name", "words"), [("scaffold", "second sum"), ("fedex-lora", "mean of products")]
)
def test_a_method_that_needs_a_second_sum_of_the_same_changes_is_refused(
    name: str, words: str
) -> None:
    """Two sums of two sites, weighted otherwise, are two equations for two unknowns."""
    made = method_named(name)
    require_masking(Masking(), made, None, Defence())
    with pytest.raises(FedplanError, match=words):
        require_masking(MASKED, made, None, Defence())


def test_of_each_change_one_linear_sum_is_opened_and_squares_only_for_a_plan_and_of_four() -> None:
    def kinds(told: Agreement) -> set[str]:
        return {slot.name.partition("/")[0] for slot in slots_of(told)}

    assert kinds(agreed(masking=MASKED)) == {ALL, "value"}
    assert kinds(agreed(DRIFTING, masking=Masking("masked", floor=4))) == {ALL, "value", "square"}
    with pytest.raises(FedplanError, match="take 4 at least"):
        agreed(DRIFTING, masking=MASKED)
    with pytest.raises(FedplanError, match="take 5 at least"):
        agreed(DRIFTING, masking=Masking("masked", floor=4, colluders=2))


def test_a_part_settles_under_masks_as_it_does_without_and_only_its_squares_are_opened(
    tmp_path: Path,
) -> None:
    """The automatic warm-up looks at sums alone; of three sites it is refused."""
    method = method_named("fedfrozen", {"warmup": 1, "settle": 1e30})
    with pytest.raises(FedplanError, match="take 4 at least"):
        agreed(method, masking=MASKED)
    plain = federation(method, tmp_path / "plain", Masking())
    masked = federation(method, tmp_path / "masked", Masking("masked", floor=4))
    assert {
        p.kind for p in PARAMS if p.key in agreed(method, masking=masked.agreement.masking).squared
    } == {"query"}
    phases = list[str]()
    for _ in range(2):
        one, other = plain.round(), masked.round()
        plain.commit(one)
        masked.commit(other)
        phases.append(masked.world.phase)
        drift = masked.world.drift
        assert drift == {kind: plain.world.drift[kind] for kind in drift}
        assert digests(masked.world.values) == digests(plain.world.values)
    assert phases == ["", "frozen"] and plain.world.phase == "frozen"


def test_a_phase_and_the_scores_that_all_choose_by_are_in_the_terms() -> None:
    one, other = Block("", 0), Block("", 1)
    turns = [
        *(Turn(), Turn(phase="frozen"), Turn(scores={}), Turn(scores={one: 1.0, other: 2.0})),
        *(Turn(scores={one: 2.0, other: 1.0}), Turn(phase="frozen", scores={one: 1.0})),
    ]
    told = agreed(masking=MASKED)
    found = {terms_of(told, 1, 3, {}, asked=asked_of(turn)).digest for turn in turns}
    assert len(found) == len(turns)
    alike = [Turn(scores={other: 2.0, one: 1.0}), Turn(scores={one: 1.0, other: 2.0})]
    assert len({asked_of(turn) for turn in alike}) == 1


def test_rubbish_under_masks_gives_a_round_up_and_does_not_end_the_run() -> None:
    params = (Param("h", Kind.MLP, (2,), "float16"),)
    told = Agreement("laws", params, Method(share()), PACE, run="ab" * 8, masking=MASKED)
    base, sites = {"h": torch.full((2,), 60000.0, dtype=torch.float16)}, ("a", "b", "c")
    made = MaskedSum(told, base, 3, 1, 3)
    for site in sites:
        made.add(site, dict(base), {}, 1)
    far = {**made.held["a"].numbers, "value/h": np.full(2, 2**61, np.uint64)}
    made.held |= {site: replace(made.held[site], numbers=far) for site in "ab"}
    still, heavy = {"value/h": np.zeros(2, np.uint64)}, {"value/h": 2**39}
    claimed = MaskedSum(
        told, base, 3, 1, 3, opened=Opened(still, {"value/h": sites}, heavy), sites=sites
    )
    for each, why in ((made, "too large"), (claimed, "")):
        found = each.close()
        assert not found.means and found.masked is not None
        assert why in found.masked.closed[ALL] and found.masked.sites == sites


def test_a_site_weighs_no_more_than_a_plain_sum_takes() -> None:
    assert HEAVIEST == LARGEST_WEIGHT


@pytest.mark.parametrize("bits", ["-0x1", "0x8", "0x" + "0" * 10**6 + "1", "7", "0x", ""])
def test_bits_of_slots_that_there_are_not_are_refused(bits: str) -> None:
    told = Terms("laws", "a", "f", 1, "b", 2, 2, tuple(Slot(name, 1) for name in "xyz"))
    said = dict.fromkeys(("boxing", "masking", "signature", "terms"), "00") | {"site": "ada"}
    assert advert_of(said | {"slots": "0x5"}, told).slots == ("x", "z")
    with pytest.raises(ValueError, match=r"bits|invalid"):
        advert_of(said | {"slots": bits}, told)
