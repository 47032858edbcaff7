# SPDX-License-Identifier: Apache-2.0
"""Laws of adapters: whatever peft offers is described right, by behaviour, or refused by name."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import zoo
from attention import stir
from clients import few, loss
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING as CONFIGS
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn

from fedplan import Turn, parse, resolve
from fedplan.errors import FedplanError, UnknownAdapter
from fedplan.federation.agreement import Agreement
from fedplan.language.parts import adapter
from fedplan.language.plan import Role, chain, freeze, share
from fedplan.methods import by_residual, feddpa
from fedplan.methods.method import Method
from fedplan.models.adapters import (
    FAMILIES,
    PROMPTS,
    UNMERGEABLE,
    join_adapters,
    merge_adapters,
)
from fedplan.models.description import describe
from fedplan.models.params import Kind, Params
from fedplan.models.values import get_values, set_values
from fedplan.runners.local import Federation
from fedplan.testing import check_method
from fedplan.training.fit import TrainArguments
from fedplan.training.freezing import trainable
from fedplan.training.optimizers import adamw

# peft warns of what it lacks on this machine, and of layers that it was not made for.
pytestmark = pytest.mark.filterwarnings("ignore")

TYPES = sorted(each.value for each in CONFIGS)
"""Every type that this peft offers: one that comes with the next peft is tested from then on."""
CHECKED = [kind for kind in TYPES if kind.lower() in FAMILIES]
SETTINGS: dict[str, dict[str, Any]] = {
    "ADALORA": {"init_r": 4, "target_r": 2, "total_step": 100},
    "ADAPTION_PROMPT": {"adapter_len": 3, "adapter_layers": 2},
    "BOFT": {"boft_block_size": 4},
    "C3A": {"block_size": 4},
    "CARTRIDGE": {"num_virtual_tokens": 3},
    "CPT": {"cpt_token_ids": [1, 2], "cpt_mask": [1, 1], "cpt_tokens_type_mask": [1, 1]},
    "FOURIERFT": {"n_frequency": 10},
    "IA3": {"feedforward_modules": []},
    "MULTITASK_PROMPT_TUNING": {"num_virtual_tokens": 3, "num_tasks": 2},
    "OFT": {"r": 0, "oft_block_size": 4},
    "PREFIX_TUNING": {"num_virtual_tokens": 3},
    "PROMPT_TUNING": {"num_virtual_tokens": 3},
    "P_TUNING": {"num_virtual_tokens": 3, "encoder_hidden_size": 8},
    "ROAD": {"group_size": 4},
    "TRAINABLE_TOKENS": {"token_indices": [4, 5, 6, 7]},
    "VBLORA": {"num_vectors": 4, "vector_length": 4, "topk": 2},
    "WAVEFT": {"n_frequency": 10},
}
PLACES = {
    "bert": {"": ["query", "value"], "LN_TUNING": ["LayerNorm"]},
    "gpt2": {"": ["c_attn", "c_fc"], "LN_TUNING": ["ln_1", "ln_2"]},
    "llama": {"": ["q_proj", "down_proj"], "LN_TUNING": ["input_layernorm"]},
    "vit": {"": ["q_proj", "v_proj"], "LN_TUNING": ["layernorm_before"]},
}
TOKENS = {"bert": ["word_embeddings"], "gpt2": ["wte"], "llama": ["embed_tokens"]}
ACTED_ON = {
    "bert": {Kind.QUERY, Kind.VALUE},
    "gpt2": {Kind.QUERY, Kind.KEY, Kind.VALUE, Kind.MLP},
    "llama": {Kind.QUERY, Kind.MLP},
    "vit": {Kind.QUERY, Kind.VALUE},
}
SECOND_HOST = {"ADAPTION_PROMPT": "llama"} | dict.fromkeys(
    ("CARTRIDGE", "CPT", "MULTITASK_PROMPT_TUNING", "PREFIX_TUNING", "PROMPT_TUNING", "P_TUNING"),
    "gpt2",
)
NOT_CONV1D = frozenset(
    [
        "BEFT",
        "BOFT",
        "C3A",
        "DELORA",
        "GLORA",
        "HRA",
        "LILY",
        "LOHA",
        "LOKR",
        "MISS",
        "OFT",
        "PEANUT",
        "ROAD",
        "SHIRA",
        "SUPERTUNING",
    ]
)
"""What peft does not put on GPT-2's layers."""


def host_of(kind: str) -> str:
    """A host on which peft builds this type."""
    return SECOND_HOST.get(kind, "bert")


def hosts_of(kind: str) -> list[str]:
    if kind in SECOND_HOST:
        return [SECOND_HOST[kind]]
    without = {"TRAINABLE_TOKENS": "vit"} | dict.fromkeys(NOT_CONV1D, "gpt2")
    return [host for host in PLACES if host != without.get(kind)]


