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

from fedplan.audits import verify_ledger
from fedplan.errors import FedplanError
from fedplan.federation.aggregation.defence import Defence
from fedplan.federation.aggregation.mean import MeanAggregator
from fedplan.federation.aggregation.protocol import AggregationResult
from fedplan.federation.aggregation.secure import SecureAggregation, SecureAggregator
from fedplan.federation.aggregation.secure_input import round_slots, round_terms
from fedplan.federation.agreement import Agreement
from fedplan.federation.ledger.records import WHOLE_SUM, SecAggRecord, split_digests
from fedplan.federation.messages import UpdateRejected, turn_digest
from fedplan.federation.participation import Participation
from fedplan.language.plan import Best, share
from fedplan.language.predicates import Turn
from fedplan.methods.method import Method
from fedplan.methods.phases import PhaseContext, PlannedPhases
from fedplan.methods.registry import METHODS, method_by_name
from fedplan.models.description import describe
from fedplan.models.params import Block, Kind, Param
from fedplan.runners.local import Faults, Federation
from fedplan.secagg.config import SecAggConfig, check_secagg_support
from fedplan.secagg.messages import KeyAdvert, UnmaskShares, from_json
from fedplan.secagg.round import ClientInput, simulate_secagg_round
from fedplan.secagg.server import UnmaskedSums
from fedplan.secagg.terms import MAX_CLIENT_WEIGHT, Slot, Terms
from fedplan.storage.append_log import read_json_lines
from fedplan.tensors.devices import fork_rng_state
from fedplan.tensors.named import digests, same_bits
from fedplan.tensors.serialization import SerializationError
from fedplan.tensors.sums import MAX_WEIGHT
from fedplan.testing import TRAIN_CONFIG
from fedplan.training.fit import TrainArguments

MASKED = SecAggConfig("secure")
PARAMS = (
    Param("q", Kind.QUERY, (3, 4)),
    Param("k", Kind.QUERY, (5,)),
    Param("v", Kind.VALUE, (7,), "bfloat16"),
)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class WhenApart:
    """A rule that may look at how far changes lie apart."""

    phases = ()

    def __call__(self, sign: PhaseContext) -> str:
        return ""


DRIFTING = Method(share(), phase_rule=WhenApart())


def agreed(method: Method | None = None, **said: Any) -> Agreement:
    return Agreement("laws", PARAMS, method or Method(share()), TRAIN_CONFIG, run="ab" * 8, **said)


def drawn(seed: int, scale: float) -> dict[str, Tensor]:
    dice = torch.Generator().manual_seed(seed)
    return {
        p.key: (torch.randn(p.shape, generator=dice) * scale).to(DTYPES[p.dtype]) for p in PARAMS
    }


def same(one: AggregationResult, other: AggregationResult) -> None:
    assert one.means.keys() == other.means.keys() and one.aux.keys() == other.aux.keys()
    assert all(same_bits(one.means[key], value) for key, value in other.means.items())
    assert all(same_bits(one.aux[key], value) for key, value in other.aux.items())
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
    method = Method(share(), absent=absent, phase_rule=WhenApart() if apart else PlannedPhases())
    held = SecAggConfig("secure", min_contributors=4 if apart else 2, wide_integers=wide)
    base = drawn(0, 3.0)
    threshold = held.resolve_threshold(len(clients))
    masked = SecureAggregator(agreed(method, secagg=held), base, len(clients), 1, threshold)
    plain = MeanAggregator(agreed(method), base, len(clients))
    senders = {key: sum(key in keys for _, keys, *_ in clients) for key in "qkv"}
    for number, (weight, keys, seed, scale) in enumerate(clients):
        moved = {key: base[key] + each for key, each in drawn(seed, scale).items() if key in keys}
        masked.require(moved, {}, weight)
        masked.add(f"client {number}", moved, {}, weight)
        open_ = {
            key: value for key, value in moved.items() if senders[key] >= held.min_contributors
        }
        plain.add(f"client {number}", open_, {}, weight)
    found, wanted = masked.close(), plain.close()
    same(found, wanted if apart else replace(wanted, drift={}))
    assert found.secagg is not None
    few = {key for key, count in senders.items() if 0 < count < held.min_contributors}
    assert set(found.secagg.not_unmasked) == few


def federation(
    method: Method,
    folder: Path,
    secagg: SecAggConfig,
    train_arguments: TrainArguments = TRAIN_CONFIG,
    **said: Any,
) -> Federation:
    model = zoo.build("bert")
    if method.adapt is not None:
        with fork_rng_state(seed=0):
            model = method.adapt(model)
    rows = {f"client {n}": Few("bert", n, 2 + n) for n in range(4)}
    agreement = Agreement("laws", describe(model), method, train_arguments, secagg=secagg)
    folder.mkdir()
    return Federation(agreement, copy.deepcopy(model), rows, loss, folder, rounds=2, **said)


