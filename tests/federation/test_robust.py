# SPDX-License-Identifier: Apache-2.0
"""A defence bounds what one client can do to a round, whatever it sends and whenever it comes."""

from __future__ import annotations

import logging
from dataclasses import replace
from fractions import Fraction
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from clients import GUARANTEES, few, loss
from hypothesis import example, given, settings
from hypothesis import strategies as st
from liars import let_lie
from often import first, often
from torch import Tensor

from fedplan.audits.ledger import verify_ledger
from fedplan.errors import FedplanError
from fedplan.federation.aggregation.defence import RULES, Defence
from fedplan.federation.aggregation.mean import MeanAggregator
from fedplan.federation.aggregation.protocol import AggregationResult
from fedplan.federation.aggregation.robust import (
    BufferedAggregator,
    apply_robust_rule,
    cap_weights,
    clip_updates,
    reference_norms,
    select_by_krum,
    squared_distances_by_client,
    trimmed_mean,
    update_norms,
)
from fedplan.federation.agreement import Agreement
from fedplan.federation.ledger.history import DRIFT_WINDOW, make_warnings, recent_drifts
from fedplan.federation.ledger.records import RoundRecord, TurnRecord
from fedplan.federation.messages import UpdateRejected
from fedplan.language.parser import parse
from fedplan.methods.method import Method
from fedplan.methods.registry import method_by_name
from fedplan.models.description import describe
from fedplan.runners.local import Federation
from fedplan.storage.append_log import read_json_lines
from fedplan.studies.schema import ConfigError, study_from_dict
from fedplan.tensors.compression import parse_codec
from fedplan.tensors.named import digests
from fedplan.training.fit import TrainArguments

PACE = TrainArguments(lr=1e-2, batch_size=2, steps=2)
MODEL = zoo.build("bert")
PARAMS = describe(MODEL)
KEYS = ("classifier.weight", "classifier.bias", "bert.pooler.dense.bias")
BASE = {key: value.detach().clone() for key, value in MODEL.named_parameters() if key in KEYS}
NAMES = ("a", "b", "c", "d", "e")
DEFENCES = [
    Defence(max_weight=9, max_weight_fraction=0.4, max_norm_ratio=1.1),
    Defence(rule="multi-krum", max_norm_ratio=1.5),
    Defence(rule="median"),
    Defence(max_weight=7),
    Defence(max_weight_fraction=0.3),
    Defence(max_norm_ratio=1.5),
    *(Defence(rule=rule) for rule in RULES if rule not in ("mean", "median")),
    *(Defence(rule=r, max_norm_ratio=1.5) for r in RULES if r not in ("mean", "multi-krum")),
]
Sent = dict[str, dict[str, Tensor]]


def agreed(defence: Defence, *, absent: bool = False) -> Agreement:
    made = replace(method_by_name("fedavg"), absent=absent)
    return Agreement("robust", PARAMS, made, PACE, defence=defence)


def sent(seed: int, *, parts: bool = False) -> Sent:
    """What five clients send; with `parts`, not all of them the same."""
    draw = torch.Generator().manual_seed(seed)
    found = {
        name: {k: v + torch.randn(v.shape, generator=draw) / 8 for k, v in BASE.items()}
        for name in NAMES
    }
    for name, key in (("a", KEYS[0]), ("b", KEYS[1]), ("c", KEYS[1])) if parts else ():
        del found[name][key]
    return found


def closed(agreement: Agreement, found: Sent, weights: dict[str, int]) -> AggregationResult:
    """A round in which updates come in this order."""
    kind = BufferedAggregator if agreement.defence.buffers_updates else MeanAggregator
    total = kind(agreement, BASE, len(NAMES))
    for client, values in found.items():
        total.require(values, {}, weights[client])
        total.add(client, values, {}, weights[client])
    return total.close()


def told(outcome: AggregationResult) -> object:
    return digests(outcome.means), outcome.drift, outcome.defence