def config_of(kind: str, host: str, **extra: Any) -> Any:
    """A small configuration of any type, with rank two."""
    wanted = next(config for each, config in CONFIGS.items() if each.value == kind)
    known = {field.name for field in dataclasses.fields(wanted)} - set(SETTINGS.get(kind, {}))
    places = PLACES[host].get(kind, PLACES[host][""])
    if kind == "TRAINABLE_TOKENS":
        places = TOKENS[host]
    usual = {"target_modules": places, "r": 2}
    usual = {"task_type": "CAUSAL_LM"} if kind in SECOND_HOST else usual
    usual = {k: v for k, v in usual.items() if k in known and (k, kind) != ("r", "ADALORA")}
    return wanted(**usual, **SETTINGS.get(kind, {}), **extra)


def adapted(kind: str, host: str = "", seed: int = 0, **extra: Any) -> nn.Module:
    """The same tiny model each time, with an adapter drawn from a seed."""
    model = zoo.build(host or host_of(kind))
    with torch.no_grad():  # as they are drawn, its weights are too small to tell adapters apart
        for tensor in model.parameters():
            tensor.mul_(10 if tensor.dim() == 2 else 1)
    torch.manual_seed(seed)
    return peft.get_peft_model(model, config_of(kind, host or host_of(kind), **extra)).eval()


def trainable_names(model: nn.Module) -> set[str]:
    return {name for name, tensor in model.named_parameters() if tensor.requires_grad}


def grafted(params: Params) -> Params:
    return tuple(p for p in params if {"adapter", "prompt"} & p.words)


def require_partition(host: str, model: nn.Module, params: Params) -> None:
    """Each number that the model runs is in exactly one param, and no param holds another."""
    counts = {n: torch.zeros(t.shape) for n, t in model.named_parameters()}
    for p in params:
        view = p.view(counts[p.name])
        assert view.shape == p.shape, p.key
        view.add_(1)
    assert len({p.key for p in params}) == len(params)
    flags = [tensor.requires_grad for tensor in model.parameters()]
    model.requires_grad_(True)
    zoo.loss(model(**zoo.feed(host))).backward()
    for (name, tensor), flag in zip(model.named_parameters(), flags, strict=True):
        in_none = (counts[name] == 0).all() and tensor.grad is None
        assert in_none or (counts[name] == 1).all(), name
        tensor.requires_grad_(flag)
        tensor.grad = None


@torch.no_grad()
def answer(host: str, model: nn.Module) -> Tensor:
    return model.eval()(**zoo.feed(host)).logits


@pytest.mark.parametrize("kind", [kind for kind in TYPES if kind not in CHECKED])
def test_a_type_that_is_not_checked_is_refused_by_name(kind: str) -> None:
    if kind == "XLORA":
        model = adapted("LORA")
        model.base_model = an_xlora(model)
    else:
        model = adapted(kind)
    with pytest.raises(UnknownAdapter) as caught:
        describe(model)
    assert kind.lower() in str(caught.value)
    assert "merge_and_unload" in str(caught.value) and "lora" in str(caught.value)


def an_xlora(model: nn.Module) -> nn.Module:
    """X-LoRA is made from adapters on disk: here only its class stands around a model."""
    from peft.tuners.xlora import XLoraModel

    tuner = XLoraModel.__new__(XLoraModel)
    nn.Module.__init__(tuner)
    tuner.lora_model = model.base_model
    return tuner


@pytest.mark.parametrize(("kind", "host"), [(k, h) for k in CHECKED for h in hosts_of(k)])
def test_what_peft_trains_is_what_share_adapter_trains(kind: str, host: str) -> None:
    model = adapted(kind, host)
    params = describe(model)
    require_partition(host, model, params)
    assert {p.name for p in grafted(params)} == trainable_names(model)
    acted_on = {kind for p in params if p.kind is Kind.ADAPTER for kind in p.on}
    if kind == "TRAINABLE_TOKENS":  # GPT-2's table is its head too
        assert acted_on - {Kind.HEAD} == {Kind.EMBED}
    elif kind not in (*SECOND_HOST, "LN_TUNING"):
        assert acted_on == ACTED_ON[host]
    plain = {(p.kind, p.block_id, p.shape) for p in describe(zoo.build(host))}
    kept = {p for p in params if p.kind not in (Kind.ADAPTER, Kind.PROMPT)}
    assert {(p.kind, p.block_id, p.shape) for p in kept if "ranknum" not in p.name} == plain


