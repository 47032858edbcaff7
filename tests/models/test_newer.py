# SPDX-License-Identifier: Apache-2.0
"""Layer maps of newer model types: each param does what its kind says, and parts are complete."""

from __future__ import annotations

import fifty
import newer
import pytest
from test_description import require_partition

from fedplan.models import architectures
from fedplan.models.description import describe
from fedplan.models.params import Kind
from fedplan.models.validate import check_params

ATTENTION = {Kind.QUERY, Kind.KEY, Kind.VALUE, Kind.OUT}


@pytest.mark.parametrize("name", newer.MODELS)
def test_every_param_of_a_newer_type_behaves_as_its_kind_says(name: str) -> None:
    model = newer.build(name)
    params, found = describe(model), check_params(model, newer.MODELS[name][1]())
    assert [(v.param.key, v.fault) for v in found if v.fault] == []
    require_partition(model, params)
    assert not any(p.uncertain or p.kind is Kind.UNKNOWN for p in params)
    kinds = {stack: {p.kind for p in params if p.stack == stack} for stack in stacks(name)}
    assert all(ATTENTION | {Kind.MLP} <= each or Kind.EXPERT in each for each in kinds.values())
    assert all(each >= ATTENTION for each in kinds.values())
    has_experts = name in newer.MIXTURES or name in ("qwen3_vl_moe", "llama4")
    assert has_experts == any(p.kind is Kind.EXPERT for p in params)
    assert has_experts == any(p.kind is Kind.ROUTER for p in params)
    if name in newer.SEERS:
        projector = [p for p in params if any(word in p.name for word in newer.PROJECTORS)]
        assert projector and all(p.kind in (Kind.EMBED, Kind.NORM) for p in projector)


def stacks(name: str) -> tuple[str, ...]:
    if name in newer.SEERS:
        return ("vision", "decoder")
    return ("encoder",) if name == "deberta" else ("decoder",)


def test_a_newer_type_is_none_of_the_older_and_has_a_layer_map() -> None:
    assert not newer.MODELS.keys() & fifty.MODELS.keys()
    types = {f"{name}_text" if "qwen3_vl" in name else name for name in newer.MODELS}
    assert types <= architectures.LAYER_MAPS.keys()
    assert not newer.UNMAPPED.keys() & architectures.LAYER_MAPS.keys()