def is_one_sum(name: str) -> bool:
    """Whether a method needs one linear sum of each change, and no second one."""
    made = method_by_name(name, SETTINGS.get(name))
    return not made.aux and made.lora_aggregation.is_separate


TRIED = [n for n in METHODS if n not in (*PROMPTED, "local-only") and is_one_sum(n)]


@pytest.mark.parametrize("name", first(2, TRIED))
def test_every_method_that_shares_gives_the_bits_of_the_plain_sum(
    name: str, tmp_path: Path
) -> None:
    method = method_by_name(name, SETTINGS.get(name))
    alone = any(isinstance(each, Best) for each in method.plan.walk()) and not method.joint_choice
    plain = federation(method, tmp_path / "plain", SecAggConfig())
    masked = federation(method, tmp_path / "masked", MASKED)
    for _ in range(1 if alone else 2):
        one, other = plain.run_round(), masked.run_round()
        assert other.aggregated == one.aggregated and other.secagg is not None
        closed = other.secagg.not_unmasked
        assert alone or not closed
        kept = {key: value for key, value in plain.global_state.values.items() if key not in closed}
        assert digests({key: masked.global_state.values[key] for key in kept}) == digests(kept)
        assert (masked.global_state.drift, other.products) == (
            {},
            None,
        )  # that would be a second sum
        plain.commit(one)
        masked.commit(other)
    lines = read_json_lines(tmp_path / "masked" / "ledger.jsonl")
    assert not verify_ledger(masked.agreement, lines)
    rounds = [line for line in lines if line["kind"] == "round"]
    assert all(len(line["secagg"]["clients"]) == 4 for line in rounds)


def test_clients_that_drop_out_are_not_in_the_sum_and_too_few_change_nothing(
    tmp_path: Path,
) -> None:
    """The same who drop out: the same bits; and a round of too few is given up, with a reason."""
    faults = Faults(dropped=0.3)
    made = {
        word: federation(Method(share()), tmp_path / word, held, faults=faults)
        for word, held in (("plain", SecAggConfig()), ("masked", MASKED))
    }
    reached = set[bool]()
    for _ in range(8):
        before = digests(made["masked"].global_state.values)
        one, other = (each.run_round() for each in made.values())
        assert one.aggregated == other.aggregated and other.secagg is not None
        enough = len(other.aggregated) >= MASKED.resolve_threshold(4)
        reached.add(enough)
        after = {word: digests(each.global_state.values) for word, each in made.items()}
        assert after["masked"] == (after["plain"] if enough else before)
        assert ("threshold is 3" in other.secagg.not_unmasked.get(WHOLE_SUM, "")) != enough
        for word, round_state in zip(made, (one, other), strict=True):
            made[word].commit(round_state)
        if not enough:  # from here on they are two runs
            break
    assert len(made["masked"].server.history) >= 1 and reached


def test_a_record_does_not_tell_whether_a_guess_at_what_was_shared_is_right(
    tmp_path: Path,
) -> None:
    """A server sends its guess as the next world, and sees to it that nothing is learned there."""
    made = federation(Method(share()), tmp_path / "run", MASKED, replace(TRAIN_CONFIG, lr=1e-30))
    told = list[dict[str, str]]()
    for _ in range(2):
        round_state = made.run_round()
        told.append(split_digests(made.agreement.params, round_state.records["client 0"].after))
        made.commit(round_state)
    first, second = told
    assert len(first) > 20 and all(first[key] != second[key] for key in first)


def test_the_terms_of_a_round_hold_all_that_was_agreed_and_not_64_bits_of_it() -> None:
    told = agreed(secagg=MASKED)
    said = round_terms(told, 1, 2, {}, turn_digest="").agreement_digest
    assert said == hashlib.sha256(told.text.encode()).hexdigest()