@pytest.mark.parametrize("defence", DEFENCES, ids=lambda d: d.text)
@given(st.integers(0, 2**31), st.booleans(), st.booleans(), st.permutations(NAMES))
@settings(max_examples=often(400) // 5)
def test_who_comes_first_changes_no_bit(
    defence: Defence, seed: int, parts: bool, absent: bool, order: list[str]
) -> None:
    found, agreement = sent(seed, parts=parts), agreed(defence, absent=absent)
    weights = {name: 1 + seed % (11 * i + 2) for i, name in enumerate(NAMES)}
    one = closed(agreement, found, weights)
    other = closed(agreement, {name: found[name] for name in order}, weights)
    assert told(one) == told(other)


@given(st.integers(0, 2**31), st.booleans(), st.booleans())
@settings(max_examples=often(400))
def test_bounds_that_nobody_reaches_leave_the_bits_of_the_plain_mean(
    seed: int, parts: bool, absent: bool
) -> None:
    found = sent(seed, parts=parts)
    weights = {name: 1 + (seed >> i) % 9 for i, name in enumerate(NAMES)}
    plain = closed(agreed(Defence(), absent=absent), found, weights)
    for idle in (Defence(max_weight_fraction=0.99, max_norm_ratio=1e9), Defence(max_weight=10)):
        held = closed(agreed(idle, absent=absent), found, weights)
        assert digests(held.means) == digests(plain.means) and held.drift == plain.drift
        assert held.defence and not held.defence.capped and not held.defence.clipped
    assert plain.defence is None


NUMBERS = st.floats(-(2.0**40), 2.0**40, width=32)


@given(st.lists(st.lists(NUMBERS, min_size=3, max_size=3), min_size=5, max_size=5))
@settings(max_examples=often(1000))
def test_one_client_of_five_leads_no_number_out_of_the_range_of_the_others(
    rows: list[list[float]],
) -> None:
    tensors = [torch.tensor(row) for row in rows]
    others = torch.stack(tensors[1:])
    low, high = others.min(dim=0).values, others.max(dim=0).values
    for trim in (1, 2):
        made = trimmed_mean(tensors, trim)
        assert bool((low <= made).all() and (made <= high).all())
    assert torch.equal(trimmed_mean(tensors, 2), torch.stack(tensors).median(dim=0).values)


@given(st.integers(0, 2**31), st.floats(30.0, 1e6), st.integers(1, 2))
@settings(max_examples=often(400))
def test_krum_takes_nothing_of_who_is_far(seed: int, far: float, liars: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    count = 2 * liars + 3
    values = {f"c{i}": {"x": torch.randn(9, generator=draw)} for i in range(count)}
    for i in range(liars):  # who lie together, and lie close to each other
        values[f"c{i}"] = {"x": values[f"c{i}"]["x"] / 100 + far}
    false = {f"c{i}" for i in range(liars)}
    for take in (1, count - liars):
        taken = select_by_krum(values, ["x"], liars, take)
        assert len(taken) == take and not false & set(taken)
    for rule in RULES[1:]:
        made = apply_robust_rule(Defence(rule=rule, malicious_clients=liars), values)
        assert false <= set(made.distance) and made.undefended == 0
        assert float(made.means["x"].abs().max()) < 10
        assert set(made.excluded) >= false or "krum" not in rule


def test_krum_sums_the_distances_to_all_but_the_liars_and_two() -> None:
    """Of five with a liar, to the two nearest: by one more or one less another is taken."""
    places = {"a": 9.0, "b": 3.0, "c": 8.0, "d": 2.0, "e": 4.0}
    values = {name: {"x": torch.tensor([place])} for name, place in places.items()}
    assert select_by_krum(values, ["x"], liars=1, count=1) == ["b"]


def test_the_median_is_krums_neighbour_where_all_agree() -> None:
    """What all send alike is what every rule makes of it, to the bit."""
    values = {name: BASE for name in NAMES}
    for rule in RULES[1:]:
        assert digests(apply_robust_rule(Defence(rule=rule), values).means) == digests(BASE)


WEIGHTS = st.dictionaries(st.sampled_from(NAMES), st.integers(1, 2**27), min_size=1)


@given(WEIGHTS, st.floats(0.01, 0.99))
@example({"a": 2, "b": 1, "c": 1}, 0.5)  # just at its share
@settings(max_examples=often(1000))
def test_no_weight_is_above_its_share_and_none_is_cut_without_need(
    weights: dict[str, int], share: float
) -> None:
    found, part = cap_weights(weights, share), Fraction(share)
    total, most = sum(found.values()), max(found.values())
    if part * len(weights) < 1:
        assert set(found.values()) == {1}
        return
    assert all(weight <= part * total for weight in found.values())
    assert all(found[c] == min(weights[c], most) for c in weights)
    if found != weights:
        more = sum(min(weight, most + 1) for weight in weights.values())
        assert most + 1 > part * more


@given(st.integers(0, 2**31), st.floats(1.0, 4.0), st.floats(1.0, 1e9), st.booleans())
@settings(max_examples=often(400))
def test_no_change_is_longer_than_its_bound_and_keeps_its_direction(
    seed: int, times: float, scale: float, parts: bool
) -> None:
    found = sent(seed, parts=parts)
    found["e"] = {k: (v - BASE[k]) * scale + BASE[k] for k, v in found["e"].items()}
    values, clipped = clip_updates(found, BASE, times)
    squares = squared_distances_by_client(found, BASE)
    most = {name: times * length for name, length in reference_norms(squares).items()}
    for name, length in update_norms(squared_distances_by_client(values, BASE)).items():
        assert length <= most[name] * (1 + 1e-5) + 1e-6
        assert (name in clipped) == (update_norms(squares)[name] > most[name])
        if name not in clipped:
            assert values[name] is found[name]
    # Of five, one alone does not move what is usual beyond what some other has.
    others = {name: each for name, each in squares.items() if name != "e"}
    for key in KEYS:
        sent_by = [each[key] for each in others.values() if key in each]
        if len(sent_by) >= 2:
            alone = reference_norms(
                {name: {key: each[key]} for name, each in squares.items() if key in each}
            )
            assert alone["e"] ** 2 <= max(sent_by) * (1 + 1e-12)


def test_a_weight_of_two_to_the_27_owns_the_mean_and_no_rule() -> None:
    found, weights = sent(3), dict.fromkeys(NAMES, 100) | {"e": 2**27}
    honest = {name: found[name] for name in NAMES[:4]}
    alone = closed(agreed(Defence()), honest, weights)

    def far(defence: Defence) -> float:
        outcome = closed(agreed(defence), found, weights)
        return max(float((outcome.means[k] - alone.means[k]).norm()) for k in KEYS)

    owned = far(Defence())
    liar = max(float((found["e"][k] - alone.means[k]).norm()) for k in KEYS)
    assert owned > 0.999 * liar
    assert far(Defence(max_weight_fraction=0.2)) < 0.21 * liar
    assert far(Defence(max_weight=100)) < 0.21 * liar
    done = closed(agreed(Defence(max_weight_fraction=0.2)), found, weights).defence
    assert done and done.capped == {"e": (2**27, 100)}


def test_a_cap_is_among_those_who_sent_a_param() -> None:
    """With one other who sent it, nobody may have less than half; over all it would be owned."""
    found = sent(1)
    for name in ("a", "b", "c"):
        del found[name][KEYS[1]]
    weights = dict.fromkeys(NAMES, 10) | {"e": 2**27}
    means = closed(agreed(Defence(max_weight_fraction=0.4)), found, weights).means
    assert torch.allclose(means[KEYS[1]], (found["d"][KEYS[1]] + found["e"][KEYS[1]]) / 2)


def test_what_no_others_could_be_added_to_is_refused_in_any_order() -> None:
    large = {"a": {KEYS[0]: torch.full_like(BASE[KEYS[0]], 2.0**23)}}
    for defence, weight in (
        (Defence(max_norm_ratio=2.0), 2**27),
        (Defence(max_weight_fraction=0.5), 2**27),
    ):
        total = BufferedAggregator(agreed(defence), BASE, 5)
        with pytest.raises(UpdateRejected, match="too large to be summed with other updates"):
            total.require(large["a"], {}, weight)
        total.require(large["a"], {}, 1)


SPARSE = replace(method_by_name("fedavg"), compression=parse_codec("pipe(delta(), topk(0.1))"))


@pytest.mark.parametrize(
    ("defence", "method", "guarantee", "words"),
    [
        (
            Defence(rule="krum"),
            method_by_name("fedavg"),
            "veiled",
            "clips each update and weighs all alike",
        ),
        (
            Defence(max_weight=1),
            method_by_name("fedavg"),
            "weighed",
            "clips each update and weighs all alike",
        ),
        (
            Defence(max_weight_fraction=0.5),
            method_by_name("fedavg"),
            "cloaked",
            "all clients weigh alike",
        ),
        (Defence(rule="median"), method_by_name("scaffold"), "", "auxiliary tensors"),
        (Defence(max_norm_ratio=2.0), method_by_name("scaffold"), "", "auxiliary tensors"),
        (Defence(rule="median"), SPARSE, "", "of each number is no change"),
        (Defence(rule="trimmed-mean"), SPARSE, "", "of each number is no change"),
    ],
)
def test_what_does_not_hold_together_is_refused(
    defence: Defence, method: Method, guarantee: str, words: str
) -> None:
    said = GUARANTEES.get(guarantee)
    with pytest.raises(FedplanError, match=words):
        Agreement("refused", PARAMS, method, PACE, said, defence=defence)


def test_a_rule_needs_the_sides_apart() -> None:
    made = method_by_name("fedex-lora", {"rank": 2})
    assert made.adapt is not None
    params = describe(made.adapt(zoo.build("bert")))
    with pytest.raises(FedplanError, match="needs the mean of the clients' products"):
        Agreement("refused", params, made, PACE, defence=Defence(rule="median"))
    Agreement(
        "fine", params, made, PACE, defence=Defence(max_weight_fraction=0.5, max_norm_ratio=2.0)
    )


def test_explain_says_what_the_server_holds() -> None:
    assert not agreed(Defence(max_weight=9)).wire_cost.text
    size = sum(p.nbytes for p in PARAMS) / 1e6
    said = agreed(Defence(rule="median")).wire_cost.text
    assert "keeps all updates of a round" in said and f"up to {size:.1f} MB a client" in said


def test_examples_that_are_hidden_go_with_a_rule() -> None:
    guarantee = GUARANTEES["cloaked"]
    Agreement("fine", PARAMS, method_by_name("fedavg"), PACE, guarantee, defence=Defence("median"))


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"rule": "mode"}, "defence.rule: .*mode"),
        ({"rule": "krum", "max_weight_fraction": 0.5}, "counts all clients alike"),
        ({"max_norm_ratio": 0.5}, "1 or more; 0 is no bound"),
        ({"max_weight_fraction": 1.0}, "defence.max_weight_fraction"),
        ({"malicious_clients": 0}, "defence.malicious_clients"),
    ],
)
def test_a_study_says_what_is_wrong_with_its_defence(said: dict[str, Any], words: str) -> None:
    study: dict[str, Any] = {
        "model": {"type": "vit"},
        "task": {"kind": "masked-lm"},
        "data": {"path": "rows.parquet"},
        "method": {"plan": "share()"},
    }
    assert study_from_dict(study | {"defence": {}}) == study_from_dict(study)
    with pytest.raises(ConfigError, match=words):
        study_from_dict(study | {"defence": said})


