# SPDX-License-Identifier: Apache-2.0
"""Laws of stacks: who hears whom, by behaviour; and which row belongs to which class."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import fifty
import pytest
import torch
import transformers as hf
import zoo
from attention import look, stir
from torch import Tensor, nn

import fedplan
from fedplan import Turn, explain, parse, resolve
from fedplan.errors import FedplanError, PlanError, UnknownArchitecture
from fedplan.models import architectures
from fedplan.models.description import block_modules, describe
from fedplan.models.layer_maps import LayerMap
from fedplan.models.params import Block, Kind, Params, Rows

CROSSED = zoo.TEXT | {"is_decoder": True, "add_cross_attention": True}


def states() -> zoo.Inputs:
    generator = torch.Generator().manual_seed(3)
    return zoo.tokens() | {"encoder_hidden_states": torch.randn(2, 6, 16, generator=generator)}


def seen_pairs() -> zoo.Inputs:
    return zoo.pixels() | {"decoder_input_ids": zoo.tokens()["input_ids"][:, :5]}


def joined(kind: str, encoder: Any, decoder: Any) -> nn.Module:
    config = getattr(hf, f"{kind}Config").from_encoder_decoder_configs(encoder, decoder)
    return getattr(hf, f"{kind}Model")(config)


def a_decoder(**extra: Any) -> Any:
    return hf.BertConfig(**CROSSED | extra)


Case = tuple[Callable[[], nn.Module], Callable[[], zoo.Inputs]]
JOINED: dict[str, Case] = {
    "bert2bert": (
        lambda: joined("EncoderDecoder", hf.BertConfig(**zoo.TEXT), a_decoder()),
        zoo.pairs,
    ),
    "bert2gpt2": (
        lambda: joined(
            "EncoderDecoder",
            hf.BertConfig(**zoo.TEXT),
            hf.GPT2Config(add_cross_attention=True, **zoo.GPT2),
        ),
        zoo.pairs,
    ),
    "roberta2roberta": (
        lambda: joined("EncoderDecoder", hf.RobertaConfig(**zoo.TEXT), hf.RobertaConfig(**CROSSED)),
        zoo.pairs,
    ),
    "projected": (
        lambda: joined("EncoderDecoder", hf.BertConfig(**zoo.TEXT), a_decoder(hidden_size=24)),
        zoo.pairs,
    ),
    "vit2bert": (
        lambda: joined("VisionEncoderDecoder", hf.ViTConfig(**zoo.VISION), a_decoder()),
        seen_pairs,
    ),
    "vit2gpt2": (
        lambda: joined(
            "VisionEncoderDecoder",
            hf.ViTConfig(**zoo.VISION),
            hf.GPT2Config(add_cross_attention=True, **zoo.GPT2),
        ),
        seen_pairs,
    ),
    "wav2vec2bert": (
        lambda: joined("SpeechEncoderDecoder", hf.Wav2Vec2Config(**fifty.SOUND), a_decoder()),
        lambda: fifty.sounds() | {"decoder_input_ids": zoo.tokens()["input_ids"][:, :5]},
    ),
    "t5": (lambda: zoo.build("t5"), zoo.pairs),
    "bart": (lambda: zoo.build("bart"), zoo.pairs),
    "whisper": (lambda: zoo.build("whisper"), zoo.sound),
}
CROSSING: dict[str, Case] = JOINED | {
    "bert": (zoo.of("BertLMHeadModel", "BertConfig", **CROSSED), states),
    "roberta": (zoo.of("RobertaForCausalLM", "RobertaConfig", **CROSSED), states),
    "xlm-roberta": (zoo.of("XLMRobertaForCausalLM", "XLMRobertaConfig", **CROSSED), states),
    "camembert": (zoo.of("CamembertForCausalLM", "CamembertConfig", **CROSSED), states),
    "electra": (
        zoo.of("ElectraForCausalLM", "ElectraConfig", embedding_size=16, **CROSSED),
        states,
    ),
    "gpt2": (zoo.of("GPT2LMHeadModel", "GPT2Config", add_cross_attention=True, **zoo.GPT2), states),
}
SOURCES = ("encoder_hidden_states", "input_features", "input_values", "pixel_values", "input_ids")


def made(case: Case) -> tuple[nn.Module, zoo.Inputs]:
    """A tiny model in which every number counts, and a batch for it."""
    torch.manual_seed(0)
    model = case[0]().eval()
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.add_(torch.randn(tensor.shape) * 0.1)
    return model, case[1]()


def turned(batch: zoo.Inputs, source: str) -> zoo.Inputs:
    """The same batch with one of its inputs in another order of rows."""
    return batch | {source: batch[source].flip(0)}


@torch.no_grad()
def given(model: nn.Module, batch: zoo.Inputs) -> dict[Block, Tensor]:
    """What each block gives."""
    found = dict[Block, Tensor]()

    def keep(block: Block) -> Callable[..., None]:
        def hook(_: nn.Module, __: Any, out: Any) -> None:
            found.setdefault(block, _first(out))

        return hook

    hooks = [m.register_forward_hook(keep(block)) for block, m in block_modules(model).items()]
    model(**batch)
    for hook in hooks:
        hook.remove()
    return found


def _first(out: Any) -> Tensor:
    return out if isinstance(out, Tensor) else _first(out[0])


@torch.no_grad()
def cut(model: nn.Module, params: Params) -> None:
    tensors = dict(model.named_parameters())
    for p in params:
        p.view(tensors[p.name]).zero_()


@pytest.mark.parametrize("name", JOINED)
def test_the_decoders_blocks_are_those_that_hear_its_tokens(name: str) -> None:
    model, batch = made(JOINED[name])
    before, after = given(model, batch), given(model, turned(batch, "decoder_input_ids"))
    moved = {block for block in before if not torch.equal(before[block], after[block])}
    assert moved == {Block("decoder", 0), Block("decoder", 1)}
    assert set(before) - moved == {Block("encoder", 0), Block("encoder", 1)}
    assert {p.block_id for p in describe(model) if p.block_id} == set(before)
    for p in describe(model):
        if p.stack and p.name.split(".")[0] in ("encoder", "decoder"):
            assert p.stack == p.name.split(".")[0], p.name


@pytest.mark.parametrize("name", CROSSING)
def test_without_the_out_of_its_cross_attention_a_decoder_hears_no_encoder(name: str) -> None:
    model, batch = made(CROSSING[name])
    other = turned(batch, next(source for source in SOURCES if source in batch))
    params = describe(model)
    crossing = tuple(p for p in params if p.kind is Kind.OUT and "cross" in p.tags)
    assert {p.block_id for p in crossing} == {Block("decoder", 0), Block("decoder", 1)}

    def hears() -> bool:
        here, there = given(model, batch), given(model, other)
        return not torch.equal(here[Block("decoder", 1)], there[Block("decoder", 1)])

    cut(model, tuple(p for p in params if p.kind is Kind.MLP))
    assert hears()
    cut(model, crossing)
    assert not hears()


TEXTS = [name for name in zoo.ARCHITECTURES if set(zoo.feed(name)) == {"input_ids"}]


@pytest.mark.parametrize("name", TEXTS)
def test_without_out_no_token_hears_another(name: str) -> None:
    model, batch = made((lambda: zoo.build(name), zoo.tokens))
    changed = {"input_ids": batch["input_ids"].clone()}
    changed["input_ids"][:, 2] = (changed["input_ids"][:, 2] + 1) % 60 + 3

    def hears() -> bool:
        here, there = list(given(model, batch).values()), list(given(model, changed).values())
        rest = [i for i in range(8) if i != 2]
        return not torch.allclose(here[-1][:, rest], there[-1][:, rest], atol=1e-6)

    params = describe(model)
    cut(model, tuple(p for p in params if p.kind is Kind.MLP))
    assert hears()
    cut(model, tuple(p for p in params if p.kind is Kind.OUT))
    assert not hears()


HELD = [name for name in zoo.ARCHITECTURES if name not in ("torch", "swin")]


@pytest.mark.parametrize("name", HELD)
def test_with_its_input_held_only_the_kernel_moves_a_blocks_attention(name: str) -> None:
    """What stands outside the blocks and yet decides who attends to whom is in the kernel."""
    model = zoo.build(name)
    entered, beside = dict[Block, Tensor](), [p for p in describe(model) if p.block_id is None]

    def hold(at: Block) -> Callable[..., Any]:
        def hook(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            return (entered.setdefault(at, args[0]), *args[1:])

        return hook

    for at, block in block_modules(model).items():
        block.register_forward_pre_hook(hold(at))
    before = look(name, model).maps
    for kernel in (False, True):
        held = tuple(p for p in beside if ("kernel" in p.words) == kernel)
        stir(model, held)
        after = look(name, model).maps
        same = [torch.equal(was, after[at]) for at, was in before.items() if not at[1]]
        assert all(same) if not kernel else not held or not all(same)


def test_the_kernels_law_sees_what_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    row = architectures.LAYER_MAPS["deberta-v2"]
    monkeypatch.setitem(architectures.LAYER_MAPS, "deberta-v2", replace(row, acts_on={}))
    with pytest.raises(AssertionError):
        test_with_its_input_held_only_the_kernel_moves_a_blocks_attention("deberta-v2")


def test_the_law_of_cross_attention_sees_an_out_that_is_called_mlp(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    row = architectures.LAYER_MAPS["bert"]
    kinds = {k: v for k, v in row.kinds.items() if k[0] != "crossattention"}
    monkeypatch.setitem(architectures.LAYER_MAPS, "bert", replace(row, kinds=kinds))
    with pytest.raises(AssertionError):
        test_without_the_out_of_its_cross_attention_a_decoder_hears_no_encoder("bert")


class Rung(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(4, 4) for _ in range(4))
        self.norm = nn.LayerNorm(4)


class Held(nn.Module):
    """Three blocks in any holder."""

    def __init__(self, rungs: nn.Module) -> None:
        super().__init__()
        self.rungs, self.top = rungs, nn.Linear(4, 3)


HOLDERS: dict[str, Callable[[], nn.Module]] = {
    "ModuleList": lambda: nn.ModuleList([Rung(), Rung(), Rung()]),
    "Sequential": lambda: nn.Sequential(Rung(), Rung(), Rung()),
    "named Sequential": lambda: nn.Sequential(OrderedDict(c=Rung(), a=Rung(), b=Rung())),
    "ModuleDict": lambda: nn.ModuleDict({"c": Rung(), "a": Rung(), "b": Rung()}),
    "numbered ModuleDict": lambda: nn.ModuleDict({"7": Rung(), "9": Rung(), "3": Rung()}),
}


@pytest.fixture
def taught(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Teach for the length of one test."""
    for name in list(architectures.LAYER_MAPS):
        monkeypatch.setitem(architectures.LAYER_MAPS, name, architectures.LAYER_MAPS[name])

    def teach(name: str, **said: Any) -> None:
        monkeypatch.setitem(architectures.LAYER_MAPS, name, LayerMap())
        fedplan.register_layer_map(name, **said)

    return teach


