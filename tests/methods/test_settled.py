# SPDX-License-Identifier: Apache-2.0
"""A part settles by what was committed: the rule's formula, and the phase that it announces."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import zoo
from clients import few, loss
from hypothesis import given
from hypothesis import strategies as st

from fedplan.audits.ledger import verify_ledger
from fedplan.errors import FedplanError, PrivacyError
from fedplan.federation.aggregation.drift import SquaredNorms
from fedplan.federation.agreement import Agreement, require_private_method
from fedplan.federation.rounds import announce_phase
from fedplan.methods.method import Method
from fedplan.methods.phases import PhaseContext, PlannedPhases, SettledPhase
from fedplan.methods.registry import method_by_name
from fedplan.models.description import describe
from fedplan.privacy import Guarantee
from fedplan.runners.local import Federation
from fedplan.storage.append_log import read_json_lines
from fedplan.testing import check_method
from fedplan.training.fit import TrainArguments
from fedplan.training.optimizers import sgd

PACE = TrainArguments(sgd(), lr=0.1, batch_size=2, steps=2)
ALWAYS, SELDOM = 1e30, 1e-30
"""Shares by which any part has settled that clients differ about, and by which none has."""
numbers = st.floats(1e-6, 1e6)


def federation(made: Method, folder: Path, clients: int = 2) -> Federation:
    model = zoo.build("bert")
    agreement = Agreement("settled", describe(model), made, PACE)
    return Federation(agreement, model, few("bert", clients), loss, folder, rounds=4)


def signed(
    apart: float, step: float, size: float, number: int = 20, phase: str = ""
) -> PhaseContext:
    return PhaseContext(number, phase, {"query": (apart, step)}, {"query": size})


@given(numbers, numbers, numbers, st.floats(1e-3, 1e3), st.sampled_from(["bend", "chance"]))
def test_it_is_the_same_in_any_unit(
    apart: float, step: float, size: float, unit: float, by: str
) -> None:
    rule = SettledPhase("frozen", ("query",), by=by)
    limit = 0.02 * apart * (apart / size if by == "bend" else 1)
    if abs(step - limit) > 1e-9 * limit:
        assert rule(signed(apart, step, size)) == ("frozen" if step <= limit else "")
        assert rule(signed(*(unit * each for each in (apart, step, size)))) == rule(
            signed(apart, step, size)
        )


@given(numbers, numbers, numbers, st.integers(1, 30))
def test_it_waits_and_then_stays(apart: float, step: float, size: float, number: int) -> None:
    rule = SettledPhase("frozen", threshold=ALWAYS, min_rounds=10)
    assert rule(signed(apart, step, size, number)) == ("frozen" if number > 10 else "")
    assert SettledPhase("frozen", threshold=SELDOM)(signed(apart, step, size, number)) == ""
    assert rule(signed(apart, step, size, number, "frozen")) == "frozen"
    assert rule(PhaseContext(number, "frozen")) == "frozen"


def test_who_is_alone_or_silent_settles_nothing() -> None:
    rule = SettledPhase("frozen", threshold=ALWAYS, min_rounds=0)
    assert rule(signed(0.0, 0.0, 1.0)) == ""
    assert rule(signed(0.0, 1.0, 1.0)) == ""
    assert rule(PhaseContext(20, drift={"value": (1.0, 0.0)}, sizes={"value": 1.0})) == ""


def test_what_it_says_is_agreed_on() -> None:
    base = SettledPhase("frozen")
    others = [
        *(replace(base, phase="cold"), replace(base, kinds=("query",))),
        *(replace(base, threshold=0.03), replace(base, min_rounds=11), replace(base, by="chance")),
    ]
    assert len({each.text for each in (base, *others)}) == 6
    made = method_by_name("fedfrozen", {"settle": 0.02, "warmup": 10})
    assert made.phase_rule == base
    assert f"phases {base.text}" in made.lines
    assert method_by_name("fedfrozen").phase_rule == PlannedPhases({"frozen": 10})


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"threshold": 0.0}, "above 0"),
        ({"threshold": float("nan")}, "above 0"),
        ({"min_rounds": -1}, "give 0 or more"),
        ({"kinds": ()}, "no kind"),
        ({"by": "luck"}, "use bend or chance"),
    ],
)
def test_a_rule_that_means_nothing_is_refused(wrong: dict[str, object], said: str) -> None:
    with pytest.raises(FedplanError, match=said):
        replace(SettledPhase("frozen"), **wrong)  # type: ignore[arg-type]


def test_a_part_that_is_no_kind_cannot_settle() -> None:
    with pytest.raises(FedplanError, match="'kernel' is none: join some"):
        method_by_name("fedfrozen", {"settle": 0.02, "part": "kernel"})


def test_a_rule_without_a_share_is_refused() -> None:
    with pytest.raises(FedplanError, match="if settle is above 0"):
        method_by_name("fedfrozen", {"warmup": 3, "by": "chance"})


def test_a_stop_changes_nothing(tmp_path: Path) -> None:
    """Each round announces what a server would that reads all of it from the disk."""
    made, phases = method_by_name("fedfrozen", {"settle": ALWAYS, "warmup": 2}), list[str]()
    for _ in range(4):
        whole = federation(made, tmp_path)
        phases.append(announce_phase(whole.agreement, whole.global_state).phase)
        whole.commit(whole.run_round())
        assert whole.global_state.phase == phases[-1]
    assert phases == ["", "", "frozen", "frozen"]
    lines = read_json_lines(tmp_path / "ledger.jsonl")
    assert [line["phase"] for line in lines if line["kind"] == "round"] == phases
    assert all(line["phase"] == phases[line["round"] - 1] for line in lines)
    assert not verify_ledger(whole.agreement, lines)
    assert not {"query", "key"} & whole.global_state.drift.keys()


def test_where_it_does_not_settle_it_is_fedavg(tmp_path: Path) -> None:
    one = federation(method_by_name("fedfrozen", {"settle": SELDOM, "warmup": 0}), tmp_path / "one")
    two = federation(method_by_name("fedavg"), tmp_path / "two")
    alone = federation(
        method_by_name("fedfrozen", {"settle": 1.0, "warmup": 0}), tmp_path / "alone", clients=1
    )
    for _ in range(3):
        for each in (one, two, alone):
            each.commit(each.run_round())
    assert one.global_state.phase == alone.global_state.phase == ""
    assert all(
        torch.equal(v, two.global_state.values[k]) for k, v in one.global_state.values.items()
    )


def test_sizes_are_those_of_the_worlds_values() -> None:
    params = describe(zoo.build("gpt-neox"))
    values = {p.key: torch.full((3, 2), 2.0, dtype=torch.bfloat16) for p in params}
    found = SquaredNorms(params, values)
    assert found.keys() == {p.kind for p in params}
    for kind in found:
        assert found[kind] == 24.0 * sum(p.kind == kind for p in params)


@pytest.mark.parametrize("unit", ["client", "example"])
def test_a_guarantee_refuses_it(unit: str) -> None:
    """What it looks at is released by nobody: phases that hide clients are planned."""
    guarantee = Guarantee(unit, 8.0, 1e-5, 1.0, 1.0)  # type: ignore[arg-type]
    with pytest.raises(PrivacyError, match="its phases depend on the clients' updates"):
        require_private_method(guarantee, method_by_name("fedfrozen", {"settle": 0.02}))


@pytest.mark.parametrize("settle", [ALWAYS, SELDOM])
def test_it_keeps_the_laws(settle: float) -> None:
    made = method_by_name("fedfrozen", {"settle": settle, "warmup": 1})
    check_method(made, zoo.build("bert"), few("bert"), loss)
