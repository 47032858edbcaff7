# SPDX-License-Identifier: Apache-2.0
"""An exported model loads by itself and says what the client's own model said."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
import yaml
from canaries import hits
from commands import STUDY, run
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor
from zoo import TEXT, VISION

from fedplan.models.folder import image_tensor, load_folder, predict_classes
from fedplan.models.values import set_values
from fedplan.reports.pages.run_report import report_page
from fedplan.runners.simulation import Simulation
from fedplan.studies.export import check_export, export_run
from fedplan.studies.run import read_run_study
from fedplan.studies.schema import ConfigError

WORDS = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    "a",
    "picture",
    "of",
    "cat",
    "dog",
    "0",
    "1",
    "2",
]


@torch.no_grad()
def said(client: str) -> Tensor:
    """What a client's model, or the world's, says of a few rows of the test."""
    folder = Path("runs/tiny")
    simulation = Simulation(read_run_study(folder), folder)
    federation = simulation.federation
    values = federation.personal_values(client) if client else federation.global_values()
    set_values(federation.model, values, federation.agreement.trainable)
    found = federation.model.eval()(pixel_values=pixels(simulation))
    return found if isinstance(found, Tensor) else found.logits


def pixels(simulation: Simulation) -> Tensor:
    return simulation.data.common_test.batch(torch.arange(5))["pixel_values"]


@pytest.mark.parametrize(
    ("name", "client"),
    [
        *(("", "client-01"), ("", ""), ("fedsa-lora", "client-01"), ("fedit", "")),
        *(("ditto", "client-01"), ("ditto", "")),
    ],
)
def test_an_exported_classifier_is_the_clients_own(here: Path, client: str, name: str) -> None:
    change = ["--set", "method.plan=", "--set", f"method.name={name}"] if name else []
    assert run("run", "study.toml", *change)[0] == 0
    whose = ["--client", client] if client else ["--global"]
    code, out = run("export", "runs/tiny", "model", *whose)
    assert code == 0 and "AutoModelForImageClassification.from_pretrained('model')" in out
    model = hf.AutoModelForImageClassification.from_pretrained("model")
    assert model.config.id2label == {0: "0", 1: "1", 2: "2"}
    simulation = Simulation(read_run_study(Path("runs/tiny")), Path("runs/tiny"))
    with torch.no_grad():
        logits = model(pixel_values=pixels(simulation)).logits
    # Merging an adapter rounds once; without one every bit is the same.
    assert torch.allclose(logits, said(client), rtol=0, atol=1e-6 if name else 0)


def kill_at(number: int, under: Path) -> None:
    """Kill this process at its n-th write, rename, or change of a folder under a path."""
    left = [number]

    def hook(event: str, args: tuple[Any, ...]) -> None:
        writes = event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR)
        if not (writes or event in ("os.mkdir", "os.rename", "os.chmod", "os.remove", "os.rmdir")):
            return
        if isinstance(args[0], str | Path) and str(under) in str(Path(args[0]).absolute()):
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def test_an_export_that_is_killed_leaves_nothing_or_all_and_blocks_no_other(here: Path) -> None:
    assert run("run", "study.toml")[0] == 0
    target, states = here / "models" / "one", list[bool]()
    target.parent.mkdir()
    assert run("export", "runs/tiny", "whole", "--global")[0] == 0
    whole = {file.name: file.read_bytes() for file in Path("whole").iterdir()}
    while not states or not states[-1]:
        if not (child := os.fork()):
            with suppress(BaseException):
                kill_at(len(states) + 1, target.parent)
                export_run(here / "runs/tiny", target, global_model=True)
            os._exit(0)
        killed = os.WIFSIGNALED(os.waitpid(child, 0)[1])
        if target.exists():
            assert {file.name: file.read_bytes() for file in target.iterdir()} == whole
            shutil.rmtree(target)
        states.append(not killed)
    assert len(states) > 8  # so many writes were the last
    leftovers = [file.name for file in target.parent.iterdir()]
    assert leftovers and all(name.startswith(".one.") for name in leftovers)
    for name in leftovers:
        os.utime(target.parent / name, (0, 0))
    assert run("export", "runs/tiny", str(target), "--global")[0] == 0
    assert [file.name for file in target.parent.iterdir()] == ["one"]


def test_every_file_of_an_export_is_on_disk_before_it_has_its_name(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("run", "study.toml")[0] == 0
    done, sync, rename = list[str](), os.fsync, Path.replace

    def note_sync(descriptor: int) -> None:
        done.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        sync(descriptor)

    def note_rename(path: Path, target: Path) -> Path:
        done.append("renamed")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(Path, "replace", note_rename)
    export_run("runs/tiny", "model", global_model=True)
    at = done.index("renamed")
    assert {Path(each).name for each in done[: at - 1]} == {p.name for p in Path("model").iterdir()}
    assert Path(done[at - 1]).suffix == ".tmp" and done[at + 1 :] == [str(here)]


def test_an_exported_personal_prompt_model_predicts(here: Path) -> None:
    towers(here)
    prompted = STUDY.replace(
        STUDY[STUDY.index("[model]") : STUDY.index("[data]")],
        """