PARTS = {"query": "q", "key": "k", "value": "v", "out": "o", "head": "top"}


@pytest.mark.parametrize("holder", HOLDERS)
def test_blocks_are_found_in_every_holder_of_modules(holder: str, taught: Any) -> None:
    taught("Held", blocks={"encoder": "rungs"}, **PARTS)
    model = Held(HOLDERS[holder]())
    params = describe(model)
    listed = describe(Held(HOLDERS["ModuleList"]()))
    assert [(p.kind, p.block_id, p.depth) for p in params] == [
        (p.kind, p.block_id, p.depth) for p in listed
    ]
    roles = resolve(parse("share(last(1))"), params, Turn())
    last = dict(model.rungs.named_children()).popitem()[0]
    shared = {p.name for p, role in roles.items() if role.is_trained}
    assert shared == {p.name for p in params if p.name.startswith(f"rungs.{last}.")}
    assert list(block_modules(model).values()) == list(model.rungs.children())


def test_blocks_that_are_not_where_a_row_says_are_an_error(taught: Any) -> None:
    taught("Held", blocks={"encoder": "stairs"}, **PARTS)
    with pytest.raises(UnknownArchitecture, match=r"'stairs'.*lists: rungs"):
        describe(Held(HOLDERS["Sequential"]()))


