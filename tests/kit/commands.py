# SPDX-License-Identifier: Apache-2.0
"""The command line as tests type it, and a tiny study for it."""

from __future__ import annotations

from typer.testing import CliRunner

from fedplan.cli import app

STUDY = """
name = "tiny"
[model]
type = "vit"
settings = { image_size = 8, patch_size = 4, hidden_size = 16, num_hidden_layers = 2, num_attention_heads = 2, intermediate_size = 16 }
[task]
kind = "image-classification"
input = "image"
label = "digit"
labels = [0, 1, 2]
image_size = 8
[data]
path = "digits.npz"
split = "train"
test_split = "test"
by = "dirichlet"
alpha = 0.5
clients = 3
[method]
plan = "chain(share(), when(after(1), freeze(query | key)), keep(head))"
[train]
rounds = 3
batch = 8
[clients]
dropped = 0.1
[evaluate]
attention = 4
"""

TIMES = ("status.json", "log.jsonl")
"""Files of a run that say when something happened: in two runs they are never the same."""


def run(*args: str) -> tuple[int, str]:
    result = CliRunner(env={"COLUMNS": "100"}).invoke(app, list(args))
    return result.exit_code, result.output
