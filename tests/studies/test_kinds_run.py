# SPDX-License-Identifier: Apache-2.0
"""Studies of every new kind of task run, say their primary score, and export what loads again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from chat import END, chat_tokenizer, messages, pairs, tiny_chat

from fedplan.data.tables import DataError
from fedplan.data.tasks.language import PLAIN_TEMPLATE
from fedplan.errors import FedplanError
from fedplan.federation.ledger.callbacks import EarlyStopping
from fedplan.federation.ledger.history import Metrics
from fedplan.runners.simulation import Simulation
from fedplan.studies.export import export_run
from fedplan.studies.federated_data import load_federated_data
from fedplan.studies.schema import study_from_dict

SIZE = len(chat_tokenizer())
BERT = {
    "type": "bert",
    "config": {
        "vocab_size": SIZE,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    },
}
T5 = {
    "type": "t5",
    "config": {
        "vocab_size": SIZE,
        "d_model": 16,
        "d_kv": 8,
        "d_ff": 16,
        "num_layers": 1,
        "num_heads": 2,
        "decoder_start_token_id": 0,
        "pad_token_id": 0,
        "eos_token_id": 1,
    },
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    tiny_chat(tmp_path / "chat")
    rows = [
        {
            **row,
            "n": i,
            "fold": i % 4,
            "colours": [word for word in ("blue", "red") if word in row["response"]],
        }
        for i, row in enumerate(pairs(24))
    ]
    for name, held in (("pairs", rows), ("chats", messages(24))):
        Path(f"{name}.jsonl").write_text("\n".join(map(json.dumps, held)))
    return tmp_path


def said(task: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "model": {"path": "chat"},
        "task": {"tokenizer": "chat", **task},
        "data": {"path": "pairs.jsonl", "num_clients": 2, "test_filter": {"fold": 1}},
        "method": {"plan": "share()"},
        "train": {"rounds": 2, "batch_size": 4, "lr": 0.01},
        **more,
    }


def played(task: dict[str, Any], **more: Any) -> dict[str, Any]:
    simulation = Simulation(study_from_dict(said(task, **more)), Path("run")).run()
    assert simulation.federation.global_state.round == 2
    return json.loads(Path("run/metrics.jsonl").read_text().splitlines()[-1])


@pytest.mark.parametrize("packing", [False, True])
def test_a_chat_model_is_tuned_exported_and_answers(packing: bool, here: Path) -> None:
    tokenizer = chat_tokenizer(template=None)
    tokenizer.save_pretrained("chat")
    Path("chat/chat_template.jinja").unlink(missing_ok=True)
    data = {"path": "chats.jsonl", "num_clients": 2}
    asked = {"kind": "instruction", "input": "messages", "packing": packing}
    found = played(asked, data=data, method={"name": "fedit", "settings": {"rank": 2}})
    assert found["personal"]["perplexity_worst"] >= found["personal"]["perplexity"], (
        "less perplexity is better"
    )
    export_run(Path("run"), Path("out"))
    again: Any = hf.AutoTokenizer.from_pretrained("out")
    assert again.chat_template == PLAIN_TEMPLATE, "the template that it was tuned with goes with it"
    chat = [{"role": "user", "content": "What colour is the sky?"}]
    inputs = again.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    model: Any = hf.AutoModelForCausalLM.from_pretrained("out")
    assert model.generate(**inputs, max_new_tokens=3).shape[1] > inputs["input_ids"].shape[1]
    assert model.config.use_cache and again.eos_token == END


def test_a_text_follows_from_another_and_its_attention_is_looked_at(here: Path) -> None:
    asked = {"kind": "seq2seq-lm", "input": "prompt response"}
    found = played(asked, model=T5, evaluate={"attention_examples": 3})
    assert set(found["global"]) == {"loss", "accuracy", "perplexity", "examples"}
    export_run(Path("run"), Path("out"))
    model: Any = hf.AutoModelForSeq2SeqLM.from_pretrained("out")
    assert model.generate(torch.tensor([[5, 6, 1]]), max_new_tokens=3).shape[1] > 1
    ledger = Path("run/ledger.jsonl").read_text()
    assert '"attention"' in ledger and '"decoder"' in ledger


def test_numbers_are_learnt_with_the_metrics_that_were_asked_for(here: Path) -> None:
    asked = {"kind": "regression", "input": "prompt", "label": "n"}
    found = played(asked, model=BERT, evaluate={"metrics": ["max_error"]})
    scores = {"loss", "mae", "rmse", "r2", "pearson", "max_error", "examples"}
    assert set(found["global"]) == scores
    assert found["personal"]["rmse_worst"] == max(
        each["rmse"] for each in found["clients"].values()
    )
    export_run(Path("run"), Path("out"))
    model: Any = hf.AutoModelForSequenceClassification.from_pretrained("out")
    assert (model.config.problem_type, model.config.num_labels) == ("regression", 1)


def test_several_labels_are_learnt_by_their_weights(here: Path) -> None:
    asked = {"kind": "multi-label", "input": "prompt response", "label": "colours"}
    found = played({**asked, "class_weights": {"red": 4.0}}, model=BERT)
    assert set(found["global"]) == {"loss", "accuracy", "f1_micro", "f1_macro", "auroc", "examples"}
    light = study_from_dict(said(asked, model=BERT))
    heavy = study_from_dict(said({**asked, "class_weights": {"red": 4.0}}, model=BERT))
    assert light.digest != heavy.digest, "what changes a turn is agreed on"


def test_sites_bring_numbers_without_saying_which_there_are(here: Path) -> None:
    asked = {"kind": "regression", "input": "prompt", "label": "n"}
    made = study_from_dict(said(asked, model=BERT, data={}, clients={"names": ["north", "south"]}))
    assert made.task.labels == []


def test_packed_rows_are_refused_where_one_row_is_hidden(here: Path) -> None:
    asked = {"kind": "instruction", "input": "prompt response", "packing": True}
    hidden = {"privacy": {"unit": "example", "epsilon": 8.0, "examples_per_site": 24}}
    hidden |= {"train": {"steps": 1, "batch_size": 4}}
    with pytest.raises(DataError, match="example-level privacy needs one row"):
        load_federated_data(study_from_dict(said(asked, **hidden)), None)


@pytest.mark.filterwarnings("ignore:Position ids are not supported:UserWarning")  # peft says so
def test_an_adapter_that_joins_packed_conversations_is_refused(here: Path) -> None:
    asked = {"kind": "instruction", "input": "prompt response", "packing": True}
    model = {"path": "chat", "adapter": {"type": "prompt", "num_virtual_tokens": 2}}
    with pytest.raises(FedplanError, match="mixes packed conversations"):
        Simulation(study_from_dict(said(asked, model=model)), Path("run"))


def test_early_stopping_by_the_clients_own_scores_knows_which_way_is_better(here: Path) -> None:
    asked = {"kind": "instruction", "input": "prompt response"}
    metric = "validation.personal.perplexity"
    made = Simulation(
        study_from_dict(
            said(
                asked,
                data={"path": "pairs.jsonl", "num_clients": 2, "validation_fraction": 0.3},
                early_stopping={"metric": metric, "patience": 1},
            )
        ),
        Path("run"),
    )
    closed = next(made.rounds())
    assert closed.higher_is_better is False
    falling = replace(closed, metrics=Metrics({metric: x} for x in (3.0, 2.0, 1.0)))
    assert EarlyStopping(metric, patience=1)(falling) is None
    assert EarlyStopping(metric, patience=1, higher_is_better=True)(falling)
