# SPDX-License-Identifier: Apache-2.0
"""Laws of the description: complete, disjoint, and true by behaviour."""

from __future__ import annotations

import copy
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import zoo
from attention import look, stir
from torch import nn

import fedplan
from fedplan.errors import UnknownArchitecture
from fedplan.language.resolution import check_plan
from fedplan.models import architectures
from fedplan.models.description import describe
from fedplan.models.layer_maps import FusedLayout, LayerMap, per_head, thirds
from fedplan.models.params import Block, Kind, Param, Rows

every = pytest.mark.parametrize("name", zoo.ARCHITECTURES)


def require_partition(model: nn.Module, params: tuple[Param, ...]) -> None:
    """Each number of each parameter is in exactly one param; dormant copies are in none."""
    counts = {n: torch.zeros(t.shape) for n, t in model.named_parameters()}
    for p in params:
        view = p.view(counts[p.name])
        assert view.shape == p.shape
        view.add_(1)
    for name, count in counts.items():
        assert (count == (0 if "original_module" in name else 1)).all(), name
    assert len({p.key for p in params}) == len(params)


@every
def test_each_number_is_in_exactly_one_param(name: str) -> None:
    model = zoo.build(name)
    require_partition(model, describe(model))


@every
def test_each_number_is_in_exactly_one_param_under_lora(name: str) -> None:
    model = zoo.with_lora(name)
    params = describe(model)
    require_partition(model, params)
    hosts = {kind for p in params if p.kind is Kind.ADAPTER for kind in p.on}
    assert hosts >= {Kind.QUERY, Kind.KEY, Kind.VALUE, Kind.MLP}
    plain = {(p.kind, p.block_id, p.shape) for p in describe(zoo.build(name))}
    assert {(p.kind, p.block_id, p.shape) for p in params if p.kind is not Kind.ADAPTER} == plain


@every
def test_each_stack_has_its_blocks_and_each_block_its_attention(name: str) -> None:
    params = describe(zoo.build(name))
    depths = {p.stack: p.depth for p in params if p.stack}
    for stack, depth in depths.items():
        for block in range(depth):
            kinds = {p.kind for p in params if p.stack == stack and p.block == block}
            assert kinds >= {Kind.QUERY, Kind.KEY, Kind.VALUE, Kind.OUT, Kind.MLP, Kind.NORM}
    assert sum(depths.values()) == {"albert": 1, "swin": 4}.get(name, 2 * len(depths))


def require_true_kinds(name: str) -> None:
    """Query and key move a block's attention; value does not, and moves its output."""
    model = zoo.build(name)
    before, params = look(name, model), describe(model)
    assert before.maps
    for (block, cross), was in before.maps.items():
        for kind in (Kind.QUERY, Kind.KEY, Kind.VALUE):
            other = copy.deepcopy(model)
            here = [p for p in params if p.block_id == block and p.kind is kind]
            stir(other, tuple(p for p in here if ("cross" in p.tags) == cross))
            after = look(name, other)
            same = torch.equal(was, after.maps[block, cross])
            assert same == (kind is Kind.VALUE), (block, cross, kind)
            if kind is Kind.VALUE:
                assert not torch.equal(before.outputs[block], after.outputs[block])


@every
def test_kinds_are_true_by_behaviour(name: str) -> None:
    require_true_kinds(name)


def turned(layout: FusedLayout) -> FusedLayout:
    """A layout with its kinds in the wrong order."""

    def wrong(config: object, rows: int) -> dict[Kind, Rows]:
        right = layout(config, rows)
        kinds = list(right)
        return dict(zip(kinds[1:] + kinds[:1], right.values(), strict=True))

    return wrong


WRONG = [(name, turned) for name in zoo.FUSED]
WRONG += [(name, lambda _: per_head) for name in ("modernbert", "gpt2", "mpt")]
WRONG += [(name, lambda _: thirds) for name in ("gpt-neox", "bloom", "falcon-heads")]


@pytest.mark.parametrize(("name", "wrong"), WRONG)
def test_a_wrong_row_map_is_caught_by_behaviour(
    name: str, wrong: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = getattr(zoo.build(name), "config", None)
    torch_row = "torch.nn.modules.transformer.TransformerEncoderLayer"
    known = config.model_type if config else torch_row
    row: LayerMap = architectures.LAYER_MAPS[known]
    lie = replace(row, fused={p: wrong(layout) for p, layout in row.fused.items()})
    monkeypatch.setitem(architectures.LAYER_MAPS, known, lie)
    with pytest.raises(AssertionError):
        require_true_kinds(name)


def test_a_tensor_that_no_row_explains_is_unknown_and_in_its_block() -> None:
    model = zoo.build("bert")
    model.bert.encoder.layer[0].attention.novelty = nn.Linear(2, 2)
    (weight, _) = [p for p in describe(model) if "novelty" in p.name]
    assert (weight.kind, weight.block_id) == (Kind.UNKNOWN, Block("encoder", 0))
    check_plan(fedplan.parse("chain(share(), keep(blocks(0)))"), describe(model))
    with pytest.raises(UnknownArchitecture, match=r"attention\.novelty\.weight"):
        check_plan(fedplan.parse("chain(share(), freeze(query))"), describe(model))


def test_a_taught_architecture_is_described() -> None:
    class Rung(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.to_q, self.to_k, self.to_v, self.back = (nn.Linear(2, 2) for _ in range(4))
            self.norm = nn.LayerNorm(2)

    class Ladder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rungs = nn.ModuleList([Rung(), Rung()])
            self.top = nn.Linear(2, 2)

    fedplan.register_layer_map(
        "Ladder", blocks={"encoder": "rungs"}, query="to_q", key="to_k", value="to_v", out="back",
        head="top",
    )  # fmt: skip
    params = describe(Ladder())
    assert [p.kind for p in params if p.block == 1][::2] == ["query", "key", "value", "out", "norm"]


def test_a_tied_tensor_is_one_param_of_its_first_owner() -> None:
    params = describe(zoo.build("gpt2"))
    (embed,) = [p for p in params if p.tied]
    assert (embed.kind, embed.tied) == (Kind.EMBED, ("lm_head.weight",))
    assert not any(p.kind is Kind.HEAD for p in params)


def test_an_adapter_on_a_fused_host_has_rows_on_its_output_side() -> None:
    params = [p for p in describe(zoo.with_lora("gpt2")) if "c_attn.lora" in p.name]
    assert {(tuple(sorted(p.on)), bool(p.rows)) for p in params} == {
        (("key", "query", "value"), False), (("query",), True), (("key",), True),
        (("value",), True),
    }  # fmt: skip


def test_the_words_of_every_param_are_in_the_vocabulary() -> None:
    from fedplan.language.parts import WORDS

    for name in zoo.ARCHITECTURES:
        for p in describe(zoo.with_lora(name)):
            assert p.words <= set(WORDS), (name, p)


def test_a_fresh_process_knows_the_layer_maps() -> None:
    """Whatever else of fedplan it has imported."""
    code = """
import fedplan
from transformers import BertConfig, BertModel
model = BertModel(BertConfig(num_hidden_layers=1, hidden_size=12, vocab_size=9))
assert "query" in {param.kind for param in fedplan.describe(model)}
"""
    subprocess.run([sys.executable, "-c", code], check=True)
