# SPDX-License-Identifier: Apache-2.0
"""A method written here: FedDyn (Acar et al. 2021), and as in FedBN each keeps its norms."""

from dataclasses import replace

from sklearn.datasets import load_digits
from transformers import BertConfig, BertForSequenceClassification

import fedplan as fp
from fedplan.tensors.named import aux_name as aux


def dynamic(fit, alpha=0.1):
    def fit_with_gap(job):
        def correct(param, value, gradient):
            if param.key in gap:  # the paper's dual is alpha times the gap
                gradient += alpha * (value - job.start[param.key] - gap[param.key])

        shared = [p for p, role in job.roles.items() if role is fp.Role.SHARE]
        gap = {p.key: job.memory.get(aux(p.key, "gap"), 0) for p in shared}
        done = fit(replace(job, gradient_hooks=(*job.gradient_hooks, correct)))
        end = fp.models.get_values(job.model, shared)
        return replace(done, memory={aux(k, "gap"): gap[k] + job.start[k] - end[k] for k in gap})

    return fit_with_gap


def server(old, mean, memory):
    gap = memory.get("gap", 0 * mean) + old - mean
    return mean - gap, {"gap": gap}


images, labels = load_digits(return_X_y=True)  # 64 pixels, each a word from 0 to 16
rows = [{"input_ids": images[i].astype(int), "labels": int(labels[i])} for i in range(600)]
clients = {str(i): [row for row in rows if row["labels"] // 2 == i] for i in range(5)}
size = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_labels": 10}
model = BertForSequenceClassification(BertConfig(vocab_size=17, intermediate_size=64, **size))
method = replace(fp.methods.fedbn(), client_hooks=(dynamic,), server_optimizer=server)
run = fp.simulate(method, model, clients, train=fp.TrainConfig(rounds=2, optimizer="sgd", lr=0.1))
print(run.metrics.to_pandas())
