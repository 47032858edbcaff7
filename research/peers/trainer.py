# SPDX-License-Identifier: Apache-2.0
"""examples/trainer.py in Flower. Query and key still travel, and nothing proves that they rest."""

import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

RESTING = ("attention.self.query.", "attention.self.key.")


def load_data(seed):
    words = torch.randint(5, 50, (24, 8), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": row, "labels": int(row[0] > 25)} for row in words]


def new_model():
    size = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return BertForSequenceClassification(BertConfig(**size, intermediate_size=64))


def trainer_of(model, rows):
    said = TrainingArguments(max_steps=6, learning_rate=1e-3, use_cpu=True)
    return Trainer(model, said, train_dataset=rows, eval_dataset=rows)


client = ClientApp()


@client.train()
def train(message, context):
    model, rows = new_model(), load_data(context.node_config["partition-id"] + 1)
    model.load_state_dict(message.content["arrays"].to_torch_state_dict(), strict=False)
    if "head" in context.state:
        model.classifier.load_state_dict(context.state["head"].to_torch_state_dict())
    if message.content["config"]["server-round"] > 1:
        for name, param in model.named_parameters():
            param.requires_grad = not any(part in name for part in RESTING)
    done = trainer_of(model, rows).train()
    context.state["head"] = ArrayRecord(model.classifier.state_dict())
    shared = {n: v for n, v in model.state_dict().items() if not n.startswith("classifier.")}
    metrics = MetricRecord({"loss": done.training_loss, "num-examples": len(rows)})
    records = {"arrays": ArrayRecord(shared), "metrics": metrics}
    return Message(RecordDict(records), reply_to=message)


server = ServerApp()


@server.main()
def main(grid, context):
    model = new_model()

    def evaluate(server_round, arrays):
        model.load_state_dict(arrays.to_torch_state_dict(), strict=False)
        return MetricRecord({"loss": trainer_of(model, load_data(3)).evaluate()["eval_loss"]})

    strategy = FedAvg(fraction_evaluate=0.0)
    strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=3, evaluate_fn=evaluate)


run_simulation(server, client, num_supernodes=2)
