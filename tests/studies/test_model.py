# SPDX-License-Identifier: Apache-2.0
"""Laws of a study's model: an adapter by its name, a saved one, packed weights, and what goes out."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers as hf
from chat import pairs, tiny_chat
from commands import run
from datasets import Dataset
from studies import offered
from torch import Tensor, nn

from fedplan.data import make_task
from fedplan.errors import FedplanError
from fedplan.methods import fedit
from fedplan.models.adapters import adapter_families
from fedplan.models.catalog import load_pretrained
from fedplan.models.description import describe
from fedplan.models.values import (
    QUANTIZATIONS,
    is_packed,
    is_quantized,
    pin_packed_layout,
    quantization_config,
    set_values,
)
from fedplan.run import Run, RunOptions, simulate
from fedplan.runners.simulation import Simulation
from fedplan.studies.experiment import build_experiment, outline_agreement
from fedplan.studies.export import export_run
from fedplan.studies.run import read_run, read_run_study
from fedplan.studies.schema import ConfigError, Study, read_study
from fedplan.studies.sections import TrainConfig
from fedplan.tensors.named import Tensors, digests, nbytes

pytestmark = pytest.mark.filterwarnings("ignore")

STUDY = """
name = "tiny"
[model]
path = "chat"
[model.adapter]
type = "lora"
r = 2
target = "query | value"
[task]
kind = "causal-lm"
input = "response"
tokenizer = "chat"
max_length = 24
[data]
path = "rows.parquet"
num_clients = 2
holdout_fraction = 0.0
[method]
plan = "chain(freeze(), share(adapter))"
[train]
rounds = 2
batch_size = 8
lr = 0.05
"""
FEED = torch.arange(12).reshape(2, 6)


@pytest.fixture
def chat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a tiny chat model, rows for it and a study of LoRA."""
    monkeypatch.chdir(tmp_path)
    tiny_chat("chat")
    Dataset.from_list(pairs()).to_parquet("rows.parquet")
    Path("study.toml").write_text(STUDY)
    return tmp_path


def study(*changes: str) -> Study:
    return read_study(Path("study.toml"), list(changes))


def packed(kind: str) -> str:
    return f"model.quantization={kind}"


def adapter(**said: Any) -> str:
    inner = ", ".join(f"{name} = {json.dumps(value)}" for name, value in said.items())
    return f"model.adapter={{ {inner} }}"


def played(made: Study, folder: str = "run", rounds: int = 0) -> Simulation:
    simulation = Simulation(made, Path(folder))
    if rounds:
        for _ in range(rounds):
            simulation.federation.commit(simulation.federation.run_round())
    else:
        simulation.run()
    return simulation


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    return model.eval()(input_ids=FEED).logits


def of_world(simulation: Simulation) -> Tensor:
    federation = simulation.federation
    set_values(federation.model, federation.global_values(), federation.agreement.trainable)
    return logits(federation.model)


# Adapters by name ----------------------------------------------------------------------------

NAMED: dict[str, dict[str, Any]] = {
    "lora": {"r": 2, "target": "query | value"},
    "dora": {"r": 2, "target": "query | mlp"},
    "ia3": {"target": "key | value | mlp"},
    "vera": {"r": 2, "target": "query | out"},
    "prefix": {"num_virtual_tokens": 2},
    "prompt": {"num_virtual_tokens": 2},
    "ln_tuning": {"target": "norm"},
}


@pytest.mark.parametrize("name", NAMED)
def test_an_adapter_by_its_name_is_a_part_that_a_plan_can_share(chat: Path, name: str) -> None:
    word = "prompt" if name in ("prefix", "prompt") else "adapter"
    made = study(adapter(type=name, **NAMED[name]), f"method.plan=chain(freeze(), share({word}))")
    experiment = build_experiment(made)
    free = {n for n, tensor in experiment.model.named_parameters() if tensor.requires_grad}
    assert {p.name for p in experiment.agreement.exchanged} == free
    assert experiment.model.active_peft_config.task_type == "CAUSAL_LM"
    assert experiment.model_digest == build_experiment(made).model_digest


def test_a_target_is_the_part_and_no_more(chat: Path) -> None:
    for target, kinds in (("query", {"query"}), ("key | mlp", {"key", "mlp"})):
        params = build_experiment(study(f"model.adapter.target={target}")).agreement.params
        assert {str(kind) for p in params if p.kind == "adapter" for kind in p.on} == kinds
    ia3 = build_experiment(
        study(adapter(type="ia3", target="value | mlp"))
    ).model.active_peft_config
    assert ia3.feedforward_modules and all("mlp" in name for name in ia3.feedforward_modules)


