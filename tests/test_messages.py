# SPDX-License-Identifier: Apache-2.0
"""Mistakes in Python, and packages that are missing: the thing, the value and the remedy."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import STUDY, some_digits
from silent_mistakes import played
from tables import tokenizer

import fedplan as fp
from fedplan.audits.run import verify_run
from fedplan.data.tasks.kinds import make_task
from fedplan.errors import EXTRAS
from fedplan.models.catalog import params_of
from fedplan.studies.experiment import build_experiment
from fedplan.studies.schema import study_from_dict

OFFLINE = r"'hub:org/name' is not in .* cache, and HF_HUB_OFFLINE is set: .*`hf download org/name`"


def long_texts(folder: Path) -> Any:
    (folder / "texts.csv").write_text("text,mood\n" + "a cat sat on a mat,good\na dog,bad\n" * 9)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    sections = {
        "model": {"type": "roberta", "config": {**sizes, "max_position_embeddings": 8}},
        "task": {"kind": "text-classification", "input": "text", "label": "mood"},
        "data": {"path": str(folder / "texts.csv"), "num_clients": 2},
        "method": {"name": "fedavg"},
    }
    sections["task"] |= {"tokenizer": tokenizer(folder), "max_length": 64}
    return build_experiment(study_from_dict(sections))


def diverged(folder: Path) -> Any:
    raise fp.FedplanError(" ".join(str(each) for each in played(train={"lr": 1e9}).warnings))


CASES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "positional": (lambda _: fp.TrainConfig(5), r"TrainConfig\(5\).*TrainConfig\(rounds=5\)"),
    "lr": (lambda _: fp.TrainConfig(learning_rate=0.1), "did you mean train.lr"),
    "lr=1e9": (diverged, r"learning rate, which is 1e\+09: .*TrainConfig\(lr=0.001\)"),
    "device": (lambda _: fp.TrainConfig(device="cuda:7"), r"fp.RunOptions\(device=...\)"),
    "no such device": (
        lambda _: played(options=fp.RunOptions(device="xpu:7")),
        'XPU is not available here; use device = "cpu" or "auto"',
    ),
    "lone epsilon": (
        lambda _: fp.PrivacyConfig(epsilon=3.0),
        "unit: it is missing.*set it to 'client' or 'example'",
    ),
    "max_length": (
        long_texts,
        r"max_length is 64, and an example has 8 tokens.*positions for 6: set task.max_length = 6",
    ),
    "hub offline": (lambda _: params_of("hub:org/name"), OFFLINE),
    "hub offline, tokenizer": (
        lambda _: make_task("causal-lm", columns="text", model="hub:org/name").tokenizer,
        OFFLINE,
    ),
    "explain a method": (
        lambda _: fp.explain(fp.methods.fedper(), params_of("vit-tiny-16")),
        r"fp.methods.fedper\(\).plan",
    ),
    "verify a run": (lambda _: verify_run(fp.Run(Path("run"))), r"as run\.folder"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_in_a_call_is_told(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    call, text = CASES[name]
    with pytest.raises(fp.FedplanError, match=text):
        call(tmp_path)


def test_every_missing_extra_is_told_in_one_line(tmp_path: Path) -> None:
    some_digits(tmp_path)
    (tmp_path / "study.toml").write_text(STUDY)
    before = sorted(tmp_path.rglob("*"))
    program = Path(__file__).parent / "kit" / "missing_extras.py"
    done = subprocess.run(
        [sys.executable, program, tmp_path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    told: list[tuple[str, int, str]] = json.loads(done.stdout.splitlines()[-1])
    for name, code, message in told:
        package = name.strip()
        remedy = f"not installed: pip install 'fedplan[{EXTRAS[package]}]'\n"
        needs = f" needs {package.replace('_', '-')}, which is "
        assert code == 2 and message.count("\n") == 1, (name, message)
        assert message.startswith("fedplan: ") and message.endswith(needs + remedy), message
    assert {name.strip() for name, *_ in told} == EXTRAS.keys()
    assert sorted(tmp_path.rglob("*")) == before, "nothing stands in the way of the next try"


def test_the_table_of_extras_is_that_of_the_package() -> None:
    project = Path(__file__).parent.parent / "pyproject.toml"
    listed = tomllib.loads(project.read_text())["project"]["optional-dependencies"]
    for package, extra in EXTRAS.items():
        name = package.replace("_", "-")
        assert any(each.startswith(f"{name}>=") for each in listed[extra]), (name, extra)
    assert set(EXTRAS.values()) == set(listed) - {"dev", "docs"}
