# SPDX-License-Identifier: Apache-2.0
"""Laws of quantized models: what is packed rests, and one digest pins it with what unpacks it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
import transformers as hf
from chat import tiny_chat
from torch import Tensor, nn

from fedplan import Turn, parse, resolve
from fedplan.errors import FedplanError, PlanError
from fedplan.models.adapters import adapter_families, merge_and_dequantize
from fedplan.models.catalog import load_pretrained
from fedplan.models.description import describe
from fedplan.models.params import TRAINABLE_DTYPES, Param
from fedplan.models.values import (
    QUANTIZATIONS,
    get_values,
    is_packed,
    mixes_examples,
    pin_packed_layout,
    quantization_config,
    set_values,
)
from fedplan.tensors.named import digests, nbytes
from fedplan.training.freezing import trainable

pytestmark = pytest.mark.filterwarnings("ignore")

FEED = torch.arange(12).reshape(2, 6)
LAYER = "model.layers.1.mlp.up_proj"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_chat(tmp_path_factory.mktemp("chat"))


def loaded(folder: str, kind: str) -> nn.Module:
    packing = {"quantization_config": quantization_config(kind, torch.float32)} if kind else {}
    return pin_packed_layout(
        load_pretrained(hf.AutoModelForCausalLM, folder, dtype=torch.float32, **packing)
    ).eval()


def with_lora(model: Any) -> Any:
    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    made = peft.get_peft_model(model, config).eval()
    with torch.no_grad():
        for name, tensor in made.named_parameters():
            if "lora_B" in name:
                tensor.normal_()
    return made


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    return model(input_ids=FEED).logits


def marks(model: nn.Module) -> dict[str, str]:
    return digests(get_values(model, describe(model)))


def packed(model: nn.Module) -> list[Param]:
    held = dict(model.named_parameters())
    return [p for p in describe(model) if is_packed(held[p.name])]


@pytest.mark.parametrize("kind", QUANTIZATIONS)
def test_the_layers_are_packed_and_described_as_what_they_are(folder: str, kind: str) -> None:
    plain, model = loaded(folder, ""), loaded(folder, kind)
    assert [(p.name, p.kind, p.block_id) for p in describe(model)] == [
        (p.name, p.kind, p.block_id) for p in describe(plain)
    ]
    assert len(packed(model)) == 14 and not any(p.dtype in TRAINABLE_DTYPES for p in packed(model))
    assert nbytes(get_values(model, packed(model))) < 0.6 * nbytes(
        {p.name: dict(plain.named_parameters())[p.name] for p in packed(model)}
    )


@pytest.mark.parametrize("kind", QUANTIZATIONS)
def test_a_plan_that_trains_what_is_packed_is_refused_with_a_remedy(folder: str, kind: str) -> None:
    params = describe(with_lora(loaded(folder, kind)))
    with pytest.raises(PlanError, match=r"cannot be trained.*share\(adapter\)"):
        resolve(parse("share()"), params, Turn())
    roles = resolve(parse("chain(freeze(), share(adapter | norm))"), params, Turn())
    assert sum(role.is_trained for role in roles.values()) == 13


def flip(tensor: Tensor) -> None:
    tensor.view(-1)[3:4].view(torch.uint8)[:1] ^= 1


def half_the_blocks(layer: Any) -> None:
    layer.weight.quant_state.blocksize //= 2


FOUR: dict[str, Callable[[Any], None]] = {
    "packed": lambda layer: flip(layer.weight.data),
    "absmax": lambda layer: flip(layer.weight.quant_state.absmax),
    "code": lambda layer: flip(layer.weight.quant_state.code),
    "scales of scales": lambda layer: flip(layer.weight.quant_state.state2.code),
    "offset": lambda layer: layer.weight.quant_state.offset.add_(1.0),
    "blocksize": half_the_blocks,
}
EIGHT: dict[str, Callable[[Any], None]] = {
    "packed": lambda layer: flip(layer.weight.data),
    "scales": lambda layer: flip(layer.state.SCB if layer.weight.SCB is None else layer.weight.SCB),
}


@pytest.mark.parametrize(
    ("kind", "what"), [*(("nf4", w) for w in FOUR), *(("int8", w) for w in EIGHT)]
)
@pytest.mark.parametrize("used", [False, True])
def test_a_digest_pins_what_is_packed_and_what_unpacks_it(
    folder: str, kind: str, what: str, used: bool
) -> None:
    model = loaded(folder, kind)
    if used:
        logits(model)
    was = marks(model)
    (FOUR if kind == "nf4" else EIGHT)[what](model.get_submodule(LAYER))
    now = marks(model)
    assert {key for key, mark in now.items() if mark != was[key]} == {f"{LAYER}.weight"}


ELSEWHERE = """
import json, sys, torch, transformers as hf
from fedplan.models.catalog import load_pretrained
from fedplan.models.description import describe
from fedplan.models.values import QUANTIZATIONS, get_values, pin_packed_layout, quantization_config
from fedplan.tensors.named import digests

