# SPDX-License-Identifier: Apache-2.0
"""What the local runner costs beside bare torch: one small ratio with a wide limit."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from torch import Tensor, nn

import fedplan as fp

CLIENTS, STEPS, BATCH, ROUNDS, RATE = 5, 4, 32, 5, 0.01
LIMIT = 1.6


class Rows:
    """Random pictures: what is timed does not depend on what they show."""

    def __init__(self, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.pixels = torch.randn(STEPS * BATCH, 3, 32, 32, generator=draw)
        self.labels = torch.randint(10, (STEPS * BATCH,), generator=draw)

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: Tensor) -> dict[str, Tensor]:
        return {"pixel_values": self.pixels[indices], "labels": self.labels[indices]}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(pixel_values=batch["pixel_values"]).logits
    return nn.functional.cross_entropy(logits, batch["labels"])


def bare(model: nn.Module, clients: dict[str, Rows]) -> None:
    """One round without fedplan: each starts from the world, takes its steps, and is averaged."""
    world = {k: v.detach().clone() for k, v in model.named_parameters()}
    mean = {k: torch.zeros_like(v) for k, v in world.items()}
    for rows in clients.values():
        put(model, world)
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        for indices in torch.randperm(len(rows)).split(BATCH):
            loss(model, rows.batch(indices)).backward()
            optimizer.step()
            optimizer.zero_grad()
        for key, value in model.named_parameters():
            mean[key].add_(value.detach(), alpha=1 / len(clients))
    put(model, mean)


@torch.no_grad()
def put(model: nn.Module, values: dict[str, Tensor]) -> None:
    for key, value in model.named_parameters():
        value.copy_(values[key])


def seconds(play: Callable[[], object]) -> float:
    """Of this process's CPU: what else the machine does is not in it."""
    begun = time.process_time()
    play()
    return time.process_time() - begun


def test_a_round_costs_little_more_than_bare_torch(tmp_path: Path) -> None:
    config = transformers.ViTConfig(
        image_size=32, patch_size=8, hidden_size=64, num_hidden_layers=4, num_attention_heads=4,
        intermediate_size=256, num_labels=10, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model, clients = (
        transformers.ViTForImageClassification(config),
        {str(i): Rows(i) for i in range(CLIENTS)},
    )
    twin = copy.deepcopy(model).train()
    simulation = fp.simulate(
        fp.methods.fedavg(), model, clients, loss, options=fp.RunOptions(folder=tmp_path, start=False),
        train=fp.TrainConfig(
            rounds=ROUNDS + 1, optimizer="sgd", lr=RATE, batch_size=BATCH, steps=STEPS
        ),
    )  # fmt: skip
    rounds, ratios = simulation.rounds(), list[float]()
    for _ in range(ROUNDS + 1):
        ours, theirs = seconds(lambda: next(rounds)), seconds(lambda: bare(twin, clients))
        ratios.append(ours / theirs)
    assert next(rounds, None) is None
    found = statistics.median(ratios[1:])  # the first round imports, and warms what is kept
    assert found < LIMIT, (
        f"a round takes {found:.2f} times bare torch, and may take {LIMIT}: see research/bench"
    )
