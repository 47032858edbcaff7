# SPDX-License-Identifier: Apache-2.0
"""A run's folder is enough to open and export its models: no script, no objects, no other file."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import duals
import pytest
import torch
import transformers as hf
from commands import STUDY, run, some_digits
from datasets import Dataset
from safetensors.torch import save_file
from torch import Tensor, nn
from zoo import TEXT, VISION

import fedplan as fp
from fedplan.data.tasks.kinds import make_task
from fedplan.errors import FedplanError
from fedplan.reports.pages.run_report import report_page

PRIVATE = """
[privacy]
unit = "client"
epsilon = 200.0
noise_multiplier = 0.8
clipping_norm = 0.5
"""
CHILD = """
import sys
from pathlib import Path
import torch
from safetensors.torch import load_file
import fedplan
from fedplan.studies.export import check_export

for name in sys.argv[1:]:
    run, client = fedplan.open_run(f"runs/{name}"), "client-01" if "personal" in name else ""
    values = run.personal_values(client) if client else run.global_values()
    expected = load_file(f"expected/{name}.safetensors")
    assert values.keys() == expected.keys(), name
    assert all(torch.equal(values[key], expected[key]) for key in expected), name
    print(name, run.export(f"out/{name}", client))
    if name == "own":
        exported = load_file("out/own/model.safetensors")
        assert all(torch.equal(exported[key], expected[key]) for key in expected)
        assert "load_state_dict" in Path("out/own/README.md").read_text()
    else:
        model = run.personal_model(client) if client else run.global_model()
        assert not model.training
    if name in ("text", "cli-personal"):
        assert check_export(f"out/{name}") <= 1e-5
"""


class Net(nn.Module):
    """A model of nobody's library, with a buffer and tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(48, 48), nn.Linear(48, 3)
        self.again = nn.Linear(48, 48)
        self.again.weight = self.body.weight
        self.register_buffer("scale", torch.full((1,), 0.5))

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Tensor:
        hidden = self.again(self.body(pixel_values[..., :4, :4].flatten(1)).relu())
        return nn.functional.cross_entropy(self.head(hidden * self.scale), labels)


def own_loss(model: nn.Module, batch: Any) -> Tensor:
    return model(**batch)


def dual_loss(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch["pixel_values"]), batch["labels"])


def images(seed: int) -> Dataset:
    draw = torch.Generator().manual_seed(seed)
    pixels, labels = torch.randn(12, 3, 16, 16, generator=draw), torch.arange(12) % 3
    return Dataset.from_dict({"pixel_values": pixels.numpy(), "labels": labels}).with_format(
        "torch"
    )


def texts(seed: int) -> Dataset:
    ids = torch.randint(3, 60, (8, 6), generator=torch.Generator().manual_seed(seed))
    return Dataset.from_dict({"input_ids": ids, "labels": ids}).with_format("torch")


def words(seed: int) -> Dataset:
    return Dataset.from_dict({"text": ["a cat", "a dog of 1"] * 6, "kind": ["cat", "dog"] * 6})


def tokenizer(folder: Path) -> str:
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "of", "cat", "dog", "1"]
    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join(vocabulary))
    hf.BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    return str(folder)


def play(
    name: str, method: Any, model: nn.Module, rows: Any, *, more: int = 0, **given: Any
) -> None:
    """Play a run of two clients from Python, and keep the values of its model."""
    clients = rows if isinstance(rows, dict) else {f"client-0{i}": rows(i) for i in range(3)}
    options = fp.RunOptions(folder=f"runs/{name}")
    given = {"train": fp.TrainConfig(rounds=1, batch_size=4), "options": options, **given}
    played = fp.simulate(method, model, clients, **given)
    played = played.resume(1 + more) if more else played
    keep(name, played)


def keep(name: str, played: fp.Run) -> None:
    values = played.personal_values("client-01") if "personal" in name else played.global_values()
    copies = {key: value.clone() for key, value in values.items()}
    save_file(copies, f"expected/{name}.safetensors")


def test_ten_folders_are_exported_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("runs", "expected", "out"):
        Path(folder).mkdir()
    some_digits(tmp_path)
    torch.manual_seed(0)
    vit = hf.ViTForImageClassification(hf.ViTConfig(**VISION, num_labels=3))
    share = fp.parse("share()")
    play("classifier", share, vit, images, more=1)  # resumed
    play("personal-head", fp.methods.fedper(), vit, images)
    play("lora", fp.methods.fedit(), vit, images)
    play("lm", share, hf.GPT2LMHeadModel(hf.GPT2Config(**TEXT)), texts)
    play("own", share, Net(), images, loss=own_loss)
    secure = fp.AggregationConfig(kind="secure", threshold=2, min_contributors=2)
    play("secure", share, vit, images, aggregation=secure)
    source = tokenizer(tmp_path / "source")
    task = make_task(
        "text-classification", columns="text", label="kind", labels=["cat", "dog"], model=source
    )
    config = hf.BertConfig(**TEXT, **task.settings)
    play("text", share, hf.BertForSequenceClassification(config), words, task=task)
    shutil.rmtree(source)
    clients = duals.pictures_of("client-00", "client-01")
    play("dual", fp.methods.promptfl(), duals.build("clip"), clients, loss=dual_loss)
    Path("study.toml").write_text(STUDY.replace("rounds = 3", "rounds = 1"))
    assert run("run", "study.toml", "--output", "runs/cli-personal", "--runner", "pool")[0] == 0
    private = STUDY.replace("dropout_fraction = 0.1", "").replace("rounds = 3", "rounds = 1")
    Path("study.toml").write_text(
        private.replace(
            private[private.index("plan =") : private.index("[train]")], 'plan = "share()"\n'
        )
        + PRIVATE
    )
    assert run("run", "study.toml", "--output", "runs/dp")[0] == 0
    for name in ("cli-personal", "dp"):
        keep(name, fp.open_run(f"runs/{name}"))
    names = sorted(each.name for each in Path("runs").iterdir())
    assert len(names) == 10
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, "-c", CHILD, *names],
        env=environment, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert run("verify", "runs/own")[0] == 0
    with pytest.raises(FedplanError, match=r"Net, whose code .*load_state_dict\(run.global_values"):
        fp.open_run("runs/own").global_model()
    file = Path("runs/own/model/values.safetensors")
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    code, out = run("verify", "runs/own")
    assert code == 1 and "model/values.safetensors differs" in out
    code, out = run("export", "runs/own", "again")
    assert code == 2 and "restore it from a backup" in out


def test_a_model_that_is_not_stored_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = fp.RunOptions(folder="run", store_model=False)
    train = fp.TrainConfig(rounds=1, batch_size=4)
    fp.simulate(
        fp.parse("share()"), Net(), {"a": images(1)}, own_loss, train=train, options=options
    )
    assert not Path("run/model").exists()
    code, out = run("export", "run", "model")
    assert code == 2 and "RunOptions(store_model=False)" in " ".join(out.split())
    page = report_page([Path("run")]).html()
    assert "a CustomTask has no predictions" in page
    code, out = run("evaluate", "run")
    assert code == 2 and "a CustomTask has no predictions" in " ".join(out.split())
