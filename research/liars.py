# SPDX-License-Identifier: Apache-2.0
"""Digits at five sites of which one lies, under each defence: all runs in one result file.

A small Transformer of torch's own that reads a picture row by row: cheap enough for three seeds.
"""

from __future__ import annotations

import json
import logging
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from study import FACTS, LAB
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import fedplan as fp
from fedplan.federation.agreement import Agreement
from fedplan.federation.client import Client
from fedplan.federation.client_round import train_round
from fedplan.federation.ledger.records import join_digests, split_digests
from fedplan.federation.messages import Request, Update
from fedplan.runners.executors import executor as runner
from fedplan.storage.append_log import read_json_lines
from fedplan.tensors.named import digests

HEAVY, ROUNDS, SEEDS = 2**27, 12, (0, 1, 2)
RESULT = LAB / "results" / "liars-digits.json"
DEFENCES: dict[str, dict[str, Any]] = {
    "mean": {},
    "share-cap": {"max_weight_fraction": 0.25},
    "caps-and-bound": {"max_weight_fraction": 0.25, "max_norm_ratio": 1.5},
    "median": {"rule": "median"},
    "trimmed-mean": {"rule": "trimmed-mean"},
    "krum": {"rule": "krum"},
    "multi-krum": {"rule": "multi-krum"},
}

Change = Callable[[Tensor, Tensor], Tensor]
"""What a liar says of a value, of what it was before and of what its training made of it."""


class Reader(nn.Module):
    """Eight rows of eight pixels as eight tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Linear(8, 48), nn.Parameter(torch.randn(8, 48) / 50)
        self.block = nn.TransformerEncoderLayer(48, 4, 96, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8 * 48, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.block(self.embed(inputs) + self.place).flatten(1))


@dataclass(frozen=True)
class Digits:
    """Pictures with their digits."""

    inputs: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: Tensor) -> dict[str, Tensor]:
        return {"inputs": self.inputs[indices], "labels": self.labels[indices]}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return cross_entropy(model(batch["inputs"]), batch["labels"])


def scores(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, float]:
    right = model(batch["inputs"]).argmax(1) == batch["labels"]
    return {"accuracy": float(right.float().mean())}


def digits(seed: int) -> tuple[dict[str, Digits], Digits]:
    """Five sites with a sixth of all digits each, and the test with as many."""
    held = load_digits()
    order = np.random.default_rng(seed).permutation(len(held.target))
    pictures = torch.tensor(held.images[order], dtype=torch.float32) / 16
    labels = torch.tensor(held.target[order])
    parts = [Digits(x, y) for x, y in zip(pictures.chunk(6), labels.chunk(6), strict=True)]
    return {f"site-{i}": rows for i, rows in enumerate(parts[:5])}, parts[5]


def noise(before: Tensor, after: Tensor) -> Tensor:
    draw = torch.Generator().manual_seed(after.numel())
    return torch.randn(after.shape, generator=draw)


def honest(before: Tensor, after: Tensor) -> Tensor:
    return after


def times(factor: float) -> Change:
    return lambda before, after: before + factor * (after - before)


LIES: dict[str, tuple[Change, int]] = {
    "gone": (honest, 0),  # the liar is not there at all
    "weight 2^27": (honest, HEAVY),
    "weight 2^27, flipped": (times(-1), HEAVY),
    "flipped x 10": (times(-10), 0),
    "scaled x 100": (times(100), 0),
    "noise": (noise, 0),
}


def lying(liar: str, change: Change, weight: int) -> Callable[..., Update]:
    """A client's turn; the liar's update is another, and its record fits that."""

    def turn(agreement: Agreement, client: Client, request: Request) -> Update:
        update = train_round(agreement, client, request)
        if client.name != liar:
            return update
        values = {k: change(client.received[k], value) for k, value in update.values.items()}
        after = split_digests(agreement.params, update.ledger_line["after"]) | digests(values)
        says = weight or update.weight
        line = {
            **update.ledger_line,
            "after": join_digests(agreement.params, after),
            "weight": says,
        }
        return replace(update, values=values, weight=says, ledger_line=line)

    return turn


def one(defence: dict[str, Any], lie: str, seed: int) -> dict[str, Any]:
    """One run, and what its last round says."""
    torch.manual_seed(seed)
    sites, test = digits(seed)
    with tempfile.TemporaryDirectory() as place:
        run = fp.simulate(
            fp.share(),
            Reader(),
            sites,
            loss,
            task=fp.CustomTask(metrics=scores, primary="accuracy"),
            test=test,
            train=fp.TrainConfig(rounds=ROUNDS, batch_size=64, lr=5e-3, lr_scheduler="cosine"),
            evaluate=fp.EvaluateConfig(every=ROUNDS, batch_size=512),
            defence=fp.DefenceConfig(**defence),
            options=fp.RunOptions(folder=Path(place) / "run", seed=seed, start=False),
        )
        if lie == "gone":
            del run.simulation.federation.clients["site-4"]
        runner.train_round = lying("site-4", *LIES[lie])
        for _ in run.rounds():
            pass
        found = run.metrics[-1]
        lines = [x for x in read_json_lines(Path(place) / "run" / "ledger.jsonl") if "changed" in x]
    told = {"done": lines[-1].get("defence"), "warnings": lines[-1].get("warnings", [])}
    return {"accuracy": found["global.accuracy"], "loss": found["global.loss"], **told}


def main() -> None:
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    runs, started = list[dict[str, Any]](), time.process_time()
    for seed in SEEDS:
        for name, defence in DEFENCES.items():
            for lie in LIES:
                said = {"defence": name, "lie": lie, "seed": seed, **one(defence, lie, seed)}
                runs.append(said | {"seconds": round(time.process_time() - started, 1)})
                print(seed, name, lie, f"{said['accuracy']:.3f}", runs[-1]["seconds"], flush=True)
        result = {
            "command": "python research/liars.py",
            "facts": FACTS,
            "seeds": seed + 1,
            "runs": runs,
        }
        RESULT.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