found = {}
for kind in QUANTIZATIONS:
    how = {"dtype": torch.float32, "quantization_config": quantization_config(kind, torch.float32)}
    model = pin_packed_layout(load_pretrained(hf.AutoModelForCausalLM, sys.argv[1], **how))
    found[kind] = digests(get_values(model, describe(model)))
print(json.dumps(found))
"""


@pytest.mark.nightly
def test_a_digest_is_the_same_in_another_process(folder: str) -> None:
    command = [sys.executable, "-W", "ignore", "-c", ELSEWHERE, folder]
    said = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    assert json.loads(said) == {kind: marks(loaded(folder, kind)) for kind in QUANTIZATIONS}


@pytest.mark.parametrize("kind", QUANTIZATIONS)
def test_training_moves_the_adapter_and_nothing_that_is_packed(folder: str, kind: str) -> None:
    model = with_lora(loaded(folder, kind))
    params, was = describe(model), marks(model)
    roles = resolve(parse("chain(freeze(), share(adapter))"), params, Turn())
    losses = list[float]()
    with trainable(model.train(), roles) as trainable_params:
        optimizer = torch.optim.AdamW(trainable_params.parameters(), lr=0.03)
        for _ in range(4):
            loss = model(input_ids=FEED, labels=FEED).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    now = marks(model.eval())
    logits(model)
    assert now == marks(model) and losses[-1] < losses[0]
    moved = {key for key in now if now[key] != was[key]}
    assert moved == {p.key for p in params if "adapter" in p.words}


def test_int8_mixes_the_rows_of_a_batch_and_says_so(folder: str) -> None:
    """A large number of one row changes what another gives: there is no gradient of one alone."""
    for kind in QUANTIZATIONS:
        layer = loaded(folder, kind).get_submodule(LAYER)
        rows = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
        large = rows.clone()
        large[0, 3] = 50.0
        with torch.no_grad():
            apart = torch.equal(layer(rows)[1:], layer(large)[1:])
        assert mixes_examples(layer) == (not apart) == (kind == "int8")
    assert not mixes_examples(nn.Linear(2, 2))


@pytest.mark.parametrize("kind", QUANTIZATIONS)
def test_values_come_and_go_without_touching_what_is_packed(folder: str, kind: str) -> None:
    model = with_lora(loaded(folder, kind))
    params, was = describe(model), logits(model)
    values = get_values(model, params)
    addresses = [t.data_ptr() for t in model.parameters() if is_packed(t)]
    set_values(model, values, params)
    assert torch.equal(logits(model), was)
    assert addresses == [t.data_ptr() for t in model.parameters() if is_packed(t)]
    key = packed(model)[0].key
    with pytest.raises(FedplanError, match="is quantized and cannot be changed"):
        set_values(model, {key: values[key] ^ 1}, params)


def test_packed_weights_are_never_packed_anew_and_never_taken_for_floats(folder: str) -> None:
    model = loaded(folder, "nf4")
    assert model.get_submodule(LAYER).support_avx512bf16_for_cpu is False
    stored = hf.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_quant_storage="bfloat16"
    )
    strange = load_pretrained(hf.AutoModelForCausalLM, folder, quantization_config=stored)
    with pytest.raises(FedplanError, match=r"packed and stored as torch\.bfloat16"):
        pin_packed_layout(strange)


@pytest.mark.parametrize(
    ("kind", "apart"), [("nf4", 1e-5), ("fp4", 1e-5), ("int8", 0.05)], ids=QUANTIZATIONS
)
@pytest.mark.parametrize("adapter", [True, False])
def test_a_model_by_itself_is_in_floats_and_answers_alike(
    folder: str, kind: str, apart: float, adapter: bool
) -> None:
    """int8 rounds what enters its layers too, which floats do not."""
    model = loaded(folder, kind)
    model = with_lora(model) if adapter else model
    was = logits(model)
    alone = merge_and_dequantize(model)
    assert not adapter_families(alone) and not any(map(is_packed, alone.parameters()))
    assert {t.dtype for t in alone.parameters()} == {torch.float32}
    assert (logits(alone) - was).abs().max() <= apart * was.abs().max()
