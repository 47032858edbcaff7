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


NAMES: dict[str, tuple[str, str, str]] = {
    "gptj": ("lm_head.weight lm_head.bias", "q_proj.weight", "k_proj.weight"),
    "olmo3": ("lm_head.weight", "q_proj.weight", "k_proj.weight"),
    "stablelm": ("lm_head.weight", "q_proj.weight", "k_proj.weight"),
    "hunyuan_v1_dense": ("lm_head.weight", "q_proj.weight", "k_proj.weight"),
    "glm4_moe": ("lm_head.weight", "q_proj.weight", "k_proj.weight"),
    "persimmon": (
        "lm_head.weight",
        "query_key_value.weight[query] query_key_value.bias[query]",
        "query_key_value.weight[key] query_key_value.bias[key]",
    ),
    "deepseek_v2": (
        "lm_head.weight",
        "q_a_proj.weight q_b_proj.weight",
        "kv_a_proj_with_mqa.weight kv_b_proj.weight[key]",
    ),
    "deberta": (
        "classifier.weight classifier.bias pooler.dense.weight pooler.dense.bias",
        "in_proj.weight[query] q_bias pos_q_proj.weight pos_q_proj.bias",
        "in_proj.weight[key] pos_proj.weight",
    ),
    "internvl": ("", "q_proj.weight q_proj.bias", "k_proj.weight k_proj.bias"),
    "qwen3_vl": (
        "lm_head.weight",
        "q_proj.weight qkv.weight[query] qkv.bias[query]",
        "k_proj.weight qkv.weight[key] qkv.bias[key]",
    ),
}
"""The ends of the names of head, query and key, as read in the code of transformers."""


@pytest.mark.parametrize("name", NAMES)
def test_head_query_and_key_are_the_tensors_of_the_code(name: str) -> None:
    params = describe(newer.build(name))
    for kind, names in zip((Kind.HEAD, Kind.QUERY, Kind.KEY), NAMES[name], strict=True):
        ends = tuple(f".{end}" for end in names.split())
        expected = {p.key for p in params if f".{p.key}".endswith(ends)}
        assert {p.key for p in params if p.kind is kind} == expected, kind
        assert all(any(f".{key}".endswith(end) for key in expected) for end in ends), kind


def test_a_newer_type_is_none_of_the_older_and_has_a_layer_map() -> None:
    assert not newer.MODELS.keys() & fifty.MODELS.keys()
    types = {f"{name}_text" if "qwen3_vl" in name else name for name in newer.MODELS}
    assert types <= architectures.LAYER_MAPS.keys()
    assert not newer.UNMAPPED.keys() & architectures.LAYER_MAPS.keys()
