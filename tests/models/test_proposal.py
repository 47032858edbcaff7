# SPDX-License-Identifier: Apache-2.0
"""Rows for types that have none: proposed from names, judged by behaviour, said in a study."""

from __future__ import annotations

import tomllib
from collections.abc import Generator
from pathlib import Path

import pytest
import torch
import zoo
from commands import run
from torch import Tensor, nn

import fedplan
from fedplan.errors import FedplanError, UnknownArchitecture
from fedplan.models import architectures
from fedplan.models.params import Kind
from fedplan.models.proposal import (
    layer_map_from_study,
    propose_layer_map,
    register_study_layer_map,
    small_model_like,
)
from fedplan.studies.experiment import build_experiment
from fedplan.studies.schema import read_study

UNSEEN = {
    "granite": {"like": "llama"},
    "dinov2_with_registers": {"like": "dinov2"},
    "phimoe": {"like": "mixtral"},
    "gptj": {"query": "attn.q_proj", "out": "attn.out_proj"},
    "biogpt": {"query": "self_attn.q_proj", "mlp": "fc1 fc2"},
    "rembert": {"out": "attention.output.dense", "head": "pooler"},
    "gpt_bigcode": {"fused": {"attn.c_attn": "grouped"}},
    "bigbird_pegasus": {"cross": "encoder_attn", "mlp": "fc1 fc2"},
}
"""Types whose row is taken away, if there is one, and some of what must be proposed for each."""


@pytest.fixture(autouse=True)
def as_before() -> Generator[None]:
    """What a test teaches is forgotten after it."""
    rows = dict(architectures.LAYER_MAPS)
    for name in UNSEEN:
        architectures.LAYER_MAPS.pop(name, None)
    yield
    architectures.LAYER_MAPS.clear()
    architectures.LAYER_MAPS.update(rows)


@pytest.mark.parametrize("name", UNSEEN)
def test_a_row_is_proposed_and_behaves(name: str) -> None:
    assert name not in architectures.LAYER_MAPS
    model = small_model_like(name)
    proposal = propose_layer_map(model)
    assert proposal.settings.items() >= UNSEEN[name].items()
    assert not proposal.faults
    assert name not in architectures.LAYER_MAPS
    said = tomllib.loads(proposal.toml)["model"]
    like = {"like": said.get("layer_map_like")}
    register_study_layer_map(model, said.get("layer_map", like))
    params = fedplan.describe(model)
    assert not any(p.uncertain or p.kind is Kind.UNKNOWN for p in params)
    plan = fedplan.parse("chain(share(), freeze(query | key), keep(blocks(0) & value))")
    assert fedplan.resolve(plan, params, fedplan.Turn())


def test_what_cannot_be_proposed_says_what_fails() -> None:
    proposal = propose_layer_map(small_model_like("codegen"))
    assert any("qkv_proj" in v.param.name for v in proposal.faults)
    with pytest.raises(
        UnknownArchitecture, match=r"value: .*qkv_proj.*moves its block's attention"
    ):
        register_study_layer_map(small_model_like("codegen"), proposal.settings)
    assert "codegen" not in architectures.LAYER_MAPS
    with pytest.raises(UnknownArchitecture, match="no list of blocks with attention"):
        propose_layer_map(small_model_like("mamba"))


def test_a_row_is_proposed_for_a_plain_module() -> None:
    class Rung(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = nn.ModuleDict({name: nn.Linear(8, 8) for name in ("q", "k", "v", "o")})
            self.norm, self.ff = nn.LayerNorm(8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (self.attn[name](self.norm(x)) for name in "qkv")
            x = x + self.attn["o"](torch.softmax(q @ k.transpose(1, 2), -1) @ v)
            return x + self.ff(x).relu()

    class Steps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.rungs = nn.Linear(3, 8), nn.ModuleList([Rung(), Rung()])
            self.head = nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = self.embed(x)
            for rung in self.rungs:
                x = rung(x)
            return self.head(x)

    model, batch = Steps(), {"x": torch.randn(2, 5, 3)}
    proposal = propose_layer_map(model, batch)
    assert not proposal.faults
    assert proposal.settings["value"] == "attn.v"
    assert proposal.settings["blocks"] == {"encoder": "rungs"}
    assert proposal.python.startswith(
        "fedplan.register_layer_map('Steps', blocks={'encoder': 'rungs'}"
    )


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"like": "lama"}, "there is no layer map 'lama'"),
        ({"fused": {"qkv": "halves"}}, "there is no layout 'halves'"),
        ({"qwery": "q"}, "no layer map: 'qwery' is not a valid Kind"),
        ({"query": 3}, "model.layer_map is no layer map"),
        ({"blocks": "layers"}, "model.layer_map is no layer map"),
    ],
)
def test_an_invalid_layer_map_is_refused(said: dict[str, object], message: str) -> None:
    with pytest.raises(FedplanError, match=message):
        layer_map_from_study(said)


