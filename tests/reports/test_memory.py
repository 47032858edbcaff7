# SPDX-License-Identifier: Apache-2.0
"""The memory of a turn: exact where shapes say it, near what a step keeps where it is estimated."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from typer.testing import CliRunner

import fedplan as fp
from fedplan.cli import app
from fedplan.errors import FedplanError
from fedplan.language.predicates import Turn
from fedplan.methods.registry import method_by_name
from fedplan.models.description import describe
from fedplan.models.params import Params
from fedplan.reports.formats import megabytes
from fedplan.reports.memory import MemoryEstimate, TrainingStep, estimate_memory
from fedplan.training.freezing import trainable

DOCUMENT = Path(__file__).parents[2] / "research" / "pages" / "memory.md"
STEP = TrainingStep(batch_size=4, sequence_length=64)
WORDS = 100
SHAPE: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 256,
}
PLANS = {
    "all": "share()",
    "a block": "chain(freeze(), share(blocks(-1)))",
    "lora": "chain(freeze(), share(adapter))",
}


def bert() -> nn.Module:
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return transformers.BertForSequenceClassification(transformers.BertConfig(**still, **SHAPE))


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(num_key_value_heads=2, **SHAPE))


def vit() -> nn.Module:
    said = {key: value for key, value in SHAPE.items() if key != "vocab_size"}
    config = transformers.ViTConfig(
        image_size=32,
        patch_size=4,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        **said,
    )
    return transformers.ViTForImageClassification(config)


def fed(model: nn.Module) -> dict[str, Tensor]:
    if isinstance(model, transformers.ViTForImageClassification):
        return {"pixel_values": torch.randn(4, 3, 32, 32)}
    return {"input_ids": torch.randint(WORDS, (4, 64))}


def kept(model: nn.Module, plan: str) -> int:
    """The bytes that autograd keeps of a forward pass, each storage once, without the weights."""
    roles = fp.resolve(fp.parse(plan), describe(model), Turn(1, "a"))
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    seen = dict[int, int]()

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    inside = model.base_model if plan == PLANS["lora"] else model
    batch = fed(inside.model if plan == PLANS["lora"] else inside)  # pyright: ignore
    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with trainable(model.train(), roles), hooks:
        answer = model(**batch).logits
        found = sum(seen.values())
        assert answer is not None
    return found


def told(params: Params, plan: str, step: TrainingStep = STEP) -> MemoryEstimate:
    return estimate_memory(params, fp.resolve(fp.parse(plan), params, Turn(1, "a")), step)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("make", [bert, llama, vit])
def test_the_estimate_is_near_what_a_step_keeps(make: Any, plan: str) -> None:
    torch.manual_seed(0)
    model = make()
    if plan == "lora":
        model = method_by_name("fedit", {"rank": 4, "with_head": False}).adapt(model)  # pyright: ignore
    about = told(describe(model), PLANS[plan]).activations
    assert 0.85 < about / kept(model, PLANS[plan]) < 1.15


def test_weights_gradients_and_optimizer_follow_from_shapes() -> None:
    params = fp.params_of("bert-base")
    whole = sum(p.nbytes for p in params)
    found = told(params, "share()")
    assert found.weights == {"float32": whole}
    assert (found.gradients, found.optimizer) == (whole, 2 * whole)
    assert told(params, "share()", TrainingStep(optimizer="sgd")).optimizer == 0
    some = told(params, "chain(freeze(), share(query))")
    assert some.gradients == sum(p.nbytes for p in params if p.kind == "query")


def test_what_stands_below_the_lowest_trained_block_keeps_nothing() -> None:
    params = fp.params_of("llama-3.2-1b")
    all_, low, high = (
        told(params, f"chain(freeze(), share(blocks({i})))").activations for i in (0, 8, 15)
    )
    assert all_ > 1.9 * low > 3.5 * high > 0
    again = told(params, "share()", TrainingStep(gradient_checkpointing=True))
    assert again.activations < told(params, "share()", TrainingStep()).activations / 5


def test_four_bits_are_half_a_byte_and_their_scales() -> None:
    params = fp.params_of("llama-3.2-1b", dtype="bfloat16")
    held = told(params, "chain(freeze(), share(norm))", TrainingStep(quantized="nf4")).weights
    linear = sum(p.numel for p in params if str(p.kind) in ["query", "key", "value", "out", "mlp"])
    assert held["nf4"] == linear // 2 + linear // 64 + 4 * linear // (64 * 256)
    assert held["bfloat16"] == 2 * (sum(p.numel for p in params) - linear)


def test_what_is_packed_already_counts_as_what_it_stands_for() -> None:
    params = fp.params_of("llama-3.2-1b", dtype="bfloat16")
    linear = {p for p in params if str(p.kind) in ["query", "key", "value", "out", "mlp"]}
    packed = tuple(
        replace(p, shape=(p.numel // 2, 1), dtype="uint8") if p in linear else p for p in params
    )
    plan = "chain(freeze(), share(norm))"
    here, there = (
        told(params, plan, TrainingStep(quantized="nf4")),
        told(packed, plan, TrainingStep()),
    )
    assert sum(here.weights.values()) == sum(there.weights.values())
    assert (here.total, here.activations) == (there.total, there.activations)


def test_the_table_of_the_document_is_what_the_command_says() -> None:
    rows = re.findall(r"^\| [^|]+ \| `([^`]+)` \| (.*) \|$", DOCUMENT.read_text(), re.M)
    rows = [row for row in rows if "|" in row[1]]
    assert len(rows) == 8
    for said, cells in rows:
        asked = [
            "explain",
            "llama-3.2-1b",
            *shlex.split(said),
            "--batch-size",
            "4",
            "--max-length",
            "1024",
        ]
        done = CliRunner().invoke(app, [*asked, "--json"])
        (stage,) = json.loads(done.stdout)["clients"][0]["stages"]
        found = stage["memory"]
        fits = "yes" if found.pop("fits_24_gb") else "no"
        numbers = (sum(found.pop("weights").values()), *found.values())
        assert cells == " | ".join([*map(megabytes, numbers), fits]), said
    printed = CliRunner(env={"COLUMNS": "80"}).invoke(app, asked).stdout  # of the last
    assert "Does not fit on a GPU of 24 GB" in printed
    assert all(len(line) <= 80 for line in printed.splitlines())


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (
            ["share()", "--batch-size", "1", "--optimizer", "lion"],
            "the optimizer 'lion' is unknown",
        ),
        (["share()", "--batch-size", "1", "--quantization", "nf5"], "use one of nf4, fp4, int8"),
        (["share()", "--method", "fedavg"], "has its own plan: omit 'share"),
        (["--method", "fedit", "--setting", "rank"], "NAME=VALUE"),
    ],
)
def test_a_wrong_word_is_a_message(said: list[str], words: str) -> None:
    done = CliRunner().invoke(app, ["explain", "gpt2", *said])
    assert done.exit_code == 2 and words in " ".join(done.stderr.split())


def test_a_step_of_nothing_is_refused() -> None:
    with pytest.raises(FedplanError, match="must be at least 1"):
        TrainingStep(batch_size=0)