@pytest.mark.parametrize("kind", CHECKED)
def test_a_round_of_fedavg_moves_the_adapter_and_nothing_else(kind: str, tmp_path: Path) -> None:
    """The values that travel are all of the adapter: they mean the same in another's model."""
    host, model = host_of(kind), adapted(kind)
    params, word = describe(model), "prompt" if kind.lower() in PROMPTS else "adapter"
    before, was = {k: v.clone() for k, v in model.state_dict().items()}, answer(host, model)
    method = Method(parse(f"chain(freeze(), share({word}))"))
    agreement = Agreement(
        "adapters",
        params,
        method,
        TrainArguments(adamw(weight_decay=0.1), lr=0.1, steps=3, batch_size=2),
    )
    federation = Federation(agreement, model, few(host), loss, tmp_path, rounds=1)
    round_state = federation.run_round()
    assert not round_state.rejected
    federation.commit(round_state)
    set_values(model, federation.global_values(), params)
    mine = {name for p in grafted(params) for name in (p.name, *p.tied)}
    after = model.state_dict()
    assert {k for k in before if not torch.equal(before[k], after[k])} <= mine
    assert not torch.equal(answer(host, model), was)
    require_one_meaning(kind, model, was)


def require_one_meaning(kind: str, model: nn.Module, was: Tensor) -> None:
    """What an adapter does is in its params: nothing of it is drawn where it is built."""
    params = describe(model)
    stir(model, grafted(params))
    now = answer(host_of(kind), model)
    assert (now - was).abs().max() > 0.01
    other = adapted(kind, seed=1)
    set_values(other, get_values(model, grafted(params)), describe(other))
    torch.testing.assert_close(answer(host_of(kind), other), now)


@pytest.mark.parametrize("kind", CHECKED)
def test_a_merged_model_answers_as_before_without_peft_or_is_refused(kind: str) -> None:
    model = adapted(kind)
    stir(model, grafted(describe(model)))
    now = answer(host_of(kind), model)
    if kind.lower() in UNMERGEABLE:
        with pytest.raises(UnknownAdapter, match=f"{kind.lower()} cannot be merged"):
            merge_adapters(model)
        return
    alone = merge_adapters(model)
    assert not any(type(module).__module__.startswith("peft.") for module in alone.modules())
    torch.testing.assert_close(answer(host_of(kind), alone), now, atol=1e-3, rtol=1e-3)


PLANS = (
    "chain(freeze(), share(adapter | prompt))",
    "chain(freeze(), keep(on(query)), share(head))",
    "chain(share(), freeze(adapter | prompt))",
)


@pytest.mark.parametrize("kind", CHECKED)
@pytest.mark.parametrize("plan", PLANS)
def test_what_is_frozen_stays_bitwise(plan: str, kind: str) -> None:
    """AdamW with decay moves no frozen number, rows of a fused host's adapter included."""
    host = "gpt2" if "gpt2" in hosts_of(kind) else host_of(kind)
    model = adapted(kind, host)
    params = describe(model)
    words = {word for p in params for word in p.words}
    plan = plan.replace("adapter | prompt", "adapter" if "adapter" in words else "prompt")
    plan = plan.replace("on(query)", "on(query)" if Kind.QUERY in hosts(params) else "bias")
    plan = plan.replace("share(head)", "share(head)" if "head" in words else "share(norm)")
    roles = resolve(parse(plan), params, Turn())
    before = get_values(model, params)
    with trainable(model.train(), roles) as trainable_params:
        optimizer = torch.optim.AdamW(trainable_params.parameters(), lr=0.1, weight_decay=0.1)
        for _ in range(2):
            zoo.loss(model(**zoo.feed(host))).backward()
            optimizer.step()
            optimizer.zero_grad()
    after = get_values(model, params)
    for p, role in roles.items():
        assert role.is_trained or torch.equal(before[p.key], after[p.key]), p.key
    assert any(not torch.equal(before[k], after[k]) for k in before)


def hosts(params: Params) -> set[Kind]:
    return {kind for p in params if p.kind is Kind.ADAPTER for kind in p.on}


def test_a_family_that_peft_adds_later_is_refused_and_not_taken_for_its_host() -> None:
    class Novel(LoraLinear):
        __module__ = "peft.tuners.novel.layer"

    model = adapted("LORA")
    layer = model.get_submodule("base_model.model.bert.encoder.layer.0.attention.self.query")
    layer.__class__ = Novel
    with pytest.raises(UnknownAdapter, match=r"peft's novel.*layer\.0\.attention\.self\.query"):
        describe(model)


def test_a_place_that_a_known_family_did_not_have_is_refused() -> None:
    model = adapted("LORA")
    layer = model.get_submodule("base_model.model.bert.encoder.layer.0.attention.self.query")
    layer.lora_novelty = nn.ParameterDict({"default": nn.Parameter(torch.zeros(2))})
    with pytest.raises(UnknownAdapter, match="lora with lora_novelty"):
        describe(model)