def test_a_known_type_keeps_its_layer_map() -> None:
    with pytest.raises(FedplanError, match="'bert' already has another layer map"):
        register_study_layer_map(zoo.build("bert"), {"like": "llama"})
    register_study_layer_map(zoo.build("bert"), {"like": "bert"})


REGISTERS = """type = "dinov2_with_registers"
config = { image_size = 8, patch_size = 4, hidden_size = 16, num_hidden_layers = 2, num_attention_heads = 2, mlp_ratio = 1 }
"""
CONVNEXT = """type = "convnext"
config = { image_size = 8, patch_size = 2, num_stages = 2, hidden_sizes = [4, 8], depths = [1, 1] }
"""


def rewritten(file: Path, model: str, plan: str) -> None:
    text = file.read_text()
    start, end = text.index("type ="), text.index("[task]")
    text = text[:start] + model + text[end:]
    old = 'plan = "chain(share(), when(after(1), freeze(query | key)), keep(head))"'
    file.write_text(
        text.replace(old, f'plan = "{plan}"').replace("attention_examples = 4", "every = 3")
    )


@pytest.mark.parametrize("model", [REGISTERS, CONVNEXT])
def test_a_study_without_anatomy_runs_on_a_type_without_a_row(here: Path, model: str) -> None:
    rewritten(here / "study.toml", model, "chain(share(), keep(named('classifier*')))")
    code, out = run("run", "study.toml", "--output", "done")
    assert code == 0, out
    assert run("verify", "done")[0] == 0


def test_a_study_that_names_query_needs_a_row_and_takes_like(here: Path) -> None:
    plan = "chain(share(), freeze(query | key))"
    rewritten(here / "study.toml", REGISTERS, plan)
    code, out = run("explain", "study.toml")
    assert code == 2
    for word in ("query", "model.layer_map_like", "fedplan.register_layer_map", "fedplan propose"):
        assert word in out
    rewritten(here / "study.toml", REGISTERS + 'layer_map_like = "bert"\n', plan)
    code, out = run("explain", "study.toml")
    assert code == 2
    assert "the layer map 'bert' does not fit Dinov2WithRegistersForImageClassification" in out
    assert "embeddings.cls_token" in out
    assert "dinov2_with_registers" not in architectures.LAYER_MAPS
    rewritten(here / "study.toml", REGISTERS + 'layer_map_like = "dinov2"\n', plan)
    code, out = run("run", "study.toml", "--output", "done")
    assert code == 0, out
    params = build_experiment(read_study(Path("study.toml"))).agreement.params
    assert {p.kind for p in params} >= {Kind.QUERY, Kind.SCALE, Kind.HEAD}


def test_a_study_says_an_anatomy_of_its_own(here: Path) -> None:
    said = '[model.layer_map]\nlike = "vit"\nscale = "layer_scale1 layer_scale2"\n'
    rewritten(here / "study.toml", REGISTERS + said, "chain(share(), freeze(query | key))")
    code, out = run("explain", "study.toml")
    assert code == 0, out
    wrong = said + 'key = "attention.v_proj"\nvalue = "attention.k_proj"\n'
    architectures.LAYER_MAPS.pop("dinov2_with_registers")
    rewritten(here / "study.toml", REGISTERS + wrong, "share()")
    code, out = run("explain", "study.toml")
    assert code == 2
    assert "value: dinov2_with_registers" in out
    assert "moves its block's attention" in out


def test_the_command_prints_a_row_verdicts_and_what_to_say() -> None:
    code, out = run("propose", "granite")
    assert code == 0
    for word in (
        'layer_map_like = "llama"',
        "moves what others look at",
        "fedplan.register_layer_map('granite'",
    ):
        assert word in out
    code, out = run("propose", "codegen")
    assert code == 1
    assert "cannot be used" in out
    code, out = run("propose", "nonsense")
    assert code == 2
    assert "nonsense" in out