def test_the_adapter_of_a_study_goes_before_that_of_its_method(chat: Path) -> None:
    named = ("method.plan=", "method.name=fedit", "method.settings={ with_head = false }")
    params = build_experiment(study(*named, "model.adapter.target=mlp")).agreement.params
    assert {str(kind) for p in params if p.kind == "adapter" for kind in p.on} == {"mlp"}
    plain = study().model.model_copy(update={"adapter": None})
    own = build_experiment(study(*named).model_copy(update={"model": plain})).agreement.params
    assert {str(k) for p in own if p.kind == "adapter" for k in p.on} == {"query", "value"}
    with pytest.raises(FedplanError, match=r"method\.settings\.rank configures an adapter"):
        build_experiment(study(*named[:2], "method.settings={ rank = 4 }"))


def test_exact_lora_folds_at_the_scale_of_the_adapter_and_never_into_what_is_packed(
    chat: Path,
) -> None:
    exact = ("method.plan=", "method.name=fedex-lora", "method.settings={ with_head = false }")
    with pytest.raises(FedplanError, match=r"LoRA \(4\.0\): set lora_alpha = 1 \* r"):
        build_experiment(study(*exact, "model.adapter.lora_alpha=8"))
    alike = (*exact, "model.adapter.lora_alpha=2")
    assert build_experiment(study(*alike)).agreement.server_merged
    for kind in QUANTIZATIONS:
        with pytest.raises(FedplanError, match="by_residual"):
            played(study(*alike, packed(kind)), kind)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (adapter(type="loar"), "did you mean lora"),
        (adapter(r=8), "set either type"),
        (adapter(type="lora", path="x"), "set either type"),
        (adapter(path="x", r=8), "leave out r"),
        (adapter(type="lora", target="query", target_modules=["q_proj"]), "set either target"),
        (adapter(type="lora", rank=8), "model.adapter: .*no setting 'rank'.*|lora has no setting"),
        (adapter(type="lora", target="nothing"), "nothing"),
        (adapter(type="prompt", num_virtual_tokens=2, target="query"), "no setting 'target_mod"),
        (adapter(type="lora", target_modules=["nowhere"]), "cannot be added to this model"),
        (adapter(path="nowhere"), "no adapter_config.json"),
        (packed("int5"), "no quantization 'int5': did you mean int8"),
        ("model.dtype=float8", "float32"),
    ],
)
def test_what_cannot_be_meant_is_refused_where_it_stands(
    chat: Path, change: str, told: str
) -> None:
    with pytest.raises(FedplanError, match=told):
        build_experiment(study(change))


