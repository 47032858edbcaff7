# SPDX-License-Identifier: Apache-2.0
"""What a turn costs when frozen outputs are kept, in CPU time, the sides taking turns.

Head only and prompts are compared with training on features that somebody worked out before, the
last third of the blocks with its share of the FLOPs of a full turn.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from study import FACTS
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize
from torch.utils.flop_counter import FlopCounterMode

from fedplan.data.examples import Examples, ImageExamples, RaggedArray, TokenSequences
from fedplan.language.parser import parse
from fedplan.language.predicates import Turn
from fedplan.language.resolution import resolve
from fedplan.models.description import describe
from fedplan.models.dual_encoder import DualEncoder
from fedplan.models.prompts import add_prompts
from fedplan.models.values import get_values
from fedplan.training import ActivationCache, Job, TrainArguments, plain_fit

ROWS, REPEATS, FEW = 64, 9, 3
PACE = TrainArguments(lr=1e-4, batch_size=16)
HEAD = "chain(freeze(), share(head))"
THIRD = "chain(freeze(), share(head), share(last(4)))"
PROMPTS = "chain(freeze(), share(prompt & common))"


class Given:
    """Features that were worked out before, with their labels."""

    def __init__(self, features: Tensor, labels: Tensor) -> None:
        self.features, self.labels = features, labels

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: Tensor) -> dict[str, Tensor]:
        return {"features": self.features[indices], "labels": self.labels[indices]}


def pictures(size: int, classes: int) -> ImageExamples:
    pixels = torch.randint(0, 255, (ROWS, 3, size, size), dtype=torch.uint8)
    return ImageExamples(
        pixels, torch.arange(ROWS) % classes, torch.zeros(3, 1, 1), torch.ones(3, 1, 1)
    )


def vit() -> tuple[nn.Module, Examples]:
    config = hf.ViTConfig(
        image_size=32, patch_size=4, hidden_size=192, num_hidden_layers=12, num_attention_heads=3,
        intermediate_size=768, num_labels=10,
    )  # fmt: skip
    return hf.ViTForImageClassification(config), pictures(32, 10)


def gte() -> tuple[nn.Module, Examples]:
    config = hf.BertConfig(
        hidden_size=384, num_hidden_layers=12, num_attention_heads=12, intermediate_size=1536,
        num_labels=8, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    texts = RaggedArray.from_lists(torch.randint(5, 30000, (ROWS, 64)).tolist())
    return hf.BertForSequenceClassification(config), TokenSequences(
        texts, 0, torch.arange(ROWS) % 8
    )


def clip() -> tuple[DualEncoder, Examples]:
    common = {"hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024}
    text = {**common, "num_hidden_layers": 6, "vocab_size": 1000, "eos_token_id": 999}
    vision = {**common, "num_hidden_layers": 12, "image_size": 64, "patch_size": 8}
    model = hf.CLIPModel(hf.CLIPConfig(text_config=text, vision_config=vision, projection_dim=128))
    ids = torch.randint(5, 900, (10, 9))
    ids[:, -1] = 999
    names = [str(number) for number in range(10)]
    dual = DualEncoder(model, ids, torch.ones_like(ids), names=names, lead=4)
    return add_prompts(dual, text=4, vision=0, levels=("common",)), pictures(64, 10)


def answered(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    inputs = {name: each for name, each in batch.items() if name != "labels"}
    found: Any = model(**inputs)
    return cross_entropy(found if isinstance(found, Tensor) else found.logits, batch["labels"])


def job_of(
    model: nn.Module, rows: Examples, plan: str, train_arguments: TrainArguments = PACE
) -> Job:
    params = describe(model)
    roles = resolve(parse(plan), params, Turn(round=1, client="a"))
    return Job(model, roles, rows, answered, train_arguments, 3, get_values(model, params))


def kept(model: nn.Module, rows: Examples, plan: str) -> Job:
    """A job whose frozen outputs are there already."""
    job = replace(
        job_of(model, rows, plan, replace(PACE, cache_activations=True)),
        activation_cache=ActivationCache(),
    )
    plain_fit(job)
    return job


class Head(nn.Module):
    """A head on features: what somebody who worked them out before would train."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, features: Tensor) -> Tensor:
        return self.layers(features)


