# SPDX-License-Identifier: Apache-2.0
"""Trainers of TRL as a client's loop: they get rows, train what the plan trains, nothing else."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

import fedplan as fp
from fedplan.methods import Method

trl = pytest.importorskip("trl", reason="needs trl, which no extra of fedplan but dev installs")
datasets = pytest.importorskip("datasets")
peft = pytest.importorskip("peft")

SIZE = {"vocab_size": 60, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
TOKENS = {"pad_token_id": 0, "eos_token_id": 2, "bos_token_id": 2}
PLANS = {
    "adapter": "chain(freeze(), share(adapter), keep(norm))",
    "part": "chain(freeze(), share(value), keep(norm))",
}


def tokenizer() -> Any:
    """A tokenizer of sixty words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    known = {"<pad>": 0, "<unk>": 1, "<end>": 2, **{f"w{i}": i for i in range(3, 60)}}
    made = Tokenizer(models.WordLevel(known, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "eos_token": "<end>", "unk_token": "<unk>"}
    return hf.PreTrainedTokenizerFast(tokenizer_object=made, **special)


def words(*numbers: int) -> str:
    return " ".join(f"w{number}" for number in numbers)


def sft(prompt: str, good: str, bad: str, number: int) -> dict[str, Any]:
    return {"text": f"{prompt} {good}"}


def dpo(prompt: str, good: str, bad: str, number: int) -> dict[str, Any]:
    return {"prompt": prompt, "chosen": good, "rejected": bad}


def kto(prompt: str, good: str, bad: str, number: int) -> dict[str, Any]:
    return {"prompt": prompt, "completion": [good, bad][number % 2], "label": number % 2 == 0}


def reward(prompt: str, good: str, bad: str, number: int) -> dict[str, Any]:
    return {"chosen": f"{prompt} {good}", "rejected": f"{prompt} {bad}"}


def grpo(prompt: str, good: str, bad: str, number: int) -> dict[str, Any]:
    return {"prompt": prompt}


def different_words(completions: list[str], **_: Any) -> list[float]:
    return [len({*each.split()}) + len(each) / 100 for each in completions]


ROWS: dict[str, Callable[..., dict[str, Any]]] = {
    each.__name__: each for each in (sft, dpo, kto, reward, grpo)
}
GRPO = {"num_generations": 4, "max_completion_length": 4}
MORE: dict[tuple[str, str], dict[str, Any]] = {
    ("grpo", "adapter"): {**GRPO, "beta": 0.1},
    ("grpo", "part"): GRPO,
}
TRAINERS = {"reward": "Reward"}


def table(kind: str, seed: int) -> Any:
    rows = [
        ROWS[kind](words(3 + seed, 4, 5 + i), words(20 + i, 9), words(30 + i, 7), i)
        for i in range(8)
    ]
    return datasets.Dataset.from_list(rows)


def trainer_of(kind: str, form: str, folder: Path) -> Callable[..., Any]:
    """What makes a Trainer of TRL from the rows as they are."""
    name = TRAINERS.get(kind, kind.upper())
    usual = {"max_steps": 2, "per_device_train_batch_size": 4, "learning_rate": 0.05}
    usual |= {"use_cpu": True, "bf16": False, "report_to": [], "disable_tqdm": True}

    def trainer(model: nn.Module, rows: fp.training.ExamplesDataset, _: Any) -> Any:
        arguments = getattr(trl, f"{name}Config")(
            str(folder), **usual, **MORE.get((kind, form), {})
        )
        more: dict[str, Any] = {"train_dataset": rows.to_table()}
        more["processing_class"] = tokenizer()
        if kind == "grpo":
            more["reward_funcs"] = different_words
        if kind in ("dpo", "kto") and form == "part":
            more["ref_model"] = copy.deepcopy(model)
        return getattr(trl, f"{name}Trainer")(model=model, args=arguments, **more)

    return trainer


def build(kind: str, form: str) -> nn.Module:
    torch.manual_seed(0)
    config = hf.LlamaConfig(**SIZE, **TOKENS, num_attention_heads=2, num_labels=1)
    classes = {"reward": hf.LlamaForSequenceClassification}
    model = classes.get(kind, hf.LlamaForCausalLM)(config)
    if form == "part":
        return model
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
    return peft.get_peft_model(model, lora)


def collate_for(kind: str) -> Callable[[list[Any]], dict[str, Any]]:
    """What makes the batches that fedplan scores the models on."""
    tokens = tokenizer()

    def collate(rows: list[Any]) -> dict[str, Any]:
        texts = [" ".join(cell for cell in row.values() if isinstance(cell, str)) for row in rows]
        batch = tokens(texts, return_tensors="pt", padding=True)
        labels = torch.zeros(len(rows), 1) if kind == "reward" else batch["input_ids"]
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        return {**inputs, "labels": labels}

    return collate


@pytest.mark.nightly
@pytest.mark.parametrize("form", PLANS)
@pytest.mark.parametrize("kind", ROWS)
def test_a_trainer_of_trl_trains_what_the_plan_names_on_rows(
    kind: str, form: str, tmp_path: Path
) -> None:
    """The reference adapter of DPO, KTO and GRPO comes and goes; private norms stay private."""
    model = build(kind, form)
    start = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    run = fp.simulate(
        Method(fp.parse(PLANS[form]), loop=fp.attach(trainer_of(kind, form, tmp_path / "out"))),
        model,
        {"north": table(kind, 0), "south": table(kind, 1)},
        task=fp.CustomTask(collate=collate_for(kind)),
        test=table(kind, 2),
        train=fp.TrainConfig(rounds=2),
        options=fp.RunOptions(folder=str(tmp_path / "run"), device="cpu"),
    )
    assert not fp.verify_run(run.folder)[0]
    part = "lora_" if form == "adapter" else "v_proj"
    trained = {name for name in start if part in name}
    norms = {name for name in start if "norm" in name}
    common = dict(run.global_model().named_parameters())
    assert common.keys() == start.keys()
    assert trained == {n for n in start if not torch.equal(common[n], start[n])}
    personal = [dict(run.personal_model(each).named_parameters()) for each in ("north", "south")]
    for name in start:
        equal = torch.equal(personal[0][name], personal[1][name])
        assert equal == (name not in norms), name
        assert equal or not any(torch.equal(each[name], start[name]) for each in personal)
