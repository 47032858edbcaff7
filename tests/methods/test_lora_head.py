# SPDX-License-Identifier: Apache-2.0
"""LoRA methods leave the head of a language model alone, unless a setting asks for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import newer
import pytest
import torch
import transformers as hf
import zoo
from clients import few, loss
from torch import nn

import fedplan as fp
from fedplan.errors import FedplanError, PlanError
from fedplan.methods import METHODS, Method, method_by_name
from fedplan.models.description import describe
from fedplan.models.params import Kind

LORA = ("fedit", "ffa-lora", "fedsa-lora", "flexlora", "fedex-lora", "feddpa")


def llama(tied: bool) -> nn.Module:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**zoo.GROUPED, tie_word_embeddings=tied))


def scored() -> nn.Module:
    return hf.LlamaForSequenceClassification(hf.LlamaConfig(**zoo.GROUPED, num_labels=3))


MODELS: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "untied": (lambda: llama(False), False),
    "tied": (lambda: llama(True), False),
    "gpt2": (lambda: zoo.build("gpt2"), False),
    "t5": (lambda: zoo.build("t5"), False),
    "qwen3_vl": (lambda: newer.build("qwen3_vl"), False),
    "scored": (scored, True),
    "bert": (lambda: zoo.build("bert"), True),
    "vit": (lambda: zoo.build("vit"), True),
}
"""Models, and whether a LoRA method trains the head by default."""


def trained_heads(method: Method, model: nn.Module) -> set[str]:
    params = describe(model)
    roles = fp.resolve(method.plan, params, fp.Turn())
    return {p.name for p, role in roles.items() if role.is_trained and p.kind is Kind.HEAD}


@pytest.mark.parametrize("name", MODELS)
def test_a_language_model_keeps_its_head_and_a_classifier_trains_its_own(name: str) -> None:
    build, trains_head = MODELS[name]
    for method_name in LORA:
        method = method_by_name(method_name)
        assert method.adapt is not None
        model = method.adapt(build())
        heads = {p.name for p in describe(model) if p.kind is Kind.HEAD}
        chosen = method.for_params(describe(model))
        assert trained_heads(chosen, model) == (heads if trains_head else set()), method_name
        assert chosen.for_params(describe(model)) is chosen or trains_head
        for asked in (True, False):
            fixed = method_by_name(method_name, {"with_head": asked})
            assert fixed.for_params(describe(model)) is fixed
            if heads or not asked:
                assert trained_heads(fixed, model) == (heads if asked else set())
                continue
            with pytest.raises(PlanError, match="head matches no parameter"):
                trained_heads(fixed, model)


def test_the_default_is_that_of_a_setting_and_nothing_else_of_a_method_differs() -> None:
    for name in LORA:
        auto = method_by_name(name)
        kept, left = (method_by_name(name, {"with_head": each}) for each in (True, False))
        assert auto.lines == kept.lines != left.lines
        assert auto.for_params(describe(llama(False))).lines == left.lines
        later = auto.then(fp.freeze())
        assert later.plan.text == fp.chain(kept.plan, fp.freeze()).text
        assert later.for_params(describe(llama(True))).plan == fp.chain(left.plan, fp.freeze())
    with pytest.raises(FedplanError, match="takes with_head such as True, not 'no'"):
        method_by_name("fedit", {"with_head": "no"})
    assert not any(METHODS[each]().plan_without_head for each in METHODS if each not in LORA)


def test_a_simulation_of_a_language_model_has_no_head_to_export(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = llama(False)
    start = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    options: Any = fp.RunOptions(folder=str(tmp_path / "run"), device="cpu")
    train = fp.TrainConfig(rounds=1)
    run = fp.simulate(
        method_by_name("fedit"), model, few("llama"), loss, train=train, options=options
    )
    assert not fp.verify_run(run.folder)[0]
    after = dict(run.global_model().named_parameters())
    (head,) = (name for name in after if name.endswith("lm_head.weight"))
    assert torch.equal(after[head], start["lm_head.weight"])
    assert any("lora_B" in name and tensor.any() for name, tensor in after.items())
