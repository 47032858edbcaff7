# SPDX-License-Identifier: Apache-2.0
"""A stored model is built from its own folder alone, whatever stands in its description."""

from __future__ import annotations

import builtins
import io
import json
import sys
from pathlib import Path
from typing import Any

import peft
import pytest
import transformers as hf
from torch import nn
from zoo import TEXT

from fedplan.data.custom_task import CustomTask
from fedplan.data.tasks.kinds import make_task
from fedplan.studies.schema import ConfigError
from fedplan.studies.stored_model import load_stored_model, store_model

TASK = {
    **{"kind": "text-classification", "columns": ["text"], "label": "kind", "labels": ["a", "b"]},
    **{"max_length": 8, "image_size": 0, "template": ""},
}
HOSTILE: list[tuple[str, Any, str]] = [
    ("task", {**TASK, "kind": "hostile_code:Task"}, "not a built-in task"),
    ("task", {**TASK, "kind": ["text-classification"]}, "task.kind"),
    ("task", {**TASK, "tokenizer": "../outside"}, "tokenizer"),
    ("task", "hostile_code", "task"),
    ("class", "hostile_code.Model", "transformers has no model"),
    ("class", "AutoModel", "transformers has no model"),
    ("class", "pipeline", "transformers has no model"),
    ("class", "__builtins__", "transformers has no model"),
    ("class", 3, "class"),
    ("adapters", ["../../outside"], "not the name of an adapter"),
    ("adapters", ["/outside"], "not the name of an adapter"),
    ("adapters", ["..\\outside"], "not the name of an adapter"),
    ("adapters", [".."], "not the name of an adapter"),
    ("adapters", [""], "not the name of an adapter"),
    ("adapters", ["absent"], "cannot be built"),
    ("adapters", "default", "adapters"),
    ("active", [["default"]], "active"),
    ("origin", "../outside", "only the weights of a quantized model"),
    ("origin", {"hub": "x"}, "origin"),
    ("kind", "pickle", "kind"),
    ("kind", None, "kind"),
    ("kind", "dual-encoder", "cannot be built"),
    ("params", {"classifier.bias": 3}, "params"),
    ("unknown", "x", "unknown"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with an adapter; beside it a module, and another model with an adapter."""
    place = tmp_path_factory.mktemp("stored")
    model = hf.BertForSequenceClassification(hf.BertConfig(**TEXT))
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["query"]))
    for name in ("model", "outside"):
        store_model(adapted, CustomTask(), place / name)
    config = place / "outside/adapters/default/adapter_config.json"
    config.rename(place / "outside/adapter_config.json")
    (place / "hostile_code.py").write_text("raise SystemExit('hostile code ran')")
    return place / "model"


def test_a_hostile_description_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = folder / "model.json"
    honest = file.read_text()
    opened = list[str]()
    plain_open = io.open

    def watched(name: Any, *args: Any, **more: Any) -> Any:
        opened.append(str(name))
        return plain_open(name, *args, **more)

    monkeypatch.syspath_prepend(folder.parent)
    monkeypatch.setattr(builtins, "open", watched)
    monkeypatch.setattr(io, "open", watched)
    for field, value, message in HOSTILE:
        file.write_text(json.dumps({**json.loads(honest), field: value}))
        with pytest.raises(ConfigError, match="restore it from a backup") as refusal:
            load_stored_model(folder)
        assert message in str(refusal.value), (field, value)
        assert "hostile_code" not in sys.modules, (field, value)
        assert not [each for each in opened if "outside" in each], (field, value)
    for text in ("", "[]", "null", "{", "[" * 99_999, "{}"):
        file.write_text(text)
        with pytest.raises(ConfigError, match="restore it from a backup"):
            load_stored_model(folder)
    file.write_text(honest)
    load_stored_model(folder)
    assert opened


def test_names_of_values_cannot_replace_a_method(tmp_path: Path) -> None:
    store_model(nn.Sequential(nn.Linear(1, 1)), CustomTask(), tmp_path / "model")
    file = tmp_path / "model/model.json"
    content = json.loads(file.read_text())
    for name in ("state_dict.x", "forward", "__class__", "", "a..b"):
        file.write_text(json.dumps({**content, "params": {name: "0.weight"}}))
        with pytest.raises(ConfigError, match="restore it from a backup"):
            load_stored_model(tmp_path / "model")
    file.write_text(json.dumps({**content, "params": {"0.weight": "absent"}}))
    with pytest.raises(ConfigError, match="absent"):
        load_stored_model(tmp_path / "model")


def test_an_adapter_is_built_without_other_files(folder: Path) -> None:
    file = folder / "adapters/default/adapter_config.json"
    honest = json.loads(file.read_text())
    more = {
        "megatron_config": {"a": 1},
        "megatron_core": "hostile_code",
        "init_lora_weights": "pissa",
    }
    file.write_text(json.dumps(honest | more))
    try:
        model, _ = load_stored_model(folder)
    finally:
        file.write_text(json.dumps(honest))
    assert "default" in model.peft_config  # pyright: ignore[reportOperatorIssue]


def test_an_adapter_with_an_odd_name_is_stored_as_values(tmp_path: Path) -> None:
    model = hf.BertForSequenceClassification(hf.BertConfig(**TEXT))
    config = peft.LoraConfig(r=2, target_modules=["query"])
    store_model(
        peft.get_peft_model(model, config, adapter_name="a/b"), CustomTask(), tmp_path / "model"
    )
    assert sorted(p.name for p in (tmp_path / "model").iterdir()) == [
        "model.json",
        "values.safetensors",
    ]
    assert load_stored_model(tmp_path / "model")[0].state_dict()


def test_a_task_is_loaded_as_it_was(tmp_path: Path) -> None:
    task = make_task(
        "image-classification", columns="image", label="digit", labels=[0, 10, 2], image_size=8
    )
    model = hf.BertForSequenceClassification(hf.BertConfig(**TEXT))
    store_model(model, task, tmp_path / "model")
    loaded = load_stored_model(tmp_path / "model")[1]
    assert (loaded.kind, loaded.columns, loaded.labels) == (task.kind, task.columns, task.labels)
