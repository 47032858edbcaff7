# SPDX-License-Identifier: Apache-2.0
"""What workers cost and save: `python research/crew_cost.py [--rounds 6] [--workers 2] [--clients 8] [RUNNER ...]`.

A ViT of 2.7 M params, FedAvg, four steps of 16 a turn. Each runner plays the same study; start-up
is told apart from the median round after the first. All worlds must have the same bits. Run it on a
quiet machine; MiniLM's row is one of research/bench.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from fedplan.runners.executors.executor import make_pool_config
from fedplan.runners.simulation import Simulation
from fedplan.studies.schema import Study, resolve_paths, study_from_dict
from fedplan.tensors.named import digests

STEPS, BATCH, SEED = 4, 16, 0
VIT = {
    "image_size": 32, "patch_size": 4, "hidden_size": 192, "num_hidden_layers": 6,
    "num_attention_heads": 3, "intermediate_size": 768,
}  # fmt: skip


def study(clients: int, rounds: int) -> Study:
    draw, rows = np.random.default_rng(SEED), clients * STEPS * BATCH
    np.savez(
        "rows.npz",
        image_train=draw.integers(0, 255, (rows, 32, 32, 3), dtype=np.uint8),
        digit_train=draw.integers(0, 10, rows),
    )
    said = {
        "name": "crew",
        "model": {"type": "vit", "config": VIT},
        "task": {
            "kind": "image-classification", "input": "image", "label": "digit", "image_size": 32,
            "labels": list(range(10)),
        },
        "data": {"path": "rows.npz", "split": "train", "num_clients": clients, "holdout_fraction": 0.0},
        "method": {"name": "fedavg"},
        "train": {"rounds": rounds, "batch_size": BATCH, "steps": STEPS},
    }  # fmt: skip
    return resolve_paths(study_from_dict(said), Path.cwd())


def told(made: Study, folder: Path, runner: str, workers: int) -> dict[str, Any]:
    began = time.perf_counter()
    hired = make_pool_config(runner, workers if runner != "local" else None)
    whole = Simulation(made, folder, pool_config=hired)
    ends = [time.perf_counter() for _ in closed(whole)]
    rounds = [after - before for before, after in pairwise(ends)]
    return {
        "runner": runner,
        "workers": workers if runner != "local" else 1,
        "start-up and first round, s": round(ends[0] - began, 2),
        "a round, s": round(median(rounds), 3),
        "rounds, s": [round(each, 3) for each in rounds],
        "world": sorted(digests(whole.federation.global_values()).values()),
    }


def closed(whole: Simulation) -> Iterator[int]:
    for each in whole.rounds():
        yield each.round


def main() -> None:
    reader = argparse.ArgumentParser()
    reader.add_argument("runners", nargs="*", default=["local", "pool", "ray"])
    reader.add_argument("--rounds", type=int, default=6)
    reader.add_argument("--workers", type=int, default=2)
    reader.add_argument("--clients", type=int, default=8)
    said = reader.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        os.chdir(place)
        made = study(said.clients, said.rounds)
        rows = [told(made, Path(place) / each, each, said.workers) for each in said.runners]
        os.chdir("/")
    worlds = {json.dumps(row.pop("world")) for row in rows}
    for row in rows:
        print(
            json.dumps(row | {"of the first": round(row["a round, s"] / rows[0]["a round, s"], 3)})
        )
    print(
        "all global models have the same bits" if len(worlds) == 1 else "THE GLOBAL MODELS DIFFER"
    )


if __name__ == "__main__":
    main()
