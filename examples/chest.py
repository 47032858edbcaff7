# SPDX-License-Identifier: Apache-2.0
"""Chest images with several findings each: two hospitals, whose devices differ, keep their norms.

The images are drawn: two dark lungs, and for each finding a bright mark at its usual place.
"""

import datasets
import numpy as np
import torch
from PIL import Image
from transformers import ViTConfig, ViTForImageClassification

import fedplan as fp

FINDINGS = {"effusion": (12, 4), "nodule": (5, 11), "cardiomegaly": (9, 8)}


def chest(draw, findings, device):
    image = 0.6 + 0.05 * draw.standard_normal((16, 16))
    image[3:14, 2:7] -= 0.35
    image[3:14, 9:14] -= 0.35
    for name in findings:
        row, column = FINDINGS[name]
        image[row - 1 : row + 2, column - 1 : column + 2] += 0.4
    image = 0.3 + 0.5 * (1 - image) if device == "inverted" else image
    return Image.fromarray((255 * image.clip(0, 1)).astype(np.uint8))


def table(seed, count, device):
    draw, rows = np.random.default_rng(seed), []
    for _ in range(count):
        found = [name for name in FINDINGS if draw.random() < 0.4]
        rows.append({"image": chest(draw, found, device), "findings": found})
    return datasets.Dataset.from_list(rows)


hospitals = {
    name: {"train": table(seed, 120, device), "test": table(seed + 10, 60, device)}
    for seed, (name, device) in enumerate({"north": "plain", "south": "inverted"}.items())
}
torch.manual_seed(0)
size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
config = ViTConfig(
    image_size=16, patch_size=4, intermediate_size=64, num_labels=len(FINDINGS), **size
)
run = fp.simulate(
    fp.methods.fedbn(),
    ViTForImageClassification(config),
    hospitals,
    task=fp.data.make_task(
        "image-multi-label",
        columns="image",
        label="findings",
        labels=list(FINDINGS),
        image_size=16,
    ),
    train=fp.TrainConfig(rounds=6, epochs=4, lr=3e-3, batch_size=20),
)
print(run.metrics.to_pandas()[["round", "loss", "personal.f1_micro", "upload_bytes"]])
