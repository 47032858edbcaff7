# SPDX-License-Identifier: Apache-2.0
"""Laws of behaviour: every row tells the truth about what its params move, and a wrong one is seen.

`python tests/kit/fifty.py` prints the table of the fifty types.
"""

from __future__ import annotations

from dataclasses import replace

import attention
import fifty
import pytest
import zoo
from test_description import require_partition
from torch import nn

from fedplan.errors import FedplanError, UnknownArchitecture
from fedplan.models import architectures
from fedplan.models.description import describe
from fedplan.models.layer_maps import FusedLayout, LayerMap
from fedplan.models.params import Kind, Rows
from fedplan.models.trace import dummy_inputs
from fedplan.models.validate import ParamCheck, check_params, require_valid_layer_map

OURS = [name for name in zoo.ARCHITECTURES if name not in fifty.MODELS]


def judged(name: str) -> tuple[nn.Module, tuple[ParamCheck, ...]]:
    if name in fifty.MODELS:
        model = fifty.build(name)
        return model, check_params(model, fifty.MODELS[name][1]())
    model = zoo.build(name)
    return model, check_params(model, zoo.feed(name))


@pytest.mark.parametrize("name", [*fifty.MODELS, *OURS])
def test_every_param_behaves_as_its_kind_says(name: str) -> None:
    model, found = judged(name)
    assert [v for v in found if v.fault] == []
    params = describe(model)
    require_partition(model, params)
    assert not any(p.uncertain or p.kind is Kind.UNKNOWN for p in params)
    assert {v.param.kind for v in found} >= {Kind.QUERY, Kind.KEY, Kind.VALUE, Kind.OUT}
    # Each block is judged, or another of its make.
    makes = {(p.stack, p.kind, p.shape) for p in params if p.block_id}
    assert makes == {
        (v.param.stack, v.param.kind, v.param.shape) for v in found if v.param.block_id
    }


def test_all_fifty_are_here() -> None:
    assert len(set(fifty.FIFTY)) == 50
    assert set(fifty.FIFTY) | set(fifty.FURTHER) <= set(fifty.MODELS)


@pytest.mark.parametrize("name", ["bert", "gpt2", "bart", "clip", "mixtral", "torch"])
def test_a_look_at_behaviour_leaves_a_model_as_it_was(name: str) -> None:
    model = fifty.build(name) if name in fifty.MODELS else zoo.build(name)
    before = attention.trace(model)
    check_params(model, fifty.MODELS[name][1]() if name in fifty.MODELS else zoo.feed(name))
    assert attention.trace(model) == before


def turned(layout: FusedLayout, swap: dict[Kind, Kind]) -> FusedLayout:
    def wrong(config: object, rows: int) -> dict[Kind, Rows]:
        return {swap.get(kind, kind): each for kind, each in layout(config, rows).items()}

    return wrong


def lie(row: LayerMap, one: Kind, other: Kind) -> LayerMap:
    """A row that takes two kinds for each other."""
    swap = {one: other, other: one}
    return replace(
        row,
        kinds={path: swap.get(kind, kind) for path, kind in row.kinds.items()},
        fused={path: turned(layout, swap) for path, layout in row.fused.items()},
    )


PAIRS = [
    (Kind.QUERY, Kind.KEY),
    (Kind.KEY, Kind.VALUE),
    (Kind.QUERY, Kind.VALUE),
    (Kind.VALUE, Kind.OUT),
    (Kind.OUT, Kind.MLP),
    (Kind.VALUE, Kind.MLP),
    (Kind.KEY, Kind.OUT),
]
LIES = [(name, pair) for name in ("bert", "gpt2", "llama", "t5", "gpt_neox") for pair in PAIRS] + [
    ("mixtral", (Kind.ROUTER, Kind.EXPERT)),
    ("mixtral", (Kind.OUT, Kind.EXPERT)),
    ("mixtral", (Kind.MLP, Kind.EXPERT)),
    ("mixtral", (Kind.MLP, Kind.ROUTER)),
    ("bert", (Kind.EMBED, Kind.HEAD)),
    ("vit", (Kind.EMBED, Kind.HEAD)),
    ("mpnet", (Kind.POSITION, Kind.HEAD)),
    ("dinov3_vit", (Kind.SCALE, Kind.OUT)),
]


@pytest.mark.parametrize(("name", "pair"), LIES, ids=lambda each: str(each))
def test_a_row_that_takes_two_kinds_for_each_other_is_seen(
    name: str, pair: tuple[Kind, Kind], monkeypatch: pytest.MonkeyPatch
) -> None:
    row = lie(architectures.LAYER_MAPS[name], *pair)
    if row == architectures.LAYER_MAPS[name]:
        pytest.skip("the row has neither")
    monkeypatch.setitem(architectures.LAYER_MAPS, name, row)
    _, found = judged(name)
    assert any(v.fault for v in found)


@pytest.mark.parametrize("name", ["qwen3", "olmo2", "phi", "deepseek_v3"])
def test_a_norm_of_queries_or_keys_must_say_so(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    row = replace(architectures.LAYER_MAPS[name], acts_on={})
    monkeypatch.setitem(architectures.LAYER_MAPS, name, row)
    _, found = judged(name)
    assert any("query or key alone" in v.fault for v in found)


@pytest.mark.parametrize("name", ["mixtral", "olmoe", "qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_routers_and_experts_are_parts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    params = describe(fifty.build(name))
    experts = [p for p in params if p.kind is Kind.EXPERT]
    assert any(p.kind is Kind.ROUTER for p in params)
    assert experts and all("experts" in p.name and p.block_id for p in experts)
    monkeypatch.setitem(architectures.LAYER_MAPS, name, architectures.LAYER_MAPS["llama"])
    _, found = judged(name)
    assert any("experts" in v.fault for v in found)


def test_the_out_of_cross_attention_is_no_mlp(monkeypatch: pytest.MonkeyPatch) -> None:
    row = architectures.LAYER_MAPS["bart"]
    kinds = dict(row.kinds) | {("encoder_attn", "out_proj"): Kind.MLP}
    monkeypatch.setitem(architectures.LAYER_MAPS, "bart", replace(row, kinds=kinds))
    _, found = judged("bart")
    faults = {v.param.name for v in found if v.fault == "is the only way of values to the output"}
    assert faults and all("encoder_attn.out_proj.weight" in name for name in faults)


def test_a_row_that_does_not_fit_is_refused_by_the_part_that_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(
        architectures.LAYER_MAPS,
        "bert",
        lie(architectures.LAYER_MAPS["bert"], Kind.KEY, Kind.VALUE),
    )
    with pytest.raises(UnknownArchitecture, match=r"value: .*self\.key\.weight moves its block's"):
        require_valid_layer_map(zoo.build("bert"), label="the layer map 'bert'")


STIMULATED = ("bert", "gpt2", "t5", "vit", "clip", "whisper", "wav2vec2", "bart", "opt", "swin")


@pytest.mark.parametrize("name", STIMULATED)
def test_a_model_is_judged_without_a_batch_of_its_own(name: str) -> None:
    model = fifty.build(name)
    assert dummy_inputs(model)
    assert not any(v.fault for v in check_params(model))


def test_a_plain_module_needs_a_batch() -> None:
    with pytest.raises(FedplanError, match="Torch: give a batch"):
        check_params(zoo.build("torch"))
