# SPDX-License-Identifier: Apache-2.0
"""What a turn of prompts costs where what is below them is kept, in CPU time, the sides in turn."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedplan.data.examples import ImageExamples
from fedplan.language.predicates import Turn
from fedplan.language.resolution import resolve
from fedplan.methods.adapters import pfeddc
from fedplan.models.description import describe
from fedplan.models.dual_encoder import load_dual_encoder
from fedplan.models.values import get_values
from fedplan.training import ActivationCache, Job, TrainArguments, plain_fit
from research.bench.facts import facts_of
from research.bridge import SIZE, places

ROWS, REPEATS = 32, 5
PACE = TrainArguments(lr=3e-3, batch_size=8)
CLASSES = ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")
CASES: dict[str, dict[str, int]] = {
    "prompts of texts": {"vision": 0},
    "prompts of texts and, at block 10 of 12, of pictures": {"vision_at": 10},
    "prompts of texts and, at block 6 of 12, of pictures": {"vision_at": 6},
}
OUT = Path(__file__).parent / "results" / "prompts-cost.json"


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return cross_entropy(model(batch["pixel_values"]), batch["labels"])


def job_of(
    asked: argparse.Namespace, settings: dict[str, int], train_arguments: TrainArguments
) -> Job:
    """A turn on random pictures: what they show costs nothing."""
    torch.manual_seed(0)
    method = pfeddc(**settings)  # pyright: ignore[reportArgumentType]
    assert method.adapt is not None
    model = method.adapt(
        load_dual_encoder(
            names=CLASSES,
            vision=str(asked.data / "dinov2-small"),
            text=str(asked.prepared / "gte-6"),
            bridge=str(asked.prepared / "bridge.safetensors"),
        )
    )
    pixels = torch.randint(0, 255, (ROWS, 3, SIZE, SIZE), dtype=torch.uint8)
    labels = torch.arange(ROWS) % len(CLASSES)
    rows = ImageExamples(pixels, labels, torch.zeros(3, 1, 1), torch.ones(3, 1, 1))
    params = describe(model)
    roles = resolve(method.plan, params, Turn(round=1, client="a"))
    return Job(
        model,
        roles,
        rows,
        loss,
        train_arguments,
        3,
        get_values(model, params),
        activation_cache=ActivationCache(),
    )


def seconds(job: Job) -> float:
    started = time.process_time()
    plain_fit(job)
    return time.process_time() - started


def measured(asked: argparse.Namespace, name: str) -> dict[str, Any]:
    """A turn whose pictures were seen before, against one that keeps nothing."""
    kept = job_of(asked, CASES[name], replace(PACE, cache_activations=True))
    usual = job_of(asked, CASES[name], PACE)
    first = seconds(kept)
    pairs = [(seconds(kept), seconds(usual)) for _ in range(REPEATS)]
    ratios = sorted(a / b for a, b in pairs)
    mine, other = (statistics.median(side) for side in zip(*pairs, strict=True))
    return {
        "what": name,
        "ms_kept": round(1000 * mine),
        "ms_usual": round(1000 * other),
        "ms_first": round(1000 * first),
        "ratio": round(statistics.median(ratios), 3),
        "spread": round(ratios[-1] - ratios[0], 3),
    }


def main() -> None:
    asked = places(__doc__, prepared="what research/bridge.py wrote")
    rows = [measured(asked, name) for name in CASES]
    about = (
        f"CPU time of a turn of {ROWS // PACE.batch_size} steps of {PACE.batch_size} rows, one thread, both sides in "
        f"turn, medians of {REPEATS}; `first` is the turn that fills the cache"
    )
    said = {"command": "python -m research.prompts_cost", "about": about, "rows": rows}
    OUT.write_text(
        json.dumps(said | {"facts": facts_of(Path(__file__).parents[1])}, indent=1) + "\n"
    )
    print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
