# SPDX-License-Identifier: Apache-2.0
"""The command line as tests type it, and a tiny study for it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from typer.testing import CliRunner

from fedplan.cli import app

IMAGES = """
name = "tiny"
[model]
type = "vit"
config = { image_size = 8, patch_size = 4, hidden_size = 16, num_hidden_layers = 2, num_attention_heads = 2, intermediate_size = 16 }
[task]
kind = "image-classification"
input = "image"
label = "digit"
image_size = 8
"""
"""The head of a study of small images, of a tiny model."""
STUDY = f"""{IMAGES}labels = [0, 1, 2]
[data]
path = "digits.npz"
split = "train"
test_split = "test"
partition = "dirichlet"
alpha = 0.5
num_clients = 3
[method]
plan = "chain(share(), when(after(1), freeze(query | key)), keep(head))"
[train]
rounds = 3
batch_size = 8
[clients]
dropout_fraction = 0.1
[evaluate]
attention_examples = 4
"""

TIMES = ("status.json", "log.jsonl", "environment.jsonl", "environment.jsonl.head")
"""Files of a run that say when something happened: in two runs they are never the same."""


def some_digits(folder: Path) -> None:
    """The rows of the study, in a folder."""
    draw = np.random.default_rng(0)
    np.savez(
        folder / "digits.npz",
        image_train=draw.integers(0, 255, (60, 8, 8), dtype=np.uint8),
        digit_train=draw.integers(0, 3, 60),
        image_test=draw.integers(0, 255, (20, 8, 8), dtype=np.uint8),
        digit_test=draw.integers(0, 3, 20),
    )


def run(*args: str) -> tuple[int, str]:
    result = CliRunner(env={"COLUMNS": "100"}).invoke(app, list(args))
    return result.exit_code, result.output
