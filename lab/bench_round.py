# SPDX-License-Identifier: Apache-2.0
"""Time rounds of the local runner against a bare torch loop that trains and averages the same."""

from __future__ import annotations

import copy
import tempfile
import time
from pathlib import Path

import torch
import transformers
from torch import Tensor, nn

from fedplan import seeds
from fedplan.federation.agreement import Agreement
from fedplan.methods.registry import method_named
from fedplan.models.description import describe
from fedplan.runners.local import Federation
from fedplan.training.fit import Pace, batches
from fedplan.training.optimisers import sgd

CLIENTS, ROUNDS = 10, 10
PACE = Pace(sgd(), rate=0.01, batch=32, epochs=1)


class Pixels:
    """Random images: what is timed does not depend on what they show."""

    def __init__(self, seed: int, count: int = 256) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.images = torch.randn(count, 3, 32, 32, generator=generator)
        self.labels = torch.randint(10, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: Tensor) -> dict[str, Tensor]:
        return {"pixel_values": self.images[indices], "labels": self.labels[indices]}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(pixel_values=batch["pixel_values"]).logits
    return nn.functional.cross_entropy(logits, batch["labels"])


def bare(model: nn.Module, world: dict[str, Tensor], rows: dict[str, Pixels], number: int) -> None:
    """One round without fedplan: load, train, average."""
    total = sum(map(len, rows.values()))
    mean = {k: torch.zeros_like(v) for k, v in world.items()}
    for name, held in rows.items():
        model.load_state_dict(world)
        seed = seeds.seed("bench", "fit", number, name)
        torch.manual_seed(seed)
        model.train()
        optimiser = torch.optim.SGD(model.parameters(), lr=PACE.rate)
        for indices in batches(len(held), PACE, seed):
            found = loss(model, held.batch(indices))
            found.backward()
            optimiser.step()
            optimiser.zero_grad()
            found.item()
        for key, value in model.state_dict().items():
            mean[key].add_(value, alpha=len(held) / total)
    world |= mean


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        image_size=32, patch_size=4, hidden_size=192, num_hidden_layers=6, num_attention_heads=3,
        intermediate_size=768, num_labels=10, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = transformers.ViTForImageClassification(config)
    rows = {f"client-{i}": Pixels(i) for i in range(CLIENTS)}
    twin = copy.deepcopy(model)
    world = {k: v.clone() for k, v in twin.state_dict().items()}
    agreement = Agreement("bench", describe(model), method_named("fedavg"), PACE)
    print(f"{sum(p.numel for p in agreement.params) / 1e6:.2f} M params, {CLIENTS} clients")
    ours = theirs = 0.0
    with tempfile.TemporaryDirectory() as folder:
        federation = Federation(agreement, model, rows, loss, Path(folder), rounds=ROUNDS)
        for number in range(1, ROUNDS + 1):
            started = time.perf_counter()
            federation.commit(federation.round())
            between = time.perf_counter()
            bare(twin, world, rows, number)
            ours, theirs = ours + between - started, theirs + time.perf_counter() - between
            print(f"round {number}: {between - started:.2f} s, ratio so far {ours / theirs:.3f}")
        apart = max((v - federation.world_values()[k]).abs().max().item() for k, v in world.items())
    print(f"ratio {ours / theirs:.3f}; the models differ by at most {apart:.1e}")


if __name__ == "__main__":
    main()
