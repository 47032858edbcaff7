# SPDX-License-Identifier: Apache-2.0
"""examples/own_method.py in Flower. Which parameters are norms is read off their names."""

import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader
from transformers import ViTConfig, ViTForImageClassification

ALPHA = 0.1


def load_data(partition):
    images, labels = load_digits(return_X_y=True)
    pixels = torch.tensor(images).reshape(-1, 1, 8, 8).float() / 16
    rows = [{"pixel_values": pixels[i], "labels": int(labels[i])} for i in range(600)]
    return [row for row in rows if row["labels"] // 2 == partition]


def new_model():
    size = {"image_size": 8, "patch_size": 2, "num_channels": 1, "hidden_size": 48}
    config = ViTConfig(**size, num_labels=10, num_hidden_layers=2, intermediate_size=64)
    return ViTForImageClassification(config)


def split(model):
    values = model.state_dict()
    norms = {name: value for name, value in values.items() if "layernorm" in name}
    return {name: value for name, value in values.items() if name not in norms}, norms


client = ClientApp()


@client.train()
def train(message, context):
    model = new_model()
    start = message.content["arrays"].to_torch_state_dict()
    model.load_state_dict(start, strict=False)
    dual = {name: torch.zeros_like(value) for name, value in start.items()}
    if "norms" in context.state:
        model.load_state_dict(context.state["norms"].to_torch_state_dict(), strict=False)
        dual = context.state["dual"].to_torch_state_dict()
    rows = load_data(context.node_config["partition-id"])
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for batch in DataLoader(rows, batch_size=32, shuffle=True):
        loss = model(**batch).loss
        optimiser.zero_grad()
        loss.backward()
        for name, param in model.named_parameters():
            if name in start:
                param.grad += ALPHA * (param.detach() - start[name]) - dual[name]
        optimiser.step()
        losses.append(loss.item())
    end, norms = split(model)
    dual = {name: dual[name] - ALPHA * (end[name] - start[name]) for name in dual}
    context.state["dual"], context.state["norms"] = ArrayRecord(dual), ArrayRecord(norms)
    metrics = {"loss": sum(losses) / len(losses), "num-examples": len(rows)}
    records = {"arrays": ArrayRecord(end), "metrics": MetricRecord(metrics)}
    return Message(RecordDict(records), reply_to=message)


class FedDyn(FedAvg):
    def configure_train(self, server_round, arrays, config, grid):
        self.old = arrays.to_torch_state_dict()
        if server_round == 1:
            self.dual = {name: torch.zeros_like(value) for name, value in self.old.items()}
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(self, server_round, replies):
        arrays, metrics = super().aggregate_train(server_round, replies)
        mean = arrays.to_torch_state_dict()
        for name, value in mean.items():
            self.dual[name] -= ALPHA * (value - self.old[name])
        new = {name: value - self.dual[name] / ALPHA for name, value in mean.items()}
        return ArrayRecord(new), metrics


server = ServerApp()


@server.main()
def main(grid, context):
    shared, _ = split(new_model())
    result = FedDyn(fraction_evaluate=0.0).start(grid, ArrayRecord(shared), num_rounds=2)
    print(result)


run_simulation(server, client, num_supernodes=5)