@pytest.mark.parametrize("alike", [False, True])
def test_where_all_count_alike_two_sums_that_differ_by_a_client_do_not_tell_its_rows(
    alike: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = set[int]()

    def seen(terms: Terms, held: dict[str, ClientInput]) -> UnmaskedSums:
        weights.update(each.weight for each in held.values())
        return simulate_secagg_round(terms, held)

    monkeypatch.setattr("fedplan.federation.aggregation.secure.simulate_secagg_round", seen)
    run = federation(Method(share()), tmp_path / "run", SecAggConfig("secure", equal_weights=alike))
    assert run.run_round().secagg
    assert weights == ({1} if alike else {2, 3, 4, 5})  # as many as their rows


def test_what_needs_more_than_one_word_is_rejected_and_fits_two() -> None:
    base = drawn(0, 1.0)
    far = {"q": base["q"] + 100}
    for wide in (False, True):
        held = SecAggConfig("secure", wide_integers=wide)
        made = SecureAggregator(agreed(secagg=held), base, 3, 1, 2)
        made.require(far, {}, 1000)
        if wide:
            made.add("one", far, {}, 1000)
            assert set(made.contributions) == {"one"}
        else:
            with pytest.raises(UpdateRejected, match=r"set aggregation\.wide"):
                made.add("one", far, {}, 1000)
            assert not made.contributions


def test_a_change_whose_square_fits_no_two_words_is_rejected() -> None:
    base = drawn(0, 1.0)
    held = SecAggConfig("secure", min_contributors=4, wide_integers=True)
    made = SecureAggregator(agreed(DRIFTING, secagg=held), base, 4, 1, 3)
    with pytest.raises(UpdateRejected, match="squared norm"):
        made.add("one", {"q": base["q"] + 1e6}, {}, 1000)
    assert not made.contributions


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"defence": Defence(rule="median")}, "needs each single update"),
        ({"defence": Defence(max_weight=3)}, "needs each single update"),
    ],
)
def test_what_looks_at_single_updates_is_refused(said: dict[str, Any], words: str) -> None:
    agreed(**said)
    with pytest.raises(FedplanError, match=words):
        agreed(secagg=MASKED, **said)


def test_scores_that_are_no_numbers_or_too_large_have_no_say() -> None:
    made = SecureAggregation(agreed(secagg=MASKED), Participation(), None)
    one, other = Block("", 0), Block("", 1)
    polled = {"a": {one: 0.1, other: 2.0}, "b": {one: 0.2, other: 1e-20}}
    odd = {"c": {one: float("nan")}, "d": {one: 1e30}}
    assert made.joint_scores(1, polled | odd) == made.joint_scores(1, polled)
    assert made.joint_scores(1, polled) == pytest.approx({one: 0.3, other: 2.0}, abs=2**-46)


def test_both_ends_agree_on_the_mask_and_plain_runs_say_nothing_of_it() -> None:
    texts = {
        agreed(secagg=held).fingerprint
        for held in (SecAggConfig(), MASKED, SecAggConfig("secure", 3))
    }
    assert len(texts) == 3
    assert "secagg" not in agreed().text and "secagg secagg(" in agreed(secagg=MASKED).text


@pytest.mark.parametrize(
    ("asked", "threshold", "words"),
    [
        *((2, 3, "takes 3"), (1, 0, "takes 2"), (6, 3, "two halves"), (4, 2, "take 3 at least")),
        (2, 0, "min_contributors is 3"),
    ],
)
def test_a_threshold_that_does_not_hold_is_refused_before_a_round(
    asked: int, threshold: int, words: str
) -> None:
    with pytest.raises(FedplanError, match=words):
        SecAggConfig("secure", threshold).resolve_threshold(asked)


def test_two_thirds_and_one_always_hold_and_two_sites_must_be_meant() -> None:
    for asked in range(3, 101):
        assert 2 <= MASKED.resolve_threshold(asked) <= asked < 2 * MASKED.resolve_threshold(asked)
    assert SecAggConfig("secure", min_contributors=2).resolve_threshold(2) == 2


def test_a_record_of_a_masked_sum_reads_as_it_was_written() -> None:
    from fedplan.federation.ledger.records import RoundRecord, read_round

    told = SecAggRecord(3, ("a", "b", "c"), {"q": "1 of 2 senders are left"})
    made = RoundRecord(1, "", ("a", "b", "c"), {}, {}, {}, 0, 0, secagg=told)
    assert read_round(made.json()) == made
    assert "secagg" not in replace(made, secagg=None).json()


@pytest.mark.parametrize(
    ("name", "words"), [("scaffold", "second sum"), ("fedex-lora", "mean of products")]
)
def test_a_method_that_needs_a_second_sum_of_the_same_changes_is_refused(
    name: str, words: str
) -> None:
    """Two sums of two sites, weighted otherwise, are two equations for two unknowns."""
    made = method_by_name(name)
    check_secagg_support(SecAggConfig(), made, None, "")
    with pytest.raises(FedplanError, match=words):
        check_secagg_support(MASKED, made, None, "")


def test_of_each_change_one_linear_sum_is_opened_and_squares_only_for_a_plan_and_of_four() -> None:
    def kinds(told: Agreement) -> set[str]:
        return {slot.name.partition("/")[0] for slot in round_slots(told)}

    assert kinds(agreed(secagg=MASKED)) == {WHOLE_SUM, "value"}
    assert kinds(agreed(DRIFTING, secagg=SecAggConfig("secure", min_contributors=4))) == {
        WHOLE_SUM,
        "value",
        "square",
    }
    with pytest.raises(FedplanError, match="take 4 at least"):
        agreed(DRIFTING, secagg=MASKED)
    with pytest.raises(FedplanError, match="take 5 at least"):
        agreed(DRIFTING, secagg=SecAggConfig("secure", min_contributors=4, colluders=2))


