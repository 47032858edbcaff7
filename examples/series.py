# SPDX-License-Identifier: Apache-2.0
"""Time series: four people's pulse, forecast by a Transformer of one's own with its own layer map.

Each wearer keeps the layers that read and write the pulse; after round 3 query and key are frozen.
"""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import fedplan as fp

SEEN, WIDTH = 24, 16


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm, self.mlp = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        weights = (self.to_q(x) @ self.to_k(x).mT / WIDTH**0.5).softmax(-1)
        x = x + self.to_out(weights @ self.to_v(x))
        return x + torch.relu(self.mlp(self.norm(x)))


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.read, self.place = nn.Linear(1, WIDTH), nn.Embedding(SEEN, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.write = nn.Linear(WIDTH, 1)

    def forward(self, pulse):
        x = self.read(pulse[..., None]) + self.place.weight
        for block in self.blocks:
            x = block(x)
        return self.write(x[:, -1]).squeeze(-1)


def wearer(seed):
    """Windows of 24 values and the value after each; every wearer has another pulse."""
    draw = torch.Generator().manual_seed(seed)
    rest, swing, period = 0.5 * seed, 0.5 + 0.2 * seed, 9 + 2 * seed
    pulse = (
        rest
        + swing * torch.sin(6.28 * torch.arange(240.0) / period)
        + 0.05 * torch.randn(240, generator=draw)
    )
    windows = pulse.unfold(0, SEEN + 1, 1)
    x, y = windows[:, :SEEN], windows[:, SEEN]
    return {"train": TensorDataset(x[:150], y[:150]), "test": TensorDataset(x[175:], y[175:])}


def loss(model, batch):
    return nn.functional.mse_loss(model(batch["inputs"]), batch["labels"])


def error(model, batch):
    return {"mae": (model(batch["inputs"]) - batch["labels"]).abs().mean().item()}


attention = {"query": "to_q", "key": "to_k", "value": "to_v", "out": "to_out"}
other = {"mlp": "mlp", "embed": "read place", "head": "write"}
fp.register_layer_map("Forecaster", blocks={"encoder": "blocks"}, **attention, **other)
torch.manual_seed(0)
run = fp.simulate(
    fp.parse("chain(share(), when(after(3), freeze(query | key)), keep(head | embed))"),
    Forecaster(),
    {f"wearer-{seed}": wearer(seed) for seed in range(4)},
    loss,
    task=fp.CustomTask(metrics=error, primary="mae", higher_is_better=False),
    train=fp.TrainConfig(rounds=6, epochs=4, lr=1e-2, batch_size=30),
)
print(run.metrics.to_pandas()[["round", "loss", "personal.mae", "upload_bytes"]])
