# SPDX-License-Identifier: Apache-2.0
"""Noise in shares: what is opened is clipped changes and shares to the bit, and what is refused."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import zoo
from clients import Few, loss
from hypothesis import given, settings
from hypothesis import strategies as st
from masked import NEVER, Round, plain, terms
from often import often
from torch import Tensor

from fedplan.audits import verify_ledger
from fedplan.errors import FedplanError, PrivacyError
from fedplan.federation.aggregation.distributed_dp import (
    DistributedDPAggregator,
    client_change,
    noised_words,
    round_mechanism,
)
from fedplan.federation.aggregation.secure_input import VALUE_PREFIX, round_slots
from fedplan.federation.agreement import Agreement
from fedplan.federation.ledger.records import ROLE_BY_LETTER, split_digests
from fedplan.language.parser import parse
from fedplan.language.plan import Role, share
from fedplan.language.predicates import Turn
from fedplan.methods.method import Method
from fedplan.methods.registry import method_by_name
from fedplan.models.description import describe
from fedplan.models.params import Kind, Param
from fedplan.privacy.guarantee import Guarantee
from fedplan.privacy.guard import DistributedGuard, ServerGuard
from fedplan.privacy.mechanisms.clipping import CLIPPING_NORMS, clip_change
from fedplan.privacy.statement import Statement
from fedplan.runners.local import Federation
from fedplan.secagg.config import SecAggConfig
from fedplan.storage.append_log import read_json_lines
from fedplan.tensors.accumulator import GRID
from fedplan.tensors.compression import parse_codec
from fedplan.tensors.named import same_bits
from fedplan.tensors.ring import Words, ints_from_words, widen_words
from fedplan.testing import TRAIN_CONFIG

HIDDEN = Guarantee("client", 60.0, 1e-5, 1.0, 1.0)
MASKED = SecAggConfig("secure", min_contributors=2)
PARAMS = (
    Param("q", Kind.QUERY, (3, 4)),
    Param("v", Kind.VALUE, (5,), "bfloat16"),
    Param("o", Kind.OUT, (2,)),
)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
BASE = {p.key: torch.full(p.shape, 0.5, dtype=DTYPES[p.dtype]) for p in PARAMS}


def agreed(secagg: SecAggConfig = MASKED, guarantee: Guarantee = HIDDEN, **said: Any) -> Agreement:
    method = said.pop("method", Method(share()))
    return Agreement(
        "laws", PARAMS, method, TRAIN_CONFIG, guarantee, run="ab" * 8, secagg=secagg, **said
    )


def moved(seed: int, keys: set[str], scale: float) -> dict[str, Tensor]:
    dice = torch.Generator().manual_seed(seed)
    drawn = {k: torch.randn(v.shape, generator=dice) * scale for k, v in BASE.items()}
    return {k: (BASE[k] + drawn[k]).to(BASE[k].dtype) for k in BASE if k in keys}


def steps(words: Words, *, wide: bool) -> list[int]:
    """Numbers of a slot as those of Python, narrow or wide."""
    return ints_from_words(words if wide else widen_words(words))


@settings(max_examples=often(24))
@given(
    st.lists(
        st.tuples(
            st.sets(st.sampled_from("qvo")),
            st.integers(0, 2**32),
            st.sampled_from((1e-9, 0.1, 30.0, 1e6)),
            st.integers(0, NEVER),
        ),
        min_size=3,
        max_size=6,
    ),
    st.booleans(),
)
def test_what_is_opened_is_clipped_changes_and_shares_to_the_bit(
    clients: list[tuple[set[str], int, float, int]], wide: bool
) -> None:
    """Whoever drops out at whatever step: all of it in whole numbers, and the divisor is public."""
    told = agreed(replace(MASKED, wide_integers=wide))
    sites, least = len(clients), told.secagg.resolve_threshold(len(clients))
    names = [f"site {n}" for n in range(sites)]
    with TemporaryDirectory() as folder:
        guard = DistributedGuard(HIDDEN, Path(folder) / "sites")
        made = round_mechanism(guard, told, BASE, sites)
        clipped, noised = dict[str, dict[str, Tensor]](), dict[str, Any]()
        for name, (keys, seed, scale, _) in zip(names, clients, strict=True):
            change = client_change(moved(seed, keys, scale), BASE)
            clipped[name] = clip_change(change, made.clipping_norm).values
            noised[name] = guard.noisy_share(made, change, 1, name, b"terms")
        numbers = {n: noised_words(each, wide=wide) for n, each in noised.items()}
        gone = {n: step for n, (*_, step) in zip(names, clients, strict=True) if step < NEVER}
        wire = terms(round_slots(told), threshold=least, floor=2)
        round_ = Round(wire, numbers, dict.fromkeys(names, 1), gone)
        there = round_.there(2)
        if plain(round_) is None:
            return
        opened = round_.play()
        assert opened is not None
        total = DistributedDPAggregator(
            told, BASE, sites, 1, least, guard=ServerGuard(HIDDEN, Path(folder)), mechanism=made
        )
        total.secure_sum.unmasked, total.secure_sum.sites = opened, tuple(there)
        found = total.close()
    step = made._grid_step
    for key, base in BASE.items():
        parts = dict[str, list[int]]()
        for name in there:
            whole = steps(numbers[name][VALUE_PREFIX + key], wide=wide)
            change = clipped[name].get(key, torch.zeros(base.shape)).double()
            flat = (change.div(step).trunc() * (step / GRID)).flatten().tolist()
            parts[name] = [a - int(b) for a, b in zip(whole, flat, strict=True)]
            # What is left is a share of noise: in whole steps, on every number, whoever sent it.
            assert all(n and n % int(step / GRID) == 0 for n in parts[name])
            assert max(map(abs, parts[name])) * GRID < 10 * made.share_stddev
        sums = steps(opened.numbers[VALUE_PREFIX + key], wide=wide)
        columns = [steps(numbers[n][VALUE_PREFIX + key], wide=wide) for n in there]
        assert sums == [sum(each) for each in zip(*columns, strict=True)]
        mean = torch.tensor([n * GRID / sites for n in sums], dtype=torch.float64)
        assert same_bits(found.means[key], base + mean.view(base.shape).to(base.dtype))
    assert found.drift == {} and set(found.means) == set(BASE)


WIDE = {"sent": torch.zeros(100_000), "by nobody": torch.zeros(100_000)}


def test_the_noise_of_as_many_as_are_honest_is_what_is_claimed_on_every_number(
    tmp_path: Path,
) -> None:
    """5 sites, 4 open a sum, 1 colludes: any 3 have all of it, and 5 have 5/3 of its variance."""
    told = agreed(
        SecAggConfig("secure", threshold=4, colluders=1),
        replace(HIDDEN, noise_multiplier=0.7, clipping_norm=3.0),
    )
    own = [DistributedGuard(told.guarantee or HIDDEN, tmp_path / f"{n}") for n in range(5)]
    made = round_mechanism(own[0], told, WIDE, 5)
    assert made.noise_shares == told.secagg.honest_noise_shares(5) == 3
    for count, times in ((3, 1.0), (5, 5 / 3)):
        sums = {key: torch.zeros(100_000, dtype=torch.float64) for key in WIDE}
        for site in range(count):
            change = {"sent": torch.full((100_000,), 1e-3 * site)}
            noised = own[site].noisy_share(made, change, count, f"{count}", b"")
            clipped = made.clipped_sum(change).mean({"sent": 1})
            for key, value in noised.mean(dict.fromkeys(WIDE, 1)).items():
                sums[key] += value - clipped.get(key, 0.0)
        for value in sums.values():
            assert float(value.var()) == pytest.approx(times * (0.7 * 3.0) ** 2, rel=0.02)
            assert abs(float(value.mean())) < 0.05


def federation(method: Method, folder: Path, **said: Any) -> Federation:
    model = zoo.build("bert")
    rows = {f"client {n}": Few("bert", n, 2 + n) for n in range(4)}
    train_arguments, of = said.pop("train_arguments", TRAIN_CONFIG), said.pop("loss", loss)
    agreement = Agreement(
        *("laws", describe(model), method, train_arguments, said.pop("guarantee", HIDDEN)),
        secagg=MASKED,
    )
    folder.mkdir()
    return Federation(agreement, copy.deepcopy(model), rows, of, folder, rounds=2, **said)


def test_a_local_run_charges_each_round_once_and_ends_with_what_was_promised(
    tmp_path: Path,
) -> None:
    """Clients that are told apart by traits send the same: all that any of them may share."""
    plan = 'chain(freeze(), by("at", {"a": share(blocks(0))}, share(blocks(0) | blocks(1))))'
    promised = replace(HIDDEN, epsilon=HIDDEN.forecast_epsilon(2) * 1.01)
    said = {"guarantee": promised, "traits": {"client 1": {"at": "a"}}}
    made = federation(Method(parse(plan)), tmp_path / "run", **said)
    before = {key: value.clone() for key, value in made.global_state.values.items()}
    for number in (1, 2):
        round_state = made.run_round()
        assert round_state.secagg is not None and len(round_state.secagg.clients) == 4
        assert len({record.upload_bytes for record in round_state.records.values()}) == 1
        made.commit(round_state)
        assert made.epsilon_spent == pytest.approx(HIDDEN.forecast_epsilon(number), rel=1e-9)
    lines = read_json_lines(tmp_path / "run" / "ledger.jsonl")
    assert not verify_ledger(made.agreement, lines)
    turns = [line for line in lines if line["kind"] == "turn"]
    assert {(line["weight"], line["loss"]) for line in turns} == {(1, None)}
    shared = {p.key for p in made.agreement.public_params(Turn(1))}
    assert {k for k, v in made.global_state.values.items() if not same_bits(v, before[k])} == shared
    assert 0 < len(shared) < len(made.agreement.params)
    with pytest.raises(PrivacyError, match="was promised"):
        made.run_round()


def test_nobody_sees_whether_what_a_client_keeps_has_moved(tmp_path: Path) -> None:
    """Who has no rows moves nothing: its record must not tell."""
    still = replace(TRAIN_CONFIG, lr=1e-30)
    made = federation(method_by_name("fedper"), tmp_path / "run", train_arguments=still)
    home = dict[str, str]()
    for _ in range(2):
        round_state = made.run_round()
        record = round_state.records["client 0"]
        before, after = (
            split_digests(made.agreement.params, x) for x in (record.before, record.after)
        )
        kept = [
            p.key
            for p, letter in zip(made.agreement.params, record.roles, strict=True)
            if ROLE_BY_LETTER[letter] is Role.KEEP
        ]
        assert kept and all(before[key] != after[key] for key in kept)
        assert all(home.get(key, before[key]) == before[key] for key in kept)
        home = {key: after[key] for key in kept}
        made.commit(round_state)
    assert not verify_ledger(made.agreement, read_json_lines(tmp_path / "run" / "ledger.jsonl"))


def test_a_change_that_is_no_number_is_none_and_its_client_is_in_the_sum_all_the_same(
    tmp_path: Path,
) -> None:
    """That it is no number would tell of its rows."""
    values = {"q": BASE["q"] * float("nan"), "o": BASE["o"] + 1}
    assert client_change(values, BASE) == {}
    wired = Method(parse("share(head)"), compression=parse_codec("pipe(delta(), bf16())"))
    made = federation(wired, tmp_path / "run", loss=lambda *said: loss(*said) * float("nan"))
    round_state = made.run_round()
    assert len(round_state.aggregated) == 4 and not round_state.rejected
    assert all(bool(value.isfinite().all()) for value in made.global_state.values.values())


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"sampling_rate": 0.5}, r"clients\.fraction = 1"),
        ({"vote_noise_multiplier": 8.0}, r"without privacy\.vote_noise_multiplier"),
        ({"clipping_quantile": 0.5}, r"without privacy\.clipping_quantile"),
    ],
)
def test_what_would_be_opened_without_noise_is_refused(said: dict[str, Any], words: str) -> None:
    with pytest.raises(FedplanError, match=words):
        agreed(guarantee=replace(HIDDEN, **said))


def test_so_many_colluders_that_they_could_open_a_round_twice_are_refused() -> None:
    with pytest.raises(FedplanError, match="fewer of them than the threshold"):
        SecAggConfig("secure", threshold=3, colluders=3)
    for asked in range(3, 40):
        most = 2 * SecAggConfig("secure").resolve_threshold(asked) - asked - 1
        for each in range(most + 1):  # one other site looks, also where nobody colludes
            held = SecAggConfig("secure", colluders=each)
            assert (
                held.honest_noise_shares(asked) == held.resolve_threshold(asked) - max(1, each) >= 1
            )
        with pytest.raises(FedplanError, match=f"take {most} at most"):
            SecAggConfig("secure", colluders=most + 1).resolve_threshold(asked)
    with pytest.raises(FedplanError, match="a min_contributors of 4 at least"):
        Agreement(
            "a", PARAMS, Method(share()), TRAIN_CONFIG, secagg=SecAggConfig("secure", colluders=2)
        )
    agreed(SecAggConfig("secure", colluders=2))
    assert "colluders=2" in agreed(SecAggConfig("secure", colluders=2)).text


def test_shares_of_the_smallest_norm_are_fine_enough_and_what_fits_no_word_is_refused(
    tmp_path: Path,
) -> None:
    """A share has 2**10 grid steps at least, for every clipping norm that is allowed."""
    low = replace(HIDDEN, clipping_norm=CLIPPING_NORMS[0])
    made = round_mechanism(DistributedGuard(low, tmp_path), agreed(guarantee=low), BASE, 9)
    assert made.share_stddev >= 2.0**10 * GRID
    far = replace(HIDDEN, clipping_norm=2.0**16)
    for wide in (False, True):
        told, made = (
            agreed(replace(MASKED, wide_integers=wide), far),
            DistributedGuard(far, tmp_path / f"{wide}"),
        )
        if wide:
            assert round_mechanism(made, told, BASE, 4).clipping_norm == 2.0**16
        else:
            with pytest.raises(FedplanError, match=r"aggregation\.wide"):
                round_mechanism(made, told, BASE, 4)


def test_a_statement_says_the_neighbours_the_trust_and_the_price() -> None:
    secagg = SecAggConfig("secure", threshold=4, colluders=1)
    said = Statement.of(
        HIDDEN,
        3,
        noise_shares=secagg.describe_noise(5, HIDDEN.noise_multiplier, HIDDEN.clipping_norm),
    )
    text = said.text()
    for words in (
        "only its noise",
        "server is not trusted",
        "0.577 to every",
        "any 3 shares",
        "1.29 times",
    ):
        assert words in text, words
    assert said.json()["excluded"][-1].startswith("participation")
    assert "noise_shares" not in Statement.of(HIDDEN, 3).json()
