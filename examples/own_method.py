# SPDX-License-Identifier: Apache-2.0
"""A method written here: FedDyn (Acar et al. 2021), under a plan that keeps the norms at home."""

from dataclasses import replace

import torch
from sklearn.datasets import load_digits
from transformers import ViTConfig, ViTForImageClassification

import fedplan as fp
from fedplan.tensors.riders import rider


def feddyn(alpha):
    def dynamic(fit):
        def fit_with_dual(job):
            dual = {k: job.memory.get(rider(k, "dual"), 0 * v) for k, v in job.start.items()}

            def correct(param, value, gradient):
                gradient += alpha * (value - job.start[param.key]) - dual[param.key]

            done = fit(replace(job, adjust=(*job.adjust, correct)))
            end = fp.models.take(job.model, job.roles)
            new = {rider(k, "dual"): dual[k] - alpha * (end[k] - job.start[k]) for k in dual}
            return replace(done, memory={**done.memory, **new})

        return fit_with_dual

    def server(old, mean, memory):
        dual = memory.get("dual", 0 * mean) - alpha * (mean - old)
        return mean - dual / alpha, {"dual": dual}

    plan = fp.parse("chain(share(), keep(norm))")
    return fp.methods.Method(plan, wraps=(dynamic,), server_optimiser=server)


images, labels = load_digits(return_X_y=True)
pixels = torch.tensor(images).reshape(-1, 1, 8, 8).float() / 16
rows = [{"pixel_values": pixels[i], "labels": int(labels[i])} for i in range(600)]
clients = {str(i): [row for row in rows if row["labels"] // 2 == i] for i in range(5)}
size = {"image_size": 8, "patch_size": 2, "num_channels": 1, "hidden_size": 48, "num_labels": 10}
model = ViTForImageClassification(ViTConfig(**size, num_hidden_layers=2, intermediate_size=64))
run = fp.simulate(feddyn(0.1), model, clients, rounds=2, train={"optimiser": "sgd", "rate": 0.1})
print(run.metrics.to_pandas())
