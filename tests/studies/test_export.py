# SPDX-License-Identifier: Apache-2.0
"""An exported model loads by itself and says what the client's own model said."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as hf
from commands import STUDY, run
from PIL import Image
from torch import Tensor
from zoo import TEXT, VISION

from fedplan.models.folder import load_folder, predict
from fedplan.models.values import put
from fedplan.runners.simulation import Simulation
from fedplan.studies.folder import study_in

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
    simulation = Simulation(study_in(folder), folder)
    federation = simulation.federation
    values = federation.personal_values(client) if client else federation.world_values()
    put(federation.model, values, federation.agreement.trainable)
    found = federation.model.eval()(pixel_values=pixels(simulation))
    return found if isinstance(found, Tensor) else found.logits


def pixels(simulation: Simulation) -> Tensor:
    return simulation.shares.test.batch(torch.arange(5))["pixel_values"]


@pytest.mark.parametrize("client", ["client-01", ""])
@pytest.mark.parametrize("name", ["", "fedit"])
def test_an_exported_classifier_is_the_clients_own(here: Path, client: str, name: str) -> None:
    change = ["--set", "method.plan=", "--set", f"method.name={name}"] if name else []
    assert run("run", "study.toml", *change)[0] == 0
    whose = ["--client", client] if client else []
    code, out = run("export", "runs/tiny", "model", *whose)
    assert code == 0 and "AutoModelForImageClassification.from_pretrained('model')" in out
    model = hf.AutoModelForImageClassification.from_pretrained("model")
    assert model.config.id2label == {0: "0", 1: "1", 2: "2"}
    simulation = Simulation(study_in(Path("runs/tiny")), Path("runs/tiny"))
    with torch.no_grad():
        logits = model(pixel_values=pixels(simulation)).logits
    # Merging an adapter rounds once; without one every bit is the same.
    assert torch.allclose(logits, said(client), rtol=0, atol=1e-6 if name else 0)


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
    assert {p.suffix for p in Path("model").iterdir()} == {".json", ".safetensors"}
    simulation = Simulation(study_in(Path("runs/tiny")), Path("runs/tiny"))
    with torch.no_grad():
        assert torch.equal(load_folder("model")(pixels(simulation)), said("client-01"))
    first = np.load("digits.npz")["image_test"][0]
    Image.fromarray(first).save("first.png")
    assert predict("model", ["first.png"]) == [str(int(said("client-01")[0].argmax()))]


def towers(here: Path) -> None:
    """Two tiny models in folders, the text's with a tokenizer."""
    hf.ViTModel(hf.ViTConfig(**VISION)).save_pretrained(here / "eye")
    text = hf.BertConfig(**{**TEXT, "hidden_size": 12})
    hf.BertModel(text).save_pretrained(here / "ear")
    (here / "vocab.txt").write_text("\n".join(WORDS))
    hf.BertTokenizer(str(here / "vocab.txt")).save_pretrained(here / "ear")


def test_a_wrong_export_is_one_message(here: Path) -> None:
    assert run("run", "study.toml")[0] == 0
    code, out = run("export", "runs/tiny", "model", "--client", "nobody")
    assert code == 2 and "there are client-00" in out
    assert run("export", "nowhere", "model")[0] == 2
    code, out = run("export", "runs/tiny", str(here))
    assert code == 2 and "is not empty" in out.replace("\n", " ")
