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
from transformers import BertConfig, BertForSequenceClassification

ALPHA = 0.1


def load_data(partition):
    images, labels = load_digits(return_X_y=True)  # 64 pixels, each a word from 0 to 16
    rows = [{"input_ids": images[i].astype(int), "labels": int(labels[i])} for i in range(600)]
    return [row for row in rows if row["labels"] // 2 == partition]


def new_model():
    size = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_labels": 10}
    return BertForSequenceClassification(BertConfig(vocab_size=17, intermediate_size=64, **size))


def split(model):
    values = model.state_dict()
    norms = {name: value for name, value in values.items() if "LayerNorm" in name}
    return {name: value for name, value in values.items() if name not in norms}, norms


client = ClientApp()


@client.train()
def train(message, context):
    model = new_model()
    start = message.content["arrays"].to_torch_state_dict()
    model.load_state_dict(start, strict=False)
    gap = {name: torch.zeros_like(value) for name, value in start.items()}
    if "norms" in context.state:
        model.load_state_dict(context.state["norms"].to_torch_state_dict(), strict=False)
        gap = context.state["gap"].to_torch_state_dict()
    rows = load_data(context.node_config["partition-id"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for batch in DataLoader(rows, batch_size=32, shuffle=True):
        loss = model(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        for name, param in model.named_parameters():
            if name in start:
                param.grad += ALPHA * (param.detach() - start[name] - gap[name])
        optimizer.step()
        losses.append(loss.item())
    end, norms = split(model)
    gap = {name: gap[name] + start[name] - end[name] for name in gap}
    context.state["gap"], context.state["norms"] = ArrayRecord(gap), ArrayRecord(norms)
    metrics = {"loss": sum(losses) / len(losses), "num-examples": len(rows)}
    records = {"arrays": ArrayRecord(end), "metrics": MetricRecord(metrics)}
    return Message(RecordDict(records), reply_to=message)


class FedDyn(FedAvg):
    def configure_train(self, server_round, arrays, config, grid):
        self.old = arrays.to_torch_state_dict()
        if server_round == 1:
            self.gap = {name: torch.zeros_like(value) for name, value in self.old.items()}
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(self, server_round, replies):
        arrays, metrics = super().aggregate_train(server_round, replies)
        mean = arrays.to_torch_state_dict()
        for name, value in mean.items():
            self.gap[name] += self.old[name] - value
        return ArrayRecord({name: mean[name] - self.gap[name] for name in mean}), metrics


server = ServerApp()


@server.main()
def main(grid, context):
    shared, _ = split(new_model())
    FedDyn(fraction_evaluate=0.0).start(grid, ArrayRecord(shared), num_rounds=2)


run_simulation(server, client, num_supernodes=5)
