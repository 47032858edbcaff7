# SPDX-License-Identifier: Apache-2.0
"""examples/own_model.py in Flower. It has no count of bytes, and a run that is killed is lost."""

import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.embed, self.body = nn.Linear(8, 32), nn.TransformerEncoder(layer, 2)
        self.top = nn.Linear(32, 10)

    def forward(self, image):
        return self.top(self.body(self.embed(image)).mean(1))


def load_data(partition):
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images).reshape(-1, 8, 8).float() / 16
    rows = [(images[i], int(labels[i])) for i in range(len(labels))]
    return rows[partition * 300 : partition * 300 + 300], rows[1200:]


def load_model(message, context):
    model = Reader()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict(), strict=False)
    if "head" in context.state:
        model.top.load_state_dict(context.state["head"].to_torch_state_dict())
    return model


client = ClientApp()


@client.train()
def train(message, context):
    model = load_model(message, context)
    rows, _ = load_data(context.node_config["partition-id"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    losses = []
    for images, labels in DataLoader(rows, batch_size=32, shuffle=True):
        loss = nn.functional.cross_entropy(model(images), labels, label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    context.state["head"] = ArrayRecord(model.top.state_dict())
    shared = {name: v for name, v in model.state_dict().items() if not name.startswith("top.")}
    metrics = {"loss": sum(losses) / len(losses), "num-examples": len(rows)}
    records = {"arrays": ArrayRecord(shared), "metrics": MetricRecord(metrics)}
    return Message(RecordDict(records), reply_to=message)


@client.evaluate()
def evaluate(message, context):
    model = load_model(message, context).eval()
    _, rows = load_data(context.node_config["partition-id"])
    images, labels = next(iter(DataLoader(rows, batch_size=len(rows))))
    with torch.no_grad():
        accuracy = (model(images).argmax(-1) == labels).float().mean().item()
    metrics = MetricRecord({"accuracy": accuracy, "num-examples": len(rows)})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)


def mean_and_worst(replies, weighted_by):
    accuracies = [reply["metrics"]["accuracy"] for reply in replies]
    return MetricRecord({"mean": sum(accuracies) / len(accuracies), "worst": min(accuracies)})


server = ServerApp()


@server.main()
def main(grid, context):
    torch.manual_seed(0)
    strategy = FedAvg(evaluate_metrics_aggr_fn=mean_and_worst)
    strategy.start(grid, ArrayRecord(Reader().state_dict()), num_rounds=4)


run_simulation(server, client, num_supernodes=4)
