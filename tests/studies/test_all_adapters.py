# SPDX-License-Identifier: Apache-2.0
"""The adapters of all clients leave together, and one base model answers as each client's own."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers as hf
import zoo
from commands import STUDY, run
from torch import Tensor

import fedplan as fp
from fedplan.methods import Method, method_by_name
from fedplan.run import Run
from fedplan.studies.schema import ConfigError

CLIENTS = [*(f"client {number}" for number in range(8)), "st. mary", "nord/süd"]
"""Ten names, not all of which are names of folders or of modules."""
EVERYONE = ("--all-clients", "--adapters")


def trained(method: Method, names: list[str] = CLIENTS, parts: tuple[str, ...] = ("train",)) -> Run:
    """A run of a small language model, whose base is in the folder `base`."""
    hf.LlamaForCausalLM(hf.LlamaConfig(**zoo.GROUPED)).save_pretrained("base")
    draw = torch.Generator().manual_seed(0)
    rows = torch.randint(0, zoo.GROUPED["vocab_size"], (len(names), 4, 6), generator=draw)
    clients = {
        name: {part: [{"input_ids": row, "labels": row} for row in some] for part in parts}
        for name, some in zip(names, rows, strict=True)
    }
    return fp.simulate(
        method,
        hf.AutoModelForCausalLM.from_pretrained("base"),
        clients,
        train=fp.TrainConfig(rounds=2, lr=0.1, batch_size=2),
        options=fp.RunOptions(folder="run", device="cpu"),
    )


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model.eval()(input_ids=torch.arange(12).reshape(2, 6)).logits


@pytest.mark.parametrize(
    ("name", "settings", "rank"),
    [("fedsa-lora", {"rank": 3}, 3), ("feddpa", {"rank": 2, "own_rank": 3}, 5)],
)
def test_ten_adapters_side_by_side_answer_as_each_clients_model(
    here: Path, name: str, settings: dict[str, int], rank: int
) -> None:
    finished = trained(method_by_name(name, settings))
    code = finished.export("out", all_clients=True, adapter=True)
    manifest = json.loads(Path("out/manifest.json").read_text())
    adapters = manifest["adapters"]
    assert [each["client"] for each in adapters] == [None, *CLIENTS]
    assert [each["name"] for each in adapters] == ["shared", *CLIENTS]
    assert manifest["base"] == {"model": "base", "dtype": "float32", "loader": "LlamaForCausalLM"}
    assert {each["rank"] for each in adapters} == {rank} == {manifest["max_rank"]}
    assert {each["dtype"] for each in adapters} == {"float32"}
    assert manifest["round"] == 2 and "out/shared" in code
    model: Any = hf.AutoModelForCausalLM.from_pretrained(manifest["base"]["model"])
    for number, each in enumerate(adapters):
        folder = Path("out", each["path"])
        for file, digest in each["sha256"].items():
            assert hashlib.sha256((folder / file).read_bytes()).hexdigest() == digest
        if number:
            model.load_adapter(folder, str(number))
        else:
            model = peft.PeftModel.from_pretrained(model, folder, adapter_name="0")
    answers = list[Tensor]()
    for number, each in enumerate(adapters):
        model.set_adapter(str(number))
        own = finished.personal_model(each["client"]) if number else finished.global_model()
        answers.append(logits(model))
        assert torch.allclose(answers[-1], logits(own), atol=1e-5)
    for number, answer in enumerate(answers):  # so the comparison above could have failed
        assert not any(torch.allclose(answer, each, atol=1e-4) for each in answers[:number])


def test_the_folder_is_whole_or_not_there(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(method_by_name("fedsa-lora"), ["north", "south"])
    before = {file: file.read_bytes() for file in Path("run").rglob("*") if file.is_file()}

    def fail(folder: Path) -> dict[str, Any]:
        if folder.name == "south":
            raise KeyboardInterrupt
        return {"base": "", "rank": 1}

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("fedplan.studies.export._describe_adapter", fail)
        fp.export_run("run", "out", adapter=True, all_clients=True)
    assert {each.name for each in here.iterdir()} == {"base", "run", "digits.npz", "study.toml"}
    code, out = run("export", "run", "out", *EVERYONE, "--json")
    assert code == 0 and "out/shared" in json.loads(out)["loading_code"]
    assert {file.name for file in Path("out").iterdir()} == {"manifest.json", "shared", "clients"}
    assert {file.name for file in Path("out/clients").iterdir()} == {"north", "south"}
    assert len({file.stat().st_mode for file in Path("out").rglob("*") if file.is_file()}) == 1
    assert before == {file: file.read_bytes() for file in before}


def test_a_card_has_no_metric_of_a_client_whose_name_begins_alike(here: Path) -> None:
    finished = trained(method_by_name("fedsa-lora"), ["a", "a.b"], ("train", "test"))
    finished.export("out", all_clients=True, adapter=True)
    for name in ("a", "a.b"):
        _, table = Path("out/clients", name, "README.md").read_text().split("|---|---|\n")
        rows = [line.split(" | ")[0] for line in table.splitlines() if line.startswith("|")]
        assert rows == ["| loss"]


def refusal(*words: str) -> str:
    code, out = run("export", "run", "out", *words)
    assert code == 2 and not Path("out").exists()
    return " ".join(out.split())


def test_a_wrong_export_of_all_is_one_message(here: Path) -> None:
    trained(method_by_name("fedsa-lora"), ["shared", "south"])
    assert "add --adapters" in refusal("--all-clients")
    for words in (["--client", "south"], ["--global"], ["--best"]):
        assert "excludes --client, --global and --best" in refusal(*EVERYONE, *words)
    assert "is called 'shared'" in refusal(*EVERYONE)
    assert "decrypts a site's state" in refusal(*EVERYONE, "--key", "key")
    Path("site").mkdir()
    Path("site/agreement.json").touch()
    with pytest.raises(ConfigError, match="is at its site, which alone can export it"):
        fp.export_run("site", "out", key=Path("key"), adapter=True, all_clients=True)
    with pytest.raises(ConfigError, match="--all-clients excludes"):
        fp.export_run("run", "out", adapter=True, all_clients=True, global_model=True)


@pytest.mark.parametrize(
    ("section", "reason"),
    [
        ("", "keeps nothing at clients, so each has the shared model: leave out --all-clients"),
        ('[aggregation]\nkind = "secure"\n', "secure aggregation of run hides clients"),
        (
            '[privacy]\nunit = "example"\nepsilon = 8.0\nexamples_per_site = 12\n',
            "[privacy] of run hides clients",
        ),
    ],
)
def test_clients_that_are_hidden_or_alike_are_not_listed(
    here: Path, section: str, reason: str
) -> None:
    plan = 'plan = "chain(share(), when(after(1), freeze(query | key)), keep(head))"'
    name = 'name = "fedsa-lora"' if section else 'name = "fedit"'
    Path("study.toml").write_text(
        STUDY.replace(plan, name)
        .replace("rounds = 3", "rounds = 1\nsteps = 2")
        .replace("batch_size = 8", "batch_size = 4")
        + section
    )
    code, out = run("run", "study.toml", "--output", "run")
    assert code == 0, out
    assert reason in refusal(*EVERYONE)