def test_a_part_settles_under_masks_as_it_does_without_and_only_its_squares_are_opened(
    tmp_path: Path,
) -> None:
    """The automatic warm-up looks at sums alone; of three sites it is refused."""
    method = method_by_name("fedfrozen", {"warmup": 1, "settle": 1e30})
    with pytest.raises(FedplanError, match="take 4 at least"):
        agreed(method, secagg=MASKED)
    plain = federation(method, tmp_path / "plain", SecAggConfig())
    masked = federation(method, tmp_path / "masked", SecAggConfig("secure", min_contributors=4))
    assert {
        p.kind
        for p in PARAMS
        if p.key in agreed(method, secagg=masked.agreement.secagg).tracks_drift
    } == {"query"}
    phases = list[str]()
    for _ in range(2):
        one, other = plain.run_round(), masked.run_round()
        plain.commit(one)
        masked.commit(other)
        phases.append(masked.global_state.phase)
        drift = masked.global_state.drift
        assert drift == {kind: plain.global_state.drift[kind] for kind in drift}
        assert digests(masked.global_state.values) == digests(plain.global_state.values)
    assert phases == ["", "frozen"] and plain.global_state.phase == "frozen"


def test_a_phase_and_the_scores_that_all_choose_by_are_in_the_terms() -> None:
    one, other = Block("", 0), Block("", 1)
    turns = [
        *(Turn(), Turn(phase="frozen"), Turn(scores={}), Turn(scores={one: 1.0, other: 2.0})),
        *(Turn(scores={one: 2.0, other: 1.0}), Turn(phase="frozen", scores={one: 1.0})),
    ]
    told = agreed(secagg=MASKED)
    found = {round_terms(told, 1, 3, {}, turn_digest=turn_digest(turn)).digest for turn in turns}
    assert len(found) == len(turns)
    alike = [Turn(scores={other: 2.0, one: 1.0}), Turn(scores={one: 1.0, other: 2.0})]
    assert len({turn_digest(turn) for turn in alike}) == 1


def test_rubbish_under_masks_gives_a_round_up_and_does_not_end_the_run() -> None:
    params = (Param("h", Kind.MLP, (2,), "float16"),)
    told = Agreement("laws", params, Method(share()), TRAIN_CONFIG, run="ab" * 8, secagg=MASKED)
    base, sites = {"h": torch.full((2,), 60000.0, dtype=torch.float16)}, ("a", "b", "c")
    made = SecureAggregator(told, base, 3, 1, 3)
    for site in sites:
        made.add(site, dict(base), {}, 1)
    far = {**made.contributions["a"].numbers, "value/h": np.full(2, 2**61, np.uint64)}
    made.contributions |= {site: replace(made.contributions[site], numbers=far) for site in "ab"}
    still, heavy = {"value/h": np.zeros(2, np.uint64)}, {"value/h": 2**39}
    claimed = SecureAggregator(told, base, 3, 1, 3)
    claimed.secure_sum.unmasked = UnmaskedSums(still, {"value/h": sites}, heavy)
    claimed.secure_sum.sites = sites
    for each, why in ((made, "too large"), (claimed, "")):
        found = each.close()
        assert not found.means and found.secagg is not None
        assert why in found.secagg.not_unmasked[WHOLE_SUM] and found.secagg.clients == sites


def test_a_site_weighs_no_more_than_a_plain_sum_takes() -> None:
    assert MAX_CLIENT_WEIGHT == MAX_WEIGHT


@pytest.mark.parametrize("bits", ["-0x1", "0x8", "0x" + "0" * 10**6 + "1", "7", "0x", ""])
def test_bits_of_slots_that_there_are_not_are_refused(bits: str) -> None:
    told = Terms("laws", "a", "f", 1, "b", 2, 2, tuple(Slot(name, 1) for name in "xyz"))
    said = dict.fromkeys(("encryption_key", "masking_key", "signature", "terms"), "00")
    said["client"] = "ada"
    assert from_json(KeyAdvert, said | {"slots": "0x5"}, told).slots == ("x", "z")
    with pytest.raises(SerializationError, match=r"bit|invalid"):
        from_json(KeyAdvert, said | {"slots": bits}, told)


def test_a_message_of_any_depth_is_refused_and_does_not_end_the_server() -> None:
    """At one depth JSON can be read, but not be written again into an error."""
    for depth in range(900, 1020):
        inner: Any = 1
        for _ in range(depth):
            inner = {"a": inner}
        shares = {"terms": "00", "client": "a", "masking_key_shares": {}}
        with pytest.raises(SerializationError):
            from_json(UnmaskShares, shares | {"self_mask_shares": {"g": {"c": inner}}})