class Prompted(nn.Module):
    """The text tower with its prompts, against features of pictures."""

    def __init__(self, dual: DualEncoder) -> None:
        super().__init__()
        self.dual: Any = dual

    def forward(self, features: Tensor) -> Tensor:
        whole = self.dual.backbone
        found = whole.text_model(input_ids=self.dual.ids, attention_mask=self.dual.mask)
        texts = normalize(whole.text_projection(found.pooler_output), dim=-1)
        return whole.logit_scale.exp() * features @ texts.t()

    def train(self, mode: bool = True) -> Prompted:
        super().train(mode)
        return self


def on_features(model: nn.Module, width: int, labels: Tensor, plan: str = "share()") -> Job:
    return job_of(model, Given(torch.randn(ROWS, width), labels), plan)


def seconds(job: Job) -> float:
    started = time.process_time()
    plain_fit(job)
    return time.process_time() - started


def ratio(one: Job, other: Job, repeats: int = REPEATS) -> tuple[float, float, float, float]:
    """Milliseconds of each, and the median and spread of their ratio, one after the other."""
    pairs = [(seconds(one), seconds(other)) for _ in range(repeats + 1)][1:]
    ratios = sorted(a / b for a, b in pairs)
    first, second = (1000 * statistics.median(side) for side in zip(*pairs, strict=True))
    return first, second, statistics.median(ratios), ratios[-1] - ratios[0]


def flops(job: Job) -> int:
    """Of one step."""
    with FlopCounterMode(display=False) as counter:
        plain_fit(replace(job, train_arguments=replace(job.train_arguments, steps=1)))
    return counter.get_total_flops()


def headed(name: str, make: Callable[[], tuple[nn.Module, Examples]]) -> dict[str, Any]:
    model, rows = make()
    labels = rows.batch(torch.arange(ROWS))["labels"]
    if name == "vit":
        head = on_features(Head(nn.Linear(192, 10)), 192, labels)
    else:
        dense, last = nn.Linear(384, 384), nn.Linear(384, 8)
        head = on_features(Head(dense, nn.Tanh(), last), 384, labels)
    found = ratio(kept(model, rows, HEAD), head)
    return row(f"head only, {name}", found, 1.25)


def prompted() -> dict[str, Any]:
    dual, rows = clip()
    labels = rows.batch(torch.arange(ROWS))["labels"]
    ready = on_features(Prompted(dual), 128, labels)
    inner = resolve(parse(PROMPTS), tuple(ready.roles), Turn(round=1, client="a"))
    return row(
        "prompts of texts, clip",
        ratio(kept(dual, rows, PROMPTS), replace(ready, roles=inner)),
        1.25,
    )


def third(name: str, make: Callable[[], tuple[nn.Module, Examples]]) -> dict[str, Any]:
    model, rows = make()
    part, full = kept(model, rows, THIRD), job_of(make()[0], rows, "share()")
    share = flops(part) / flops(full)
    found = ratio(part, full, FEW)
    told = row(f"last third of the blocks, {name}", found, 1.2 * share)
    return told | {"share_of_flops": round(share, 3), "over_share": round(found[2] / share, 3)}


def row(name: str, found: tuple[float, float, float, float], limit: float) -> dict[str, Any]:
    mine, other, median, spread = found
    return {
        "what": name,
        "ms_a_turn": round(mine, 2),
        "ms_compared": round(other, 2),
        "ratio": round(median, 3),
        "spread": round(spread, 3),
        "limit": round(limit, 3),
    }


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = list[dict[str, Any]]()
    for measured in (
        lambda: headed("vit", vit),
        lambda: headed("gte", gte),
        prompted,
        lambda: third("vit", vit),
        lambda: third("gte", gte),
    ):
        rows.append(measured())
        print(json.dumps(rows[-1]), flush=True)
    steps = -(-ROWS // PACE.batch_size)
    result = {
        "command": "python research/prefix_cost.py --write",
        "facts": FACTS,
        "about": f"CPU time of a turn of {steps} steps of {PACE.batch_size} rows, one thread, AdamW; "
        f"both sides in turn, medians of {REPEATS} ({FEW} for the blocks); spread from the least to the most",
        "rows": rows,
    }
    if "--write" in sys.argv:
        place = Path(__file__).parent / "results" / "prefix-cost.json"
        place.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
