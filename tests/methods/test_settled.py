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

from fedplan.audits.ledger import verify_lines
from fedplan.errors import FedplanError
from fedplan.federation.agreement import Agreement, require_sound
from fedplan.federation.drift import Sizes
from fedplan.federation.rounds import announced
from fedplan.methods.method import Method
from fedplan.methods.phases import Planned, Settled, Sign
from fedplan.methods.registry import method_named
from fedplan.models.description import describe
from fedplan.privacy import Guarantee, PrivacyError
from fedplan.runners.local import Federation
from fedplan.storage.lines import read_lines
from fedplan.testing import check_method
from fedplan.training.fit import Pace
from fedplan.training.optimisers import sgd

PACE = Pace(sgd(), rate=0.1, batch=2, steps=2)
ALWAYS, SELDOM = 1e30, 1e-30
"""Shares by which any part has settled that clients differ about, and by which none has."""
numbers = st.floats(1e-6, 1e6)


def federation(made: Method, folder: Path, clients: int = 2) -> Federation:
    model = zoo.build("bert")
    agreement = Agreement("settled", describe(model), made, PACE)
    return Federation(agreement, model, few("bert", clients), loss, folder, rounds=4)


def signed(apart: float, step: float, size: float, number: int = 20, phase: str = "") -> Sign:
    return Sign(number, phase, {"query": (apart, step)}, {"query": size})


@given(numbers, numbers, numbers, st.floats(1e-3, 1e3), st.sampled_from(["bend", "chance"]))
def test_it_is_the_same_in_any_unit(
    apart: float, step: float, size: float, unit: float, by: str
) -> None:
    rule = Settled("frozen", ("query",), by=by)
    limit = 0.02 * apart * (apart / size if by == "bend" else 1)
    if abs(step - limit) > 1e-9 * limit:
        assert rule(signed(apart, step, size)) == ("frozen" if step <= limit else "")
        assert rule(signed(*(unit * each for each in (apart, step, size)))) == rule(
            signed(apart, step, size)
        )


@given(numbers, numbers, numbers, st.integers(1, 30))
def test_it_waits_and_then_stays(apart: float, step: float, size: float, number: int) -> None:
    rule = Settled("frozen", share=ALWAYS, least=10)
    assert rule(signed(apart, step, size, number)) == ("frozen" if number > 10 else "")
    assert Settled("frozen", share=SELDOM)(signed(apart, step, size, number)) == ""
    assert rule(signed(apart, step, size, number, "frozen")) == "frozen"
    assert rule(Sign(number, "frozen")) == "frozen"


def test_who_is_alone_or_silent_settles_nothing() -> None:
    rule = Settled("frozen", share=ALWAYS, least=0)
    assert rule(signed(0.0, 0.0, 1.0)) == ""
    assert rule(signed(0.0, 1.0, 1.0)) == ""
    assert rule(Sign(20, drift={"value": (1.0, 0.0)}, sizes={"value": 1.0})) == ""


def test_what_it_says_is_agreed_on() -> None:
    base = Settled("frozen")
    others = [
        *(replace(base, phase="cold"), replace(base, kinds=("query",))),
        *(replace(base, share=0.03), replace(base, least=11), replace(base, by="chance")),
    ]
    assert len({each.text for each in (base, *others)}) == 6
    made = method_named("fedfrozen", {"settle": 0.02, "warmup": 10})
    assert made.announce == base
    assert f"phases {base.text}" in made.lines
    assert method_named("fedfrozen").announce == Planned({"frozen": 10})


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"share": 0.0}, "above 0"),
        ({"share": float("nan")}, "above 0"),
        ({"least": -1}, "0 is at once"),
        ({"kinds": ()}, "no kind"),
        ({"by": "luck"}, "say bend or chance"),
    ],
)
def test_a_rule_that_means_nothing_is_refused(wrong: dict[str, object], said: str) -> None:
    with pytest.raises(FedplanError, match=said):
        replace(Settled("frozen"), **wrong)  # type: ignore[arg-type]


def test_a_part_that_is_no_kind_cannot_settle() -> None:
    with pytest.raises(FedplanError, match="'kernel' is none: join some"):
        method_named("fedfrozen", {"settle": 0.02, "part": "kernel"})


def test_a_rule_without_a_share_is_refused() -> None:
    with pytest.raises(FedplanError, match="if settle is above 0"):
        method_named("fedfrozen", {"warmup": 3, "by": "chance"})


def test_a_stop_changes_nothing(tmp_path: Path) -> None:
    """Each round announces what a server would that reads all of it from the disk."""
    made, phases = method_named("fedfrozen", {"settle": ALWAYS, "warmup": 2}), list[str]()
    for _ in range(4):
        whole = federation(made, tmp_path)
        phases.append(announced(whole.agreement, whole.world).phase)
        whole.commit(whole.round())
        assert whole.world.phase == phases[-1]
    assert phases == ["", "", "frozen", "frozen"]
    lines = read_lines(tmp_path / "ledger.jsonl")
    assert [line["phase"] for line in lines if line["kind"] == "round"] == phases
    assert all(line["phase"] == phases[line["round"] - 1] for line in lines)
    assert not verify_lines(whole.agreement, lines)
    assert not {"query", "key"} & whole.world.drift.keys()


def test_where_it_does_not_settle_it_is_fedavg(tmp_path: Path) -> None:
    one = federation(method_named("fedfrozen", {"settle": SELDOM, "warmup": 0}), tmp_path / "one")
    two = federation(method_named("fedavg"), tmp_path / "two")
    alone = federation(
        method_named("fedfrozen", {"settle": 1.0, "warmup": 0}), tmp_path / "alone", clients=1
    )
    for _ in range(3):
        for each in (one, two, alone):
            each.commit(each.round())
    assert one.world.phase == alone.world.phase == ""
    assert all(torch.equal(v, two.world.values[k]) for k, v in one.world.values.items())


def test_sizes_are_those_of_the_worlds_values() -> None:
    params = describe(zoo.build("gpt-neox"))
    values = {p.key: torch.full((3, 2), 2.0, dtype=torch.bfloat16) for p in params}
    found = Sizes(params, values)
    assert found.keys() == {p.kind for p in params}
    for kind in found:
        assert found[kind] == 24.0 * sum(p.kind == kind for p in params)


@pytest.mark.parametrize("unit", ["client", "example"])
def test_a_guarantee_refuses_it(unit: str) -> None:
    """What it looks at is released by nobody: phases that hide clients are planned."""
    guarantee = Guarantee(unit, 8.0, 1e-5, 1.0, 1.0)  # type: ignore[arg-type]
    with pytest.raises(PrivacyError, match="its phases follow what the clients did"):
        require_sound(guarantee, method_named("fedfrozen", {"settle": 0.02}))


@pytest.mark.parametrize("settle", [ALWAYS, SELDOM])
def test_it_keeps_the_laws(settle: float) -> None:
    made = method_named("fedfrozen", {"settle": settle, "warmup": 1})
    check_method(made, zoo.build("bert"), few("bert"), loss)