@pytest.mark.parametrize("kind", ["LORA", "IA3", "LOHA", "VERA", "LN_TUNING"])
def test_of_several_adapters_the_active_one_counts(kind: str) -> None:
    saved = {"modules_to_save": ["classifier"]}
    model = adapted(kind, **saved)
    model.add_adapter("second", config_of(kind, "bert", **saved))
    for active in ("default", "second"):
        model.set_adapter(active)
        params = describe(model)
        require_partition("bert", model, params)
        assert all(f".{active}" in p.name for p in grafted(params))
        heads = {p.name for p in params if p.kind is Kind.HEAD and "classifier" in p.name}
        assert {p.name for p in grafted(params)} | heads == trainable_names(model)


def test_two_adapters_that_run_at_once_are_both_described() -> None:
    model = adapted("LORA")
    model.add_adapter("second", config_of("LORA", "bert"))
    model.base_model.set_adapter(["default", "second"])
    params = describe(model)
    require_partition("bert", model, params)
    assert {p.name for p in grafted(params)} == trainable_names(model)
    assert len(grafted(params)) == 16


@pytest.mark.parametrize("name", ["bert", "gpt-neox", "llama"])
def test_a_common_and_an_own_adapter_are_two_parts_and_join_into_one(name: str) -> None:
    method = feddpa(rank=3, own_rank=2, with_head=False)
    assert method.adapt is not None
    model = method.adapt(zoo.build(name)).eval()
    roles = resolve(method.plan, params := describe(model), Turn())
    with torch.no_grad():
        stir(model, grafted(params))
    for param in params:
        level = {"common": Role.SHARE, "own": Role.KEEP} if param.kind == "adapter" else {}
        words = param.tags & {"common", "own"}
        assert roles[param] is (level[next(iter(words))] if words else Role.FREEZE)
    before = answer(name, model)
    joined = join_adapters(model)
    assert list(joined.peft_config) == ["default"] and joined.peft_config["default"].r == 5
    assert torch.allclose(answer(name, joined), before, atol=1e-5)
    with pytest.raises(FedplanError, match="feddpa adds two adapters, and the model has one"):
        method.adapt(joined)


def test_a_residual_of_two_shared_adapters_on_one_layer_is_refused() -> None:
    two = feddpa(rank=2, own_rank=2, with_head=False)
    method = dataclasses.replace(
        two, plan=chain(freeze(), share(adapter)), lora_aggregation=by_residual()
    )
    with pytest.raises(FedplanError, match="the plan shares two there: share one adapter"):
        check_method(method, zoo.build("bert"), few("bert"), loss)


def test_an_adapter_that_serves_all_blocks_stands_in_none() -> None:
    for kind in ("VBLORA", "UNILORA"):
        params = describe(adapted(kind))
        (bank,) = [p for p in grafted(params) if len(p.tied) > 1]
        assert bank.block is None and bank.on == {Kind.QUERY, Kind.VALUE}


def test_an_adapter_without_peft_around_the_model_is_described() -> None:
    model = peft.inject_adapter_in_model(config_of("LORA", "bert"), zoo.build("bert"))
    params = describe(model)
    require_partition("bert", model, params)
    assert {p.name for p in grafted(params)} == trainable_names(model)
    with pytest.raises(UnknownAdapter, match="save_pretrained"):
        merge_adapters(model)


def test_tuned_tokens_of_a_tied_table_are_one_param() -> None:
    config = peft.LoraConfig(
        r=2, target_modules=["c_attn"], task_type="CAUSAL_LM",
        trainable_token_indices={"wte": [4, 5, 6]},
    )  # fmt: skip
    model = peft.get_peft_model(zoo.build("gpt2"), config).eval()
    params = describe(model)
    require_partition("gpt2", model, params)
    assert {p.name for p in grafted(params)} == trainable_names(model)
    set_values(model, get_values(model, params), params)


def test_a_merged_or_disabled_adapter_is_refused_with_the_remedy() -> None:
    model = adapted("LORA")
    with model.disable_adapter(), pytest.raises(UnknownAdapter, match="enable"):
        describe(model)
    model.merge_adapter()
    with pytest.raises(UnknownAdapter, match="unmerge_adapter"):
        describe(model)
    model.unmerge_adapter()
    assert describe(model)


def test_the_documents_name_every_family() -> None:
    text = (Path(__file__).parents[2] / "docs" / "explanation" / "layer-maps.md").read_text()
    checked = text.partition("## Adapters")[2]
    words = {kind.lower() for kind in TYPES}
    assert {word for word in words if word in re.findall(r"\w+", checked)} == set(FAMILIES) & words
