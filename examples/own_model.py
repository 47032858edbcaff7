# SPDX-License-Identifier: Apache-2.0
"""Your own module, loss and metric: four hospitals share a body, and each keeps its own head."""

import torch
from sklearn.datasets import load_digits
from torch import nn

import fedplan as fp
from fedplan.parts import head


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.embed, self.body = nn.Linear(8, 32), nn.TransformerEncoder(layer, 2)
        self.top = nn.Linear(32, 10)

    def forward(self, image):
        return self.top(self.body(self.embed(image)).mean(1))


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch["inputs"]), batch["labels"], label_smoothing=0.1)


def right(model, batch):
    return {"accuracy": (model(batch["inputs"]).argmax(-1) == batch["labels"]).float().mean()}


fp.register_layer_map("Reader", head="top", embed="embed")
images, labels = load_digits(return_X_y=True)
images = torch.tensor(images).reshape(-1, 8, 8).float() / 16
rows = [(images[i], int(labels[i])) for i in range(len(labels))]
sites = {f"hospital-{i}": {"train": rows[i * 300 :][:300], "test": rows[1200:]} for i in range(4)}
plan, train = fp.chain(fp.share(), fp.keep(head)), fp.TrainConfig(rounds=4, lr=3e-3)
task = fp.CustomTask(metrics=right, primary="accuracy")
torch.manual_seed(0)
run = fp.simulate(plan, Reader(), sites, loss, task=task, train=train)
print(run.metrics.to_pandas()[["round", "loss", "personal.accuracy", "personal.accuracy_worst"]])
