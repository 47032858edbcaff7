# SPDX-License-Identifier: Apache-2.0
"""How long a step takes when a part is frozen, against a full step, beside its share of the FLOPs.

The plans take turns, step by step, in one process; the median of each is compared.
"""

from __future__ import annotations

import platform
import statistics
import sys
import time
from pathlib import Path

import torch
import transformers
from study import FACTS
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from fedplan.language.parser import parse
from fedplan.language.plan import Plan, share
from fedplan.language.predicates import Turn
from fedplan.language.resolution import resolve
from fedplan.models.description import describe
from fedplan.models.params import Block
from fedplan.training.fit import TrainArguments
from fedplan.training.freezing import trainable

PLANS: dict[str, Plan] = {
    "full": share(),
    "FedFrozen A, stage two": parse("chain(share(), freeze(query | key))"),
    "FedFrozen B, stage two": parse("chain(freeze(), share(value | head))"),
    "SAFL, the last third": parse("chain(freeze(), share(head), share(last(4)))"),
    "SAFL, the middle third": parse("chain(freeze(), share(head), share(blocks(4, 5, 6, 7)))"),
    "SAFL, the first third": parse("chain(freeze(), share(head), share(first(4)))"),
    "head only": parse("chain(freeze(), share(head))"),
}
STEPS = 12


def vit() -> tuple[nn.Module, dict[str, Tensor]]:
    config = transformers.ViTConfig(
        image_size=32, patch_size=4, hidden_size=192, num_hidden_layers=12, num_attention_heads=3,
        intermediate_size=768, num_labels=10,
    )  # fmt: skip
    model = transformers.ViTForImageClassification(config)
    return model, {"pixel_values": torch.randn(16, 3, 32, 32), "labels": torch.arange(16) % 10}


def gte() -> tuple[nn.Module, dict[str, Tensor]]:
    config = transformers.BertConfig(
        hidden_size=384, num_hidden_layers=12, num_attention_heads=12, intermediate_size=1536,
        num_labels=8,
    )  # fmt: skip
    model = transformers.BertForSequenceClassification(config)
    return model, {"input_ids": torch.randint(5, 30000, (16, 64)), "labels": torch.arange(16) % 8}


MODELS = {
    "ViT, 5.4 M params, 16 pictures of 64 patches": vit,
    "BERT as gte-small, 33 M params, 16 texts of 64 tokens": gte,
}


def step(model: nn.Module, batch: dict[str, Tensor], plan: Plan) -> float:
    """Seconds of one step with AdamW, its memory fresh, the marking not counted."""
    params = describe(model)
    with trainable(model, resolve(plan, params, Turn(scores={Block("encoder", 0): 0.0}))) as marked:
        optimizer = TrainArguments(lr=1e-4).make_optimizer(marked)
        started = time.perf_counter()
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - started


def flops(model: nn.Module, batch: dict[str, Tensor], plan: Plan) -> int:
    with trainable(model, resolve(plan, describe(model), Turn())) as marked:
        list(marked.parameters())
        with FlopCounterMode(display=False) as counter:
            model(**batch).loss.backward()
        model.zero_grad()
        return counter.get_total_flops()


def main() -> None:
    torch.set_num_threads(1)
    where = f"commit {FACTS['commit']}, torch {torch.__version__}, {platform.machine()}, one thread"
    lines = [f"$ python research/bench_steps.py --write   # {where}, {STEPS} steps each"]
    for name, make in MODELS.items():
        torch.manual_seed(0)
        model, batch = make()
        counts = {plan: flops(model, batch, said) for plan, said in PLANS.items()}
        times: dict[str, list[float]] = {plan: [] for plan in PLANS}
        for number in range(STEPS + 1):
            for plan, said in PLANS.items():
                seconds = step(model, batch, said)
                if number:
                    times[plan].append(seconds)
        full = statistics.median(times["full"])
        lines += ["", f"{name}: full step {full:.3f} s", "plan                      time   FLOPs"]
        for plan in PLANS:
            ratio, share_of = statistics.median(times[plan]) / full, counts[plan] / counts["full"]
            lines.append(f"{plan:<24} {ratio:6.2f}  {share_of:6.2f}")
    text = "\n".join(lines) + "\n"
    print(text, end="")
    if "--write" in sys.argv:
        (Path(__file__).parent / "results" / "bench_steps.txt").write_text(text)


if __name__ == "__main__":
    main()
