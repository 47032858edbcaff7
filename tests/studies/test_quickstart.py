# SPDX-License-Identifier: Apache-2.0
"""The first tutorial: the exported model scores what the first number of the report says."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as hf
from commands import run
from PIL import Image

from fedplan.runners.simulation import Simulation
from fedplan.studies.run import read_run_study

PAGE = Path(__file__).parents[2] / "docs/tutorials/first-run.md"


def first_number(folder: str) -> tuple[str, float]:
    """Name and value of the first number in the report of a run."""
    assert run("report", folder, "-o", "report.html")[0] == 0
    name, value = re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", Path("report.html").read_text())[0]
    return name, float(value)


@torch.no_grad()
def guesses(folder: str, images: list[np.ndarray]) -> np.ndarray:
    """What an exported folder says of images, by plain transformers."""
    model = hf.AutoModelForImageClassification.from_pretrained(folder).eval()
    processor = hf.AutoImageProcessor.from_pretrained(folder)
    inputs = processor([Image.fromarray(image) for image in images], return_tensors="pt")
    labels = np.array([int(model.config.id2label[n]) for n in range(model.config.num_labels)])
    return labels[model(**inputs).logits.argmax(-1).numpy()]


def test_the_exported_model_scores_what_the_report_says_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, study = (
        re.search(rf"```{kind}\n(# digits\..*?)```", PAGE.read_text(), re.DOTALL)
        for kind in ("python", "toml")
    )
    assert code is not None and study is not None
    exec(code[1], {})
    Path("digits.toml").write_text(study[1])
    short = ("--set", "train.rounds=2", "--set", "train.epochs=1")
    assert run("run", "digits.toml", *short)[0] == 0
    assert run("export", "runs/digits", "model")[0] == 0
    rows = np.load("digits.npz")
    right = guesses("model", list(rows["image_test"])) == rows["digit_test"]
    name, value = first_number("runs/digits")
    assert name == "global accuracy (on the common test set)"
    assert f"{right.mean():.3f}" == f"{value:.3f}"

    plan = ("--set", "method.plan=chain(share(), keep(head))", "--output", "runs/personal")
    assert run("run", "digits.toml", *short, *plan)[0] == 0
    name, value = first_number("runs/personal")
    assert name.startswith("personal accuracy (mean of 5 clients")
    folder = Path("runs/personal")
    simulation = Simulation(read_run_study(folder), folder)
    scores = list[float]()
    for client, tests in simulation.data.client_tests.items():
        assert run("export", str(folder), client, "--client", client)[0] == 0
        batch = tests.batch(torch.arange(len(tests)))
        model = hf.AutoModelForImageClassification.from_pretrained(client).eval()
        with torch.no_grad():
            logits = model(pixel_values=batch["pixel_values"]).logits
        scores.append((logits.argmax(-1) == batch["labels"]).double().mean().item())
    assert f"{np.mean(scores):.3f}" == f"{value:.3f}"
