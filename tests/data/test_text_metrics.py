# SPDX-License-Identifier: Apache-2.0
"""Metrics of generated answers: as their libraries compute them, from what the model says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import sacrebleu
import torch
import transformers as hf
from chat import messages, pairs, tiny_chat
from datasets import Dataset
from rouge_score.rouge_scorer import RougeScorer

from fedplan.data.metrics import metric_named
from fedplan.data.tables import DataError
from fedplan.data.tasks.kinds import make_task

NAMES = ("exact_match", "rouge_l", "chrf")
METRICS = [metric_named(name) for name in NAMES]


def test_answers_are_those_that_the_model_generates_from_the_prompt(tmp_path: Path) -> None:
    folder = tiny_chat(tmp_path)
    model: Any = hf.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer: Any = hf.AutoTokenizer.from_pretrained(folder)
    task = make_task("instruction", columns="messages", model=folder, extra_metrics=METRICS)
    rows = messages(5)
    examples = task.prepare(Dataset.from_list(rows))
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    for _ in range(60):  # until some of the answers are right
        loss = task.loss(model, examples.batch(torch.arange(len(rows))))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    made = task.predict(model, examples, batch_size=2)
    assert made.texts is not None and made.select(made.sizes.argsort()).texts is not None
    for row, (truth, text) in zip(rows, made.texts, strict=True):
        *before, answer = row["messages"]
        asked = tokenizer.apply_chat_template(before, add_generation_prompt=True, tokenize=False)
        ids = tokenizer(asked, return_tensors="pt", add_special_tokens=False).input_ids
        mine = model.generate(ids, do_sample=False, max_length=128, attention_mask=ids > -1)
        assert truth == answer["content"]
        assert text == tokenizer.decode(mine[0, ids.shape[1] :], skip_special_tokens=True).strip()
    truths, texts = made.texts.T.tolist()
    scores = task.measure(made)
    scorer = RougeScorer(["rougeL"])
    rouge = [scorer.score(a, b)["rougeL"].fmeasure for a, b in zip(truths, texts, strict=True)]
    assert scores["exact_match"] == sum(map(str.__eq__, truths, texts)) / 5 > 0
    assert scores["rouge_l"] == pytest.approx(sum(rouge) / 5)
    assert scores["chrf"] == sacrebleu.corpus_chrf(texts, [truths]).score
    silent = make_task("instruction", columns="messages", model=folder)
    assert silent.predict(model, examples, batch_size=2).texts is None


def test_an_encoder_decoder_answers_too(tmp_path: Path) -> None:
    folder = tiny_chat(tmp_path)
    tokenizer: Any = hf.AutoTokenizer.from_pretrained(folder)
    sizes = {"d_model": 16, "d_ff": 16, "d_kv": 8, "num_layers": 1, "num_heads": 2}
    config = hf.T5Config(
        **sizes, vocab_size=len(tokenizer), decoder_start_token_id=0, eos_token_id=1, pad_token_id=0
    )
    task = make_task(
        "seq2seq-lm",
        columns=("prompt", "response"),
        model=folder,
        max_length=24,
        extra_metrics=METRICS,
    )
    rows = pairs(3)
    model = hf.T5ForConditionalGeneration(config)
    made = task.predict(model, task.prepare(Dataset.from_list(rows)), batch_size=2)
    assert made.texts is not None
    assert made.texts[:, 0].tolist() == [row["response"] for row in rows]
    assert {*NAMES} <= task.measure(made).keys()


def test_without_answers_it_is_told() -> None:
    with pytest.raises(DataError, match="causal-lm has none: use the task instruction"):
        make_task("causal-lm", columns="text", extra_metrics=METRICS)
