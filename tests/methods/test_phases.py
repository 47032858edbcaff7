# SPDX-License-Identifier: Apache-2.0
"""Phases are announced, kept with the world, and end what they freeze for good."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import zoo
from clients import few, loss
from hypothesis import given
from hypothesis import strategies as st

from fedplan.audits.ledger import verify_ledger
from fedplan.errors import FedplanError
from fedplan.federation.aggregation.mean import MeanAggregator
from fedplan.federation.aggregation.protocol import AggregationResult
from fedplan.federation.agreement import Agreement
from fedplan.federation.rounds import RoundState
from fedplan.language.parser import parse
from fedplan.methods.method import Method
from fedplan.methods.phases import PhaseContext, PlannedPhases
from fedplan.methods.registry import method_by_name
from fedplan.methods.server_optimizer import mean
from fedplan.models.description import describe
from fedplan.runners.local import Federation
from fedplan.storage.append_log import read_json_lines
from fedplan.testing import check_method
from fedplan.training.fit import TrainArguments
from fedplan.training.optimizers import sgd
from fedplan.training.probes import get_probe

PACE = TrainArguments(sgd(), lr=0.1, batch_size=2, steps=2)


def federation(
    made: Method, folder: Path, architecture: str = "bert", rounds: int = 4, clients: int = 2
) -> Federation:
    model = zoo.build(architecture)
    agreement = Agreement("phases", describe(model), made, PACE)
    return Federation(agreement, model, few(architecture, clients), loss, folder, rounds=rounds)


@given(st.dictionaries(st.text(min_size=1, max_size=3), st.integers(0, 9), max_size=4))
def test_planned_phases_come_in_order_and_stay(after: Mapping[str, int]) -> None:
    if len(set(after.values())) < len(after):
        with pytest.raises(FedplanError, match="same round"):
            PlannedPhases(after)
        return
    rule = PlannedPhases(after)
    found = [rule(PhaseContext(number)) for number in range(1, 12)]
    assert [name for name in dict.fromkeys(found) if name] == list(rule.phases)
    assert all(found[after[name]] == name for name in rule.phases)


class WhenApart:
    """Freeze once the clients' changes of the kernel are further apart than their step."""

    phases = ("frozen",)

    def __call__(self, sign: PhaseContext) -> str:
        apart, step = sign.drift.get("query", (0.0, 1.0))
        return "frozen" if sign.phase or apart > 0.01 * step else ""


def test_a_rule_that_looks_at_drift_sets_the_phase_and_it_survives_a_stop(tmp_path: Path) -> None:
    made = replace(method_by_name("fedfrozen"), phase_rule=WhenApart())
    whole = federation(made, tmp_path)
    seen = list[str]()
    for _ in range(2):
        whole.commit(whole.run_round())
        seen.append(whole.global_state.phase)
    again = federation(made, tmp_path)
    assert again.global_state.drift == whole.global_state.drift
    for _ in range(2):
        again.commit(again.run_round())
        seen.append(again.global_state.phase)
    assert seen == ["", "frozen", "frozen", "frozen"]


@pytest.mark.parametrize("inner", ["fedprox", "scaffold", "fedadam", "fedyogi"])
@pytest.mark.parametrize("architecture", ["bert", "gpt-neox"])
def test_the_freeze_ends_the_kernels_state_in_every_optimizer(
    inner: str, architecture: str, tmp_path: Path
) -> None:
    made = method_by_name("fedfrozen", {"warmup": 2}).with_training_of(method_by_name(inner))
    whole = federation(made, tmp_path, architecture)
    kernel = {p.key for p in whole.agreement.params if p.kind in ("query", "key")}
    adaptive = made.server_optimizer != mean()
    held: dict[str, torch.Tensor] = {}
    for number in range(1, 5):
        round_state = whole.run_round()
        whole.commit(round_state)
        down = {k.split("#")[0] for d in round_state.cohort.values() for k in d.values}
        if number == 2:
            assert not adaptive or kernel <= whole.global_state.memory.keys()
            held = {k: whole.global_state.values[k] for k in kernel}
        if number > 2:
            assert not kernel & whole.global_state.memory.keys()
            assert not kernel & set(whole.global_state.drift)
            assert all(torch.equal(held[k], whole.global_state.values[k]) for k in kernel)
            # What froze comes down a last time, in its final form, and never again.
            assert kernel <= down if number == 3 else not kernel & down
    assert not verify_ledger(whole.agreement, read_json_lines(tmp_path / "ledger.jsonl"))


