# SPDX-License-Identifier: Apache-2.0
"""Explanations: the published figures, the same from the library and the command line."""

from __future__ import annotations

import json
import time

import pytest
import zoo
from typer.testing import CliRunner

import fedplan as fp
from fedplan.catalog import SHORT, skeleton
from fedplan.cli import app
from fedplan.forecast import forecast
from fedplan.plan import Role
from fedplan.views import Stage

FEDFROZEN = "chain(share(), when(after(20), freeze(query | key)))"
SAFL = "chain(freeze(), best(8))"
FIGURES = [
    ("vit-base-16", FEDFROZEN, 16.5),
    ("bert-base", FEDFROZEN, 12.9),
    ("llama-3.2-1b", SAFL, 60.6),
    ("clip-vit-base-16", FEDFROZEN, 13.7),
]


def last_stage(plan: str, name: str) -> Stage:
    return fp.explain(fp.parse(plan), fp.params_of(name)).forecast.views[0].stages[-1]


@pytest.mark.parametrize(("name", "plan", "saved"), FIGURES)
def test_the_published_figures_from_the_library_and_the_command_line(
    name: str, plan: str, saved: float
) -> None:
    explanation = fp.explain(fp.parse(plan), skeleton(name))
    ours = explanation.json()["clients"][0]["stages"][-1]["saved"]
    assert round(100 * ours, 1) == saved
    started = time.monotonic()
    printed = CliRunner().invoke(app, ["explain", name, plan, "--json"])
    assert time.monotonic() - started < 3
    assert json.loads(printed.stdout) == json.loads(json.dumps(explanation.json()))
    assert f"{saved} %" in str(explanation)


def test_each_byte_of_the_upload_is_in_one_row() -> None:
    for name in SHORT:
        view = fp.explain(fp.parse("chain(share(), keep(norm))"), fp.params_of(name))
        (who,) = view.json()["clients"]
        for stage in who["stages"]:
            assert sum(row["bytes_up"] for row in stage["parts"]) == stage["bytes_up"]
            assert sum(row["params"] for row in stage["parts"]) == view.json()["params"]


@pytest.mark.parametrize("name", zoo.ARCHITECTURES)
def test_bytes_are_those_of_the_shared_params(name: str) -> None:
    params = fp.describe(zoo.build(name))
    plan = fp.parse("chain(share(), keep(norm), freeze(mlp))")
    stage = forecast(plan, params).views[0].stages[0]
    roles = fp.resolve(plan, params, fp.Turn())
    assert stage.up == sum(p.nbytes for p in params if roles[p] is Role.SHARE) == stage.down
    assert stage.optimiser == 2 * sum(p.nbytes for p in params if roles[p].trained)


def test_totals_are_the_sum_over_rounds() -> None:
    params = fp.params_of("vit-base-16")
    view = forecast(fp.parse(FEDFROZEN), params, rounds=50).views[0]
    full, kernel = (
        sum(p.nbytes for p in params),
        sum(p.nbytes for p in params if "kernel" in p.words),
    )
    assert view.up == 20 * full + 30 * (full - kernel)
    assert view.first == full
    # What a round moves comes back with the next: the last round's change is not fetched.
    assert view.down == view.first + 20 * full + 29 * (full - kernel)


def test_a_phase_is_a_stage_of_its_own_until_it_has_a_date() -> None:
    plan = fp.parse('chain(share(), when(phase("frozen"), freeze(query)))')
    params = fp.params_of("bert-base")
    open_ended = forecast(plan, params)
    assert [s.name for s in open_ended.views[0].stages] == ["rounds 1-100", 'phase "frozen"']
    assert 'phase "frozen"' in open_ended.notes[0]
    dated = forecast(plan, params, phases={"frozen": 20})
    assert [s.name for s in dated.views[0].stages] == ["rounds 1-20", "rounds 21-100"]
    assert dated.notes == ()
    with pytest.raises(fp.PlanError, match="no phase 'frosen'"):
        forecast(plan, params, phases={"frosen": 20})


def test_clients_that_a_plan_tells_apart_are_explained_apart() -> None:
    plan = fp.parse('chain(freeze(), by("capacity", {"small": best(2)}, best(6)), keep(head))')
    views = forecast(plan, fp.params_of("bert-base")).views
    assert [v.who for v in views] == ["capacity small", "any other client"]
    small, other = (v.stages[0] for v in views)
    assert (3 * small.up, small.down) == (other.up, other.down)
    assert views[0].first == views[1].first
    assert "capacity small" in str(fp.explain(plan, fp.params_of("bert-base")))


def test_what_a_client_keeps_never_comes_down_to_it() -> None:
    plan = fp.parse('chain(share(), when(client_in("north"), keep(head)))')
    params = fp.params_of("bert-base")
    north, other = (v.stages[0] for v in forecast(plan, params).views)
    head = sum(p.nbytes for p in params if p.kind == "head")
    assert (north.up, north.down) == (other.up - head, other.down - head)


def test_a_long_cycle_is_listed_stage_by_stage() -> None:
    turns = ", ".join(f"share(blocks({i}))" for i in range(12))
    text = str(fp.explain(fp.parse(f"cycle({turns})"), fp.params_of("vit-base-16")))
    assert "rounds 1, 13, 25 ... 97" in text
    assert all(len(line) <= 100 for line in text.splitlines())


def test_unequal_blocks_give_a_range() -> None:
    stage = last_stage("chain(freeze(), best(2))", "swin-tiny")
    assert stage.up_least < stage.up < stage.down


def test_a_plan_beyond_the_run_is_noted() -> None:
    notes = forecast(fp.parse(FEDFROZEN), fp.params_of("vit-base-16"), rounds=20).notes
    assert notes == ("after(20) lies beyond the last of 20 rounds",)


def test_a_model_of_7b_is_resolved_in_under_a_second() -> None:
    started = time.monotonic()
    params = fp.params_of("llama-2-7b")
    fp.resolve(fp.parse("chain(share(), freeze(kernel))"), params, fp.Turn())
    assert sum(p.numel for p in params) > 6.7e9
    assert time.monotonic() - started < 1


def test_ten_thousand_clients_are_resolved_in_a_few_seconds() -> None:
    params = fp.params_of("llama-2-7b")
    resolver = fp.Resolver(fp.parse("chain(share(), when(after(20), freeze(kernel)))"), params)
    started = time.monotonic()
    answers = {id(resolver(fp.Turn(round=21, client=str(i)))) for i in range(10_000)}
    assert len(answers) == 1
    assert time.monotonic() - started < 3