[model]
vision = "eye"
text = "ear"
[task]
kind = "image-text"
input = "image"
label = "digit"
image_size = 16
""",
    ).replace(STUDY[STUDY.index("plan =") : STUDY.index("[train]")], 'name = "pfeddc"\n')
    Path("study.toml").write_text(prompted)
    code, out = run("run", "study.toml")
    assert code == 0, out
    assert run("verify", "runs/tiny")[0] == 0
    assert run("export", "runs/tiny", "model", "--client", "client-01")[0] == 0
    assert {p.suffix for p in Path("model").iterdir()} == {".json", ".safetensors", ".md"}
    assert check_export("model") <= 1e-5
    simulation = Simulation(read_run_study(Path("runs/tiny")), Path("runs/tiny"))
    with torch.no_grad():
        assert torch.equal(load_folder("model")(pixels(simulation)), said("client-01"))
    first = np.load("digits.npz")["image_test"][0]
    Image.fromarray(first).save("first.png")
    assert predict_classes("model", ["first.png"]) == [str(int(said("client-01")[0].argmax()))]


def towers(here: Path) -> None:
    """Two tiny models in folders, the text's with a tokenizer."""
    hf.ViTModel(hf.ViTConfig(**VISION)).save_pretrained(here / "eye")
    text = hf.BertConfig(**{**TEXT, "hidden_size": 12})
    hf.BertModel(text).save_pretrained(here / "ear")
    (here / "vocab.txt").write_text("\n".join(WORDS))
    hf.BertTokenizer(str(here / "vocab.txt")).save_pretrained(here / "ear")


# What stands beside it


PLAIN = """
import json, sys, torch, transformers
from safetensors.torch import load_file
held, said = load_file("model/test_vector.safetensors"), json.load(open("model/test_vector.json"))
model = getattr(transformers, said["loader"]).from_pretrained(sys.argv[1])
if len(sys.argv) > 2:
    import peft
    model = peft.PeftModel.from_pretrained(model, "model")
if said["text"]:
    inputs = transformers.AutoTokenizer.from_pretrained("model")(said["text"], return_tensors="pt")
else:
    processor = transformers.AutoImageProcessor.from_pretrained("model")
    inputs = processor(held["image"].numpy(), return_tensors="pt")
with torch.no_grad():
    logits = model.eval()(**{name: inputs[name] for name in said["inputs"]}).logits
assert "fedplan" not in sys.modules
print(float((logits - held["logits"]).abs().max()), logits.flatten()[:3].tolist() == said["logits"])
"""


