# SPDX-License-Identifier: Apache-2.0
"""How long a step of DP-SGD takes, against a plain step on the same part, by each way to do it.

The ways take turns, step by step, in one process; the median of each is compared, in seconds of
the processor. A step ends with AdamW; noise is drawn by the cryptographic source, and stands in a
column of its own.
"""

from __future__ import annotations

import copy
import os
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from opacus import GradSampleModule
from study import FACTS
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy

from fedplan.language.parser import parse
from fedplan.language.parts import query, value
from fedplan.language.predicates import Turn
from fedplan.language.resolution import resolve
from fedplan.methods.adapters import add_lora
from fedplan.models.description import describe
from fedplan.privacy.dpsgd.fit import DPSGDConfig, NoisyGradients
from fedplan.privacy.dpsgd.ghost_clipping import why_not_ghost_clipping
from fedplan.privacy.dpsgd.per_example import Objective, trained_tensors
from fedplan.privacy.mechanisms.noise import NoiseStream
from fedplan.training.fit import TrainArguments
from fedplan.training.freezing import TrainableParams, trainable

PLANS = {
    "all": "share()",
    "last third": "chain(freeze(), share(head), share(last({})))",
    "LoRA, r = 4": "chain(freeze(), share(adapter | head))",
    "head only": "chain(freeze(), share(head))",
}
MODELS = {
    "BERT of 6 x 384, 16 texts of 64 tokens": (6, 64),
    "BERT of 6 x 384, 16 texts of 16 tokens": (6, 16),
    "BERT as gte-small, 12 x 384, 16 texts of 64 tokens": (12, 64),
}
SIZE = 16
STEPS = 7
PRIVATELY = DPSGDConfig(
    max_grad_norm=1.0, noise_multiplier=1.0, expected_batch_size=SIZE, sampling_rate=0.1, steps=1
)


class Texts:
    """Texts of one length, with all that Opacus wants to be told."""

    def __init__(self, tokens: int) -> None:
        places = torch.arange(tokens).expand(SIZE, tokens).contiguous()
        self.rows = {
            "input_ids": torch.randint(5, 30000, (SIZE, tokens)),
            "position_ids": places,
            "token_type_ids": torch.zeros_like(places),
            "labels": torch.arange(SIZE) % 8,
        }

    def __len__(self) -> int:
        return SIZE

    def batch(self, indices: Tensor) -> dict[str, Tensor]:
        return {name: rows[indices] for name, rows in self.rows.items()}


def loss(model: Callable[..., Any], batch: Mapping[str, Tensor]) -> Tensor:
    inputs = {name: rows for name, rows in batch.items() if name != "labels"}
    return cross_entropy(model(**inputs).logits, batch["labels"])


def build(layers: int, plan: str) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=384, num_hidden_layers=layers, num_attention_heads=12, intermediate_size=1536,
        num_labels=8,
    )  # fmt: skip
    model = transformers.BertForSequenceClassification(config)
    model.set_attn_implementation("eager")  # vmap cannot do without
    return (add_lora(model, rank=4, on=query | value) if "LoRA" in plan else model).train()


def quiet(shape: tuple[int, ...], stddev: float, step: float) -> Tensor:
    return torch.zeros(shape, dtype=torch.float64)


def ways(
    model: nn.Module, marked: TrainableParams, roles: Any, rows: Texts
) -> dict[str, Callable[[], Any]]:
    """Each way to a gradient; the noise is a way of its own."""
    whole, leaves = torch.arange(SIZE), dict(marked.named_parameters())
    subject = Objective(model, trained_tensors(model, roles), rows, loss)
    assert not (reason := why_not_ghost_clipping(subject)), reason
    fast = NoisyGradients(subject, PRIVATELY, marked, quiet, "")
    slow = NoisyGradients(subject, PRIVATELY, marked, quiet)
    noise = NoiseStream(os.urandom(32))

    def plain() -> None:
        loss(model, rows.batch(whole)).backward()

    def noises() -> None:
        for leaf in leaves.values():
            leaf.grad = noise.rounded_gaussian(tuple(leaf.shape), 1.0, 2.0**-26).to(leaf.dtype)

    return {
        "plain": plain,
        "ghost": lambda: fast.write_gradients(whole),
        "one by one": lambda: slow.write_gradients(whole),
        "noise": noises,
    }