PLAN = 'chain(freeze(), by("site", {"a": share(value)}, share(value | head)))'


def federation(folder: Path, defence: Defence) -> Federation:
    model = zoo.build("bert")
    agreement = Agreement("lies", describe(model), Method(parse(PLAN)), PACE, defence=defence)
    traits = {"client-1": {"site": "a"}}
    return Federation(agreement, model, few("bert", 5), loss, folder, rounds=9, traits=traits)


def rounds_of(folder: Path) -> list[dict[str, Any]]:
    return [line for line in read_json_lines(folder / "ledger.jsonl") if line["kind"] == "round"]


@pytest.mark.parametrize("defence", first(5, [Defence(), *DEFENCES]), ids=lambda d: d.text)
def test_the_ledger_tells_what_was_done_and_verify_works_it_out_again(
    defence: Defence, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    fed = federation(tmp_path, defence)
    fed.commit(fed.run_round())
    let_lie(monkeypatch, {"client-4"}, lambda value: value * -100, 2**27)
    with caplog.at_level(logging.WARNING, "fedplan"):
        for _ in range(2):
            fed.commit(fed.run_round())
    lines = read_json_lines(tmp_path / "ledger.jsonl")
    assert not verify_ledger(fed.agreement, lines)
    last = rounds_of(tmp_path)[-1]
    assert "client-4 reports 1.000 of the round's weight" in last["warnings"]
    assert "round 3: client-4 reports 1.000 of the round's weight" in caplog.text
    assert fed.server.history[-1]["warnings"] == len(last["warnings"])
    if not defence.active:
        assert "defence" not in last
        return
    done = last["defence"]
    assert ("client-4" in done["capped"]) == bool(defence.max_weight or defence.max_weight_fraction)
    assert ("client-4" in done["clipped"]) == bool(defence.max_norm_ratio)
    if defence.rule != "mean":
        assert list(done["distance"]) == (
            ["client-4"] if not defence.max_norm_ratio else [*done["distance"]]
        )
        assert ("client-4" in done["excluded"]) == ("krum" in defence.rule)
    for change in (
        lambda r: r.pop("defence"),
        lambda r: r["defence"]["capped"].update({"client-0": [9, 1]}),
        lambda r: r["defence"]["distance"].update({"nobody": 9.0}),
        lambda r: r["defence"]["clipped"].update({"client-0": [1.0, 2.0]}),
        lambda r: r.pop("warnings"),
    ):
        changed = read_json_lines(tmp_path / "ledger.jsonl")
        change(changed[-1])
        assert verify_ledger(fed.agreement, changed)


def test_a_rule_that_too_few_clients_stand_behind_says_so(tmp_path: Path) -> None:
    fed = federation(tmp_path, Defence(rule="krum", malicious_clients=1))
    fed.commit(fed.run_round())
    (last,) = rounds_of(tmp_path)
    assert last["defence"]["undefended"] == 4  # the pooler and the head, which four of five send
    assert (
        "4 params came from too few clients for the rule to tolerate a malicious client"
        in last["warnings"]
    )


TURN = TurnRecord(1, "a", "", {}, "S", "0" * 16, "1" * 16, 0, 0, 1, 1, 0.5, None, False)
WHOLE = RoundRecord(1, "", NAMES, {}, {}, {}, 0, 0)


@pytest.mark.parametrize(
    ("weights", "warned"),
    [
        ((1, 1, 1, 1, 1), False),
        ((9, 8, 8, 8, 1), False),
        ((100, 1, 1, 1, 1), True),
        ((100, 99, 1, 1, 1), False),
        ((7,), False),
        ((7, 2), False),
        ((9, 2), True),
    ],
)
def test_one_who_says_most_of_the_weight_is_named(weights: tuple[int, ...], warned: bool) -> None:
    turns = [replace(TURN, client=n, weight=w) for n, w in zip(NAMES, weights, strict=False)]
    for order in (turns, turns[::-1]):
        said = make_warnings(WHOLE, order, recent_drifts(()))
        assert bool(said) == warned and all(each.startswith("a reports 0.") for each in said)


def test_a_jump_of_the_drift_is_named_by_its_kind() -> None:
    calm = [replace(WHOLE, round=i + 1, drift={"mlp": (1.0, 0.1)}) for i in range(9)]
    drifts, wild = (
        recent_drifts(calm),
        replace(WHOLE, drift={"mlp": (5.1, 0.1), "head": (9.0, 0.1)}),
    )
    assert len(drifts) == DRIFT_WINDOW
    said = make_warnings(wild, [], drifts)
    assert said == ("the drift of mlp is 5.1 times that of the last rounds",)
    assert not make_warnings(replace(wild, drift={"mlp": (4.9, 0.1)}), [], drifts)
    assert not make_warnings(wild, [], recent_drifts(calm[:2]))


def test_all_orders_of_five_with_a_liar_make_one_world() -> None:
    found, weights = sent(7), dict.fromkeys(NAMES, 9) | {"c": 2**27}
    found["c"] = {k: -100 * v for k, v in found["c"].items()}
    for defence in (
        Defence(rule="multi-krum"),
        Defence(max_weight_fraction=0.3, max_norm_ratio=2.0),
    ):
        worlds = [
            told(closed(agreed(defence), {name: found[name] for name in order}, weights))
            for order in list(permutations(NAMES))[::17]
        ]
        assert all(global_state == worlds[0] for global_state in worlds)
