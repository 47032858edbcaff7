# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face Trainer that follows a plan: query and key rest after a round, heads stay home."""

from tempfile import mkdtemp

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import fedplan as fp
from fedplan.methods import Method
from fedplan.parts import head, key, query


def trainer(model, rows, marked):
    said = TrainingArguments(mkdtemp(), max_steps=6, learning_rate=1e-3, use_cpu=True)
    return Trainer(model, said, train_dataset=rows)


plan = fp.chain(fp.share(), fp.when(fp.after(1), fp.freeze(query | key)), fp.keep(head))
size = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
model = BertForSequenceClassification(BertConfig(**size, intermediate_size=64))


def table(seed):
    words = torch.randint(5, 50, (24, 8), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": row, "labels": int(row[0] > 25)} for row in words]


clients = {"north": table(1), "south": table(2)}
method = Method(plan, loop=fp.attach(trainer))
train, options = fp.TrainConfig(rounds=3), fp.RunOptions(folder=mkdtemp() + "/run")
run = fp.simulate(method, model, clients, test=table(3), train=train, options=options)
print(run.metrics.to_pandas()[["round", "loss", "upload_bytes", "global.loss"]])
faults, checked = fp.verify_run(run.folder)
print(faults or checked)