class TransformerEncoder(nn.Module):
    """Of the same name as torch's, and packed otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Module()])
        attention = self.layers[0].self_attn = nn.Module()
        attention.in_proj_weight = nn.Parameter(torch.randn(24, 8))
        attention.out_proj = nn.Linear(8, 8)


class Derived(nn.TransformerEncoderLayer):
    """A user's own layer within torch's own stack."""


class Bert(nn.Module):
    """A user's own module that holds a configuration of a known type."""

    def __init__(self) -> None:
        super().__init__()
        self.config = hf.BertConfig(**zoo.TEXT)
        self.encoder = nn.Module()
        self.encoder.layer = nn.ModuleList([nn.Module()])
        self.encoder.layer[0].self = nn.Module()
        self.encoder.layer[0].self.query = nn.Linear(2, 2)


class vit(nn.Module):
    """A user's class whose name is a type of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Module()])
        self.layers[0].mlp = nn.Linear(2, 2)


STRANGERS: dict[str, Callable[[], nn.Module]] = {
    "class": TransformerEncoder,
    "layer": lambda: nn.TransformerEncoder(Derived(8, 2, 8), 1, enable_nested_tensor=False),
    "configuration": Bert,
    "type": vit,
}


def anatomy_of(model: nn.Module) -> set[Kind]:
    """The kinds that an anatomy gave; none if the model is refused."""
    try:
        return {p.kind for p in describe(model)} & {Kind.QUERY, Kind.KEY, Kind.OUT, Kind.MLP}
    except UnknownArchitecture:
        return set()


@pytest.mark.parametrize("name", STRANGERS)
def test_a_name_alone_gives_nobody_a_row(name: str) -> None:
    assert not anatomy_of(STRANGERS[name]())


def test_a_users_row_for_a_name_leaves_torchs_own_class_alone(taught: Any) -> None:
    def packed(config: object, rows: int) -> dict[Kind, Rows]:
        step = rows // 3
        order = (Kind.KEY, Kind.QUERY, Kind.VALUE)
        return {kind: Rows(0, i * step, step, rows) for i, kind in enumerate(order)}

    layer = nn.TransformerEncoderLayer(8, 2, 8)
    before = describe(nn.TransformerEncoder(layer, 1, enable_nested_tensor=False))
    taught(
        "TransformerEncoder",
        blocks={"encoder": "layers"},
        fused={"self_attn.in_proj_weight": packed},
        out="out_proj",
    )
    assert [p.kind for p in describe(TransformerEncoder())][:3] == ["key", "query", "value"]
    assert describe(nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)) == before


def test_a_class_derived_from_transformers_keeps_its_row() -> None:
    class Mine(hf.BertPreTrainedModel):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.bert, self.answer = hf.BertModel(config), nn.Linear(16, 2)

    kinds = {p.name: p.kind for p in describe(Mine(hf.BertConfig(**zoo.TEXT)))}
    assert kinds["answer.weight"] is Kind.HEAD
    assert kinds["bert.encoder.layer.0.attention.self.query.weight"] is Kind.QUERY


def with_weight(name: str, path: str, tensor: Tensor) -> nn.Module:
    model = zoo.build(name)
    model.get_submodule(path).weight = nn.Parameter(tensor, requires_grad=False)
    return model


WHOLE = {
    "int8": lambda: torch.zeros(16, 16, dtype=torch.int8),
    "uint8": lambda: torch.zeros(128, 1, dtype=torch.uint8),
    "float8_e4m3fn": lambda: torch.zeros(16, 16).to(torch.float8_e4m3fn),
}
PLACE = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize("dtype", WHOLE)
def test_numbers_that_cannot_be_trained_can_be_frozen_and_nothing_else(dtype: str) -> None:
    params = describe(with_weight("llama", PLACE, WHOLE[dtype]()))
    assert str(explain(parse("chain(freeze(), share(head))"), params))
    with pytest.raises(PlanError, match=rf"{PLACE}\.weight.*{dtype}.*freeze"):
        resolve(parse("share()"), params, Turn())
    remedy = f"chain(share(), freeze(named('{PLACE}.weight')))"
    roles = resolve(parse(remedy), params, Turn())
    assert sum(not role.is_trained for role in roles.values()) == 1


def test_a_packed_tensor_of_several_kinds_is_refused() -> None:
    packed = torch.zeros(256, 1, dtype=torch.uint8)
    with pytest.raises(FedplanError, match=r"qkv_proj\.weight.*packed.*without quantization"):
        describe(with_weight("phi3", "model.layers.0.self_attn.qkv_proj", packed))