def others(model: nn.Module, marked: TrainableParams, rows: Texts) -> dict[str, Callable[[], Any]]:
    """What others do; neither runs our losses as they are."""
    leaves = dict(marked.named_parameters())
    sampled = GradSampleModule(copy.deepcopy(model), loss_reduction="mean")
    batch = rows.batch(torch.arange(SIZE))

    def clipped(each: list[Tensor]) -> list[Tensor]:
        lengths = torch.stack([one.flatten(1).norm(dim=1) for one in each]).norm(dim=0)
        scales = (1 / lengths).clamp(max=1)
        return [torch.einsum("i,i...->...", scales, one) for one in each]

    def opacus() -> None:
        loss(sampled, batch).backward()
        there = [p for p in sampled.parameters() if p.requires_grad]
        for leaf, total in zip(
            leaves.values(), clipped([p.grad_sample for p in there]), strict=True
        ):
            leaf.grad = total / SIZE
        for p in there:
            p.grad = p.grad_sample = None

    def one(values: dict[str, Tensor], row: dict[str, Tensor]) -> Tensor:
        row = {name: each[None] for name, each in row.items()}
        return loss(lambda **inputs: functional_call(model, values, (), inputs), row)

    def mapped() -> None:
        values = {name: leaf.detach() for name, leaf in leaves.items()}
        each = vmap(grad(one), (None, 0), randomness="different")(values, batch)
        for leaf, total in zip(leaves.values(), clipped(list(each.values())), strict=True):
            leaf.grad = total / SIZE

    return {"opacus": opacus, "vmap": mapped}


def measured(layers: int, tokens: int, plan: str, *, with_others: bool) -> dict[str, float]:
    """The median seconds of each way's step."""
    model, rows = build(layers, plan), Texts(tokens)
    roles = resolve(parse(PLANS[plan].format(layers // 3)), describe(model), Turn())
    with trainable(model, roles) as marked:
        optimizer = TrainArguments(lr=1e-4).make_optimizer(marked)
        found = ways(model, marked, roles, rows)
        found |= others(model, marked, rows) if with_others else {}
        times: dict[str, list[float]] = {way: [] for way in found}
        for number in range(STEPS + 1):
            for way, gradients in found.items():
                started = time.process_time()
                gradients()
                if way != "noise":
                    optimizer.step()
                seconds = time.process_time() - started
                optimizer.zero_grad()
                if number:
                    times[way].append(seconds)
    return {way: statistics.median(seconds) for way, seconds in times.items()}


def main() -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    where = f"commit {FACTS['commit']}, torch {torch.__version__}, {platform.machine()}, one thread"
    lines = [
        f"$ python research/bench_private.py --write   # {where}, {STEPS} steps each",
        "",
        "Processor seconds of a plain step, and how many times as many a step of DP-SGD takes.",
        "noise: what the noise of a cryptographic source takes on top, in plain steps.",
    ]
    for name, (layers, tokens) in MODELS.items():
        columns = ("ghost", "one by one", "noise", *(("opacus", "vmap") if layers == 6 else ()))
        lines += ["", name, f"{'part':<12} {'plain':>8}" + "".join(f"{c:>12}" for c in columns)]
        for plan in PLANS:
            found = measured(layers, tokens, plan, with_others=layers == 6)
            ratios = "".join(f"{found[c] / found['plain']:>12.2f}" for c in columns)
            lines.append(f"{plan:<12} {found['plain']:>6.3f} s{ratios}")
            print(lines[-1], flush=True)
    text = "\n".join(lines) + "\n"
    print(text, end="")
    if "--write" in sys.argv:
        (Path(__file__).parent / "results" / "bench_private.txt").write_text(text)


if __name__ == "__main__":
    main()