def plainly_off(*words: str) -> float:
    """How far the answer of plain transformers in a process of its own is from the vector's."""
    done = subprocess.run(
        [sys.executable, "-c", PLAIN, *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return float(done.stdout.split()[0])


def texts(here: Path) -> None:
    """A study of texts, from a folder with a model and its tokenizer."""
    (here / "vocab.txt").write_text("\n".join(WORDS))
    hf.BertTokenizer(str(here / "vocab.txt")).save_pretrained(here / "ear")
    config = hf.BertConfig(**{**TEXT, "num_labels": 2, "vocab_size": len(WORDS)})
    hf.BertForSequenceClassification(config).save_pretrained(here / "ear")
    rows = [{"note": f"{SECRET} a cat {n}", "kind": "cd"[n % 2]} for n in range(24)]
    Path("notes.jsonl").write_text("\n".join(map(json.dumps, rows)))
    Path("study.toml").write_text(NOTES)


SECRET = "zebrafinch"
NOTES = """
name = "notes"
[model]
path = "ear"
[task]
kind = "text-classification"
input = "note"
label = "kind"
[data]
path = "notes.jsonl"
num_clients = 2
[method]
name = "fedit"
settings = { rank = 2, with_head = false }
[train]
rounds = 1
lr = 0.05
"""


@pytest.mark.parametrize("adapter", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_plain_transformers_answers_a_test_vector_as_the_run_did(here: Path, adapter: bool) -> None:
    texts(here)
    code, out = run("run", "study.toml", "--output", "run")
    assert code == 0, out
    code, out = run("export", "run", "model", *(["--adapter"] if adapter else []))
    assert code == 0, out
    assert plainly_off(*(["ear", "adapter"] if adapter else ["model"])) <= 1e-5
    assert check_export("model") <= 1e-5
    files = b"".join(
        p.read_bytes() for p in Path("model").iterdir() if p.suffix in (".md", ".json")
    )
    assert SECRET.encode() not in files and b"client-0" not in files
    if adapter:
        assert "library_name: peft\n" in Path("model/README.md").read_text()
        base = hf.AutoModelForSequenceClassification.from_pretrained(str(here / "ear"))
        with torch.no_grad():
            base.classifier.weight += 1
        with pytest.raises(ConfigError, match="or another base"):
            check_export("model", base)


def test_a_clients_two_adapters_leave_as_one_that_plain_peft_loads(here: Path) -> None:
    texts(here)
    settings = '"feddpa"\nsettings = { rank = 3, own_rank = 2, with_head = false }'
    Path("study.toml").write_text(
        NOTES.replace('"fedit"\nsettings = { rank = 2, with_head = false }', settings)
    )
    code, out = run("run", "study.toml", "--output", "run")
    assert code == 0, out
    code, out = run("export", "run", "model", "--client", "client-01", "--adapter")
    assert code == 0, out
    assert json.loads(Path("model/adapter_config.json").read_text())["r"] == 5
    assert plainly_off("ear", "adapter") <= 1e-5
    assert check_export("model") <= 1e-5


def test_a_picture_is_made_ready_as_in_the_run(here: Path) -> None:
    assert run("run", "study.toml", "--set", "train.rounds=1")[0] == 0
    assert run("export", "runs/tiny", "model", "--global")[0] == 0
    assert plainly_off("model") <= 1e-5
    processor = hf.AutoImageProcessor.from_pretrained("model")
    picture = np.random.default_rng(1).integers(0, 255, (13, 11), dtype=np.uint8)
    made = processor(Image.fromarray(picture), return_tensors="pt")["pixel_values"][0]
    assert torch.equal(made, (image_tensor(picture, 8).float() / 255 - 0.5) / 0.5)
    said = json.loads(Path("model/preprocessor_config.json").read_text())
    Path("model/preprocessor_config.json").write_text(json.dumps({**said, "image_std": [0.2] * 3}))
    with pytest.raises(ConfigError, match="prepares another pixel_values"):
        check_export("model")


@pytest.mark.parametrize(
    "file", ["model.safetensors", "test_vector.safetensors", "test_vector.json"]
)
def test_an_export_that_was_changed_is_found_out(here: Path, file: str) -> None:
    assert run("run", "study.toml", "--set", "train.rounds=1")[0] == 0
    assert run("export", "runs/tiny", "model", "--global")[0] == 0
    place = Path("model", file)
    if file.endswith(".json"):
        place.write_text("{}")
    else:
        held = {name: value + 1 for name, value in load_file(place).items()}
        save_file(held, place, metadata={"format": "pt"})
    with pytest.raises(ConfigError):
        check_export("model")


def test_a_card_tells_of_the_plan_and_of_no_row_and_no_site(here: Path) -> None:
    plan = 'chain(share(), when(client_in("client-01"), keep(head)))'
    text = STUDY[: STUDY.index("plan =")] + f"plan = '{plan}'\n" + STUDY[STUDY.index("[train]") :]
    Path("study.toml").write_text(text)
    assert run("run", "study.toml", "--set", "train.rounds=2")[0] == 0
    rows = np.load("digits.npz")
    canaries = {name: torch.from_numpy(rows[name]) for name in ("image_train", "image_test")}
    for whose in ("", "client-01", "client-02"):
        option = ["--client", whose] if whose else ["--global"]
        assert run("export", "runs/tiny", f"model{whose}", *option)[0] == 0
        card = Path(f"model{whose}/README.md").read_text()
        assert not hits(canaries, [Path(f"model{whose}")])
        assert "client-0" not in card and 'client_in("...")' in card
        assert "3 clients were asked" in card and "after 2 rounds" in card
        assert ("| accuracy |" in card) == (whose != "client-01"), "it has no test examples"
        assert ("- this client's accuracy 0." in card) == (whose == "client-02")
        assert not re.search(r"\b20\b", card), "how many rows test it is not told"
        assert re.search(r"They have \d\d training examples in all", card)
        assert yaml.safe_load(card.split("---")[1])["pipeline_tag"] == "image-classification"


def test_a_private_run_says_its_statement_and_no_score(here: Path) -> None:
    hidden = 'privacy={ unit = "client", epsilon = 50.0, noise_multiplier = 1.0 }'
    more = ["--set", hidden, "--set", "clients.dropout_fraction=0", "--set", "train.rounds=1"]
    code, out = run("run", "study.toml", *more)
    assert code == 0, out
    assert run("export", "runs/tiny", "model", "--global")[0] == 0
    card = Path("model/README.md").read_text()
    assert "Client-level differential privacy" in card and "Epsilon spent: " in card
    assert "| accuracy |" not in card and "none may leave" in card


def test_a_wrong_export_is_one_message(here: Path) -> None:
    code, out = run("run", "study.toml")
    told = " ".join(out.split())
    assert code == 0 and told.count("on the common test set; its head was never trained") == 2
    shown = (
        " ".join(run("status", "runs/tiny")[1].split()),
        " ".join(run("evaluate", "runs/tiny")[1].split()),
    )
    report = report_page([Path("runs/tiny")]).html()
    assert all("its head was never trained" in told for told in (*shown, report))
    code, out = run("export", "runs/tiny", "model", "--client", "nobody")
    assert code == 2 and "there are client-00" in out
    assert run("export", "nowhere", "model")[0] == 2
    code, out = run("export", "runs/tiny", "model")
    told = " ".join(out.split())
    assert code == 2 and "each client of runs/tiny has its own head" in told
    for option, score in (("--client client-00", "personal"), ("--global", "global")):
        assert f"fedplan export runs/tiny model {option} # {score} accuracy 0." in told
    code, out = run("export", "runs/tiny", "model", "--global", "--client", "client-00")
    assert code == 2 and "give one of them" in out
    code, out = run("export", "runs/tiny", "model", "--global")
    assert code == 0 and "head: never trained in this model" in " ".join(out.split())
    code, out = run("export", "runs/tiny", str(here))
    assert code == 2 and "is not empty" in out.replace("\n", " ")