def test_a_late_joiner_gets_the_final_kernel_once(tmp_path: Path) -> None:
    whole = federation(method_by_name("fedfrozen", {"warmup": 1}), tmp_path, rounds=5, clients=3)
    kernel = {p.key for p in whole.agreement.params if p.kind in ("query", "key")}
    late, asked = whole.server.roster.pop("client-2"), list[RoundState]()
    for number in range(1, 6):
        if number == 3:
            whole.server.roster["client-2"] = late
        asked.append(whole.run_round())
        whole.commit(asked[-1])
    came = [kernel & set(t.cohort["client-2"].values) for t in asked[2:]]
    assert came == [kernel, set(), set()]
    final = asked[2].cohort["client-2"].values
    assert all(torch.equal(final[k], whole.global_state.values[k]) for k in kernel)


@pytest.mark.parametrize("inner", ["fedprox", "scaffold", "fedadam"])
@pytest.mark.parametrize("reading", ["A", "B"])
def test_both_readings_keep_the_laws_inside_other_methods(inner: str, reading: str) -> None:
    made = method_by_name("fedfrozen", {"warmup": 1, "reading": reading}).with_training_of(
        method_by_name(inner)
    )
    check_method(made, zoo.build("phi3"), few("phi3"), loss)


def test_all_choose_together_and_less_comes_down(tmp_path: Path) -> None:
    whole = federation(
        method_by_name("safl", {"k": 1, "joint_choice": True}), tmp_path, "vit", clients=3
    )
    rounds = list[RoundState]()
    for _ in range(3):
        rounds.append(whole.run_round())
        whole.commit(rounds[-1])
    for round_state in rounds:
        assert len({line.roles for line in round_state.records.values()}) == 1
    lines = read_json_lines(tmp_path / "ledger.jsonl")
    assert not verify_ledger(whole.agreement, lines)
    lines[1]["scores"] = [[*block, -score] for *block, score in lines[1]["scores"]]
    assert any("other scores" in fault for fault in verify_ledger(whole.agreement, lines))
    # One choice is one block a round, and the head.
    one = sum(p.nbytes for p in whole.agreement.exchanged if p.block in (0, None))
    assert all(d.nbytes <= one for d in rounds[-1].cohort.values())


def test_who_did_not_send_counts_as_unchanged_if_absent_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    close, sums = MeanAggregator.close, list[tuple[dict[str, int], int]]()

    def told(total: MeanAggregator) -> AggregationResult:
        sums.append((total.values.weights(), total.weight))
        return close(total)

    monkeypatch.setattr(MeanAggregator, "close", told)
    both = {
        absent: federation(method_by_name("safl", {"k": 1, "probe": "random", "absent": absent}),
                           tmp_path / str(absent), "vit", clients=4)
        for absent in (False, True)
    }  # fmt: skip
    start = dict(both[True].global_state.values)
    for each in both.values():
        each.run_round()
    (weights, whole) = sums[-1]
    parted = {k for k in weights if weights[k] < whole}
    assert parted, "every block was chosen by all: take another seed"
    for key in weights:
        full = both[False].global_state.values[key] - start[key]
        part = both[True].global_state.values[key] - start[key]
        share = weights[key] / whole
        assert torch.allclose(part, full * share, atol=1e-6), key


def test_a_client_with_less_room_chooses_fewer_blocks(tmp_path: Path) -> None:
    plan = parse('chain(freeze(), share(head), by("capacity", {"small": best(1)}, best(2)))')
    model = zoo.build("vit")
    agreement = Agreement(
        "phases", describe(model), Method(plan, probe=get_probe("attention")), PACE
    )
    traits = {"client-1": {"capacity": "small"}}
    rows = few("vit", 3)
    whole = Federation(agreement, model, rows, loss, tmp_path, rounds=2, traits=traits)
    round_state = whole.run_round()
    whole.commit(round_state)
    assert not round_state.rejected
    up = {name: line.upload_bytes for name, line in round_state.records.items()}
    assert up["client-1"] < up["client-0"] == up["client-2"]
    assert not verify_ledger(agreement, read_json_lines(tmp_path / "ledger.jsonl"))


def test_a_vote_that_is_no_number_is_left_out(tmp_path: Path) -> None:
    whole = federation(
        method_by_name("safl", {"k": 1, "joint_choice": True, "probe": "last"}), tmp_path
    )
    made = whole.agreement.method
    broken = replace(made, probe=lambda look: {block: float("nan") for block in look.blocks})
    round_state = whole.server.begin_round()
    whole.poll_clients(round_state)
    assert all(d.turn.scores for d in round_state.cohort.values())
    whole.server.agreement = replace(whole.agreement, method=broken)
    with pytest.raises(FedplanError, match="no layers can be chosen"):
        whole.poll_clients(whole.server.begin_round())