def test_what_is_made_from_scratch_is_not_packed(chat: Path) -> None:
    with pytest.raises(ConfigError, match="set path"):
        study("model.path=", "model.type=llama", packed("nf4"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_base_is_held_as_the_study_says_and_the_adapter_in_full(chat: Path, dtype: str) -> None:
    params = build_experiment(study(f"model.dtype={dtype}")).agreement.params
    assert {p.dtype for p in params if p.kind != "adapter"} == {dtype}
    assert {p.dtype for p in params if p.kind == "adapter"} == {"float32"}


# Packed weights ------------------------------------------------------------------------------

KINDS = ["nf4", *(pytest.param(kind, marks=pytest.mark.nightly) for kind in ("fp4", "int8"))]


@pytest.mark.parametrize("kind", KINDS)
def test_qlora_sends_its_adapter_and_nothing_else(chat: Path, kind: str) -> None:
    assert run("run", "study.toml", "--set", packed(kind))[0] == 0
    code, said = run("verify", "runs/tiny")
    assert code == 0, said
    folder = Path("runs/tiny")
    simulation = Simulation(read_run_study(folder), folder)
    adapters = {p.key for p in simulation.federation.agreement.params if p.kind == "adapter"}
    assert simulation.federation.global_state.values.keys() == adapters and len(adapters) == 8
    size = nbytes(simulation.federation.global_state.values)
    turns = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    sent = [turn["upload_bytes"] for turn in turns if "client" in turn]
    assert sent == [size] * 4
    assert is_quantized(simulation.federation.model)
    for client in simulation.federation.clients.values():
        held = {k: v for k, v in client.setup.start.items() if k not in adapters}
        assert not any(v.is_floating_point() for k, v in held.items() if "_proj" in k)


@pytest.mark.parametrize("kind", KINDS)
def test_qlora_goes_on_with_the_same_bits(chat: Path, kind: str) -> None:
    at_once = played(study(packed(kind)), "one")
    played(study(packed(kind)), "two", rounds=1)
    in_two = played(study(packed(kind)), "two")
    same(at_once.federation.global_state.values, in_two.federation.global_state.values)
    start = build_experiment(study(packed(kind))).initial_values
    assert any(
        not torch.equal(v, start[k]) for k, v in at_once.federation.global_state.values.items()
    )


def same(one: Tensors, other: Tensors) -> None:
    assert digests(dict(one)) == digests(dict(other))


def flip_packed(layer: Any) -> None:
    layer.weight.data.view(-1)[5] ^= 1


def flip_scale(layer: Any) -> None:
    layer.weight.quant_state.absmax.view(-1)[5] ^= 1


@pytest.mark.parametrize("flip", [flip_packed, flip_scale])
def test_a_flipped_bit_of_a_packed_base_stops_the_turn(chat: Path, flip: Any) -> None:
    simulation = played(study(packed("nf4")), rounds=1)
    layers = simulation.federation.model.modules()
    flip(next(m for m in layers if is_packed(getattr(m, "weight", torch.ones(1)))))
    with pytest.raises(
        FedplanError, match=r"weight is trained by no turn of the plan, and changed"
    ):
        simulation.federation.run_round()


def test_another_base_is_refused_by_its_digest(chat: Path) -> None:
    said = build_experiment(study(packed("nf4"))).model_digest
    assert build_experiment(study(packed("nf4"), f"model.digest={said}")).model_digest == said
    assert (
        len(
            {
                said,
                build_experiment(study(packed("fp4"))).model_digest,
                build_experiment(study()).model_digest,
            }
        )
        == 3
    )
    played(study(packed("nf4")), rounds=1)
    model = hf.AutoModelForCausalLM.from_pretrained("chat")
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] += 1
    model.save_pretrained("chat")
    with pytest.raises(ConfigError, match=f"model.digest is {said}"):
        build_experiment(study(packed("nf4"), f"model.digest={said}"))
    with pytest.raises(FedplanError, match="model"):
        Simulation(study(packed("nf4")), Path("run"))


def test_what_is_packed_on_disk_is_loaded_as_it_is(chat: Path) -> None:
    said = build_experiment(study(packed("nf4"))).model_digest
    how = {"dtype": torch.float32, "quantization_config": quantization_config("nf4", torch.float32)}
    load_pretrained(hf.AutoModelForCausalLM, "chat", **how).save_pretrained("four")
    experiment = build_experiment(study("model.path=four"))
    assert is_quantized(experiment.model) and experiment.model_digest == said


@pytest.mark.parametrize("kind", ["nf4", pytest.param("", marks=pytest.mark.nightly)])
def test_a_model_from_python_goes_on_with_the_adapter_that_it_was_given(
    chat: Path, kind: str
) -> None:
    """Once it was drawn from whatever had been drawn before: no run could go on."""
    rows = Dataset.from_list(pairs())
    clients = {"north": rows.select(range(12)), "south": rows.select(range(12, 24))}
    goal = make_task("causal-lm", columns="response", tokenizer="chat", max_length=24)

    def begun(rounds: int, **said: Any) -> Run:
        torch.manual_seed(len(said))
        packing = {"quantization_config": quantization_config(kind, torch.float32)} if kind else {}
        model = load_pretrained(hf.AutoModelForCausalLM, "chat", dtype=torch.float32, **packing)
        method = fedit(rank=2, with_head=False)
        train, options = TrainConfig(rounds=rounds, lr=0.05), RunOptions(**said)
        return simulate(method, model, clients, task=goal, train=train, options=options)

    whole = begun(rounds=2, folder="one")
    begun(rounds=1, folder="two")
    again = begun(rounds=2, folder="two", resume=True)
    same(*(read_run(run.folder).global_state.values for run in (whole, again)))
    assert is_quantized(again.global_model()) == bool(kind)


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_examples_are_hidden_only_where_a_packed_layer_keeps_them_apart(
    chat: Path, kind: str
) -> None:
    hidden = 'privacy={ unit = "example", epsilon = 50.0, examples_per_site = 12, noise_multiplier = 1.0 }'
    made = study(packed(kind), hidden, "train.steps=1", "train.rounds=1")
    if kind == "nf4":
        assert played(made).federation.global_state.round == 1
        return
    with pytest.raises(FedplanError, match=r"is quantized to int8.*Quantize it to nf4"):
        played(made)


# What goes out -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["", *KINDS])
def test_an_exported_adapter_on_its_base_is_the_model_of_the_run(chat: Path, kind: str) -> None:
    simulation = played(study(packed(kind)))
    was = of_world(simulation)
    how = export_run(Path("run"), Path("out"), adapter=True)
    assert how == "peft.PeftModel.from_pretrained(model, 'out')"
    files = {file.name for file in Path("out").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= files
    assert not any(name.endswith((".bin", ".pt", ".pkl")) for name in files)
    packing = {"quantization_config": quantization_config(kind, torch.float32)} if kind else {}
    base = load_pretrained(hf.AutoModelForCausalLM, "chat", dtype=torch.float32, **packing)
    pin_packed_layout(base)  # this model is smaller than what some CPUs repack
    assert torch.equal(logits(peft.PeftModel.from_pretrained(base, "out")), was)


@pytest.mark.parametrize("kind", [*KINDS, pytest.param("", marks=pytest.mark.nightly)])
def test_an_exported_whole_model_is_in_floats_and_answers_alike(chat: Path, kind: str) -> None:
    was = of_world(played(study(packed(kind))))
    how = export_run(Path("run"), Path("out"))
    assert ("dequantized" in how) == bool(kind)
    alone = hf.AutoModelForCausalLM.from_pretrained("out")
    assert not is_quantized(alone) and not adapter_families(alone)
    apart = (logits(alone) - was).abs().max() / was.abs().max()
    assert apart <= (0.05 if kind == "int8" else 1e-6)


def test_a_saved_adapter_is_where_the_next_run_starts(chat: Path) -> None:
    was = of_world(played(study()))
    export_run(Path("run"), Path("out"), adapter=True)
    Path("sub").mkdir()
    Path("study.toml").rename("sub/study.toml")
    places = ("model.path=../chat", "task.tokenizer=../chat", "data.path=../rows.parquet")
    saved = adapter(path="../out")
    made = read_study(Path("sub/study.toml"), [*places, saved])
    experiment = build_experiment(made)
    assert torch.equal(logits(experiment.model), was)
    elsewhere = read_study(Path("sub/study.toml"), [*places, adapter(path="../moved")])
    assert (
        elsewhere.digest == made.digest != read_study(Path("sub/study.toml"), list(places)).digest
    )
    assert {p.key for p in experiment.agreement.exchanged} == {
        p.key for p in describe(experiment.model) if p.kind == "adapter"
    }
    on = played(made, "further")
    assert not torch.equal(of_world(on), was)


def test_an_adapter_is_not_exported_alone_where_a_head_was_trained(chat: Path) -> None:
    played(study("method.plan=chain(freeze(), share(adapter | head))"))
    with pytest.raises(FedplanError, match=r"lm_head.weight' was trained too"):
        export_run(Path("run"), Path("out"), adapter=True)
    code, said = run("export", "run", "whole", "--adapter")
    assert code == 2 and "export the whole model" in " ".join(said.split())


@pytest.mark.nightly
def test_a_head_that_the_adapter_saves_goes_with_it(chat: Path) -> None:
    plan = "method.plan=chain(freeze(), share(adapter | head))"
    with_head = adapter(type="lora", r=2, target="query", modules_to_save=["lm_head"])
    was = of_world(played(study(plan, with_head)))
    export_run(Path("run"), Path("out"), adapter=True)
    base = hf.AutoModelForCausalLM.from_pretrained("chat")
    assert torch.equal(logits(peft.PeftModel.from_pretrained(base, "out")), was)


# The document ------------------------------------------------------------------------------


def test_the_studies_of_the_document_can_be_played(chat: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "how-to" / "models.md").read_text()
    studies = re.findall(r"^```toml\n(.*?)^```", text, flags=re.M | re.S)
    lora, qlora = (each for each in studies if "adapter" in each)
    Path("study.toml").write_text(qlora)
    small = (
        "model.path=chat",
        "data.path=rows.parquet",
        "task.input=response",
        "data.num_clients=2",
        "train.rounds=1",
    )
    made = study(*small)
    assert is_quantized(played(made).federation.model)
    said = tomllib.loads(lora)["model"]
    assert adapter(**said["adapter"]) and said["path"] == tomllib.loads(qlora)["model"]["path"]
    assert build_experiment(study(*small, adapter(**said["adapter"]))).agreement.exchanged


def test_a_setting_that_is_none_of_the_models_is_refused() -> None:
    study = offered(model={"hiden_size": 16})
    with pytest.raises(FedplanError, match="vit has no setting 'hiden_size'"):
        outline_agreement(study)
    with pytest.raises(ConfigError, match="num_hidden_layers = 100000 is above the limit of 1000"):
        offered(model={"num_hidden_layers": 100_000})
