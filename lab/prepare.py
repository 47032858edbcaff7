# SPDX-License-Identifier: Apache-2.0
"""Prepare the studies: MedQuAD with a split, PACS and CIFAR-10 as the bridge left them, a small ViT.

They go to a folder outside the repository: the licences of the data do not let us copy them.
"""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch.nn.functional import adaptive_avg_pool2d, cross_entropy
from transformers import ViTConfig, ViTForImageClassification

CIFAR = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
ANSWERS = 200
"""Answers of each institute, to train on and to test on; where privacy takes its share, MORE."""
MORE = 400
SHOTS = 32
"""Pictures of each class in each domain; a client trains on half of what it has."""


def medquad(data: Path, types: slice = slice(8), most: int = ANSWERS) -> pd.DataFrame:
    """The answers to the most frequent types of question; a quarter of the documents test.

    The two largest institutes would be two thirds of a small sample, so of each so many are kept.
    """
    table = pd.read_parquet(data / "text" / "medquad_answered.parquet")
    table = table[table.qtype.isin(table.qtype.value_counts().index[types])].copy()
    documents = table.collection.astype(str) + "/" + table.doc_id.astype(str)
    marks = [int(hashlib.sha256(str(each).encode()).hexdigest()[:8], 16) for each in documents]
    table["split"] = ["test" if mark % 4 == 0 else "train" for mark in marks]
    table["institute"] = table.collection.str.replace(r"^\d+_|_QA.*$", "", regex=True)
    kept = table.sample(frac=1, random_state=0).groupby(["institute", "split"]).head(most)
    return kept[["institute", "qtype", "answer", "split"]]


def medquad_more(data: Path) -> pd.DataFrame:
    """The same, and more of them."""
    return medquad(data, most=MORE)


def medquad_rare(data: Path) -> pd.DataFrame:
    """The answers to six rarer types of question: others than those above, to choose rates on."""
    return medquad(data, slice(8, 14), most=MORE)


def pacs(data: Path) -> pd.DataFrame:
    """The half of PACS that the bridge has not seen, so many of each class and domain."""
    pictures = pd.read_parquet(data / "pacs" / "pacs_96px.parquet")
    split = pd.read_csv(data / "dinov2-minilm-bridge" / "pacs_split.csv")
    table = pictures.merge(split, on=["domain", "label", "file"], validate="one_to_one")
    table = table[table.split == "federated"].drop(columns="split")
    shuffled = table.sample(frac=1, random_state=0)
    kept = shuffled.groupby(["domain", "label"]).head(SHOTS + SHOTS // 4)
    place = kept.groupby(["domain", "label"]).cumcount()
    kept = kept.assign(split=["train" if n < SHOTS else "test" for n in place])
    return kept[["domain", "label", "jpeg", "split"]]


def cifar(data: Path) -> pd.DataFrame:
    """The test rows of CIFAR-10, which the bridge has not seen, with the names of their classes."""
    table = pd.read_parquet(data / "cifar10" / "cifar10_6k_lossless.parquet")
    table = table[table.split == "test"]
    return table.assign(label=[CIFAR[int(label)] for label in table.label])


TABLES = (medquad, medquad_more, medquad_rare, pacs, cifar)


def clothes(data: Path, out: Path) -> None:
    """A small ViT that has seen public pictures of clothes, of the size of scikit-learn's digits."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    held = np.load(data / "fashion-mnist" / "fashion_mnist_24k.npz")
    pictures = torch.tensor(held["x_train"]).float()[:, None] / 255
    pictures = adaptive_avg_pool2d(pictures, 8).repeat(1, 3, 1, 1) * 2 - 1
    labels = torch.tensor(held["y_train"]).long()
    sizes = {"image_size": 8, "patch_size": 2, "hidden_size": 32, "intermediate_size": 64}
    depth = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_labels": 10}
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = ViTForImageClassification(ViTConfig(**sizes, **depth, **still))
    optimiser = torch.optim.AdamW(model.parameters(), 1e-3)
    for _ in range(800):
        rows = torch.randint(len(pictures), (64,))
        optimiser.zero_grad()
        cross_entropy(model(pictures[rows]).logits, labels[rows]).backward()
        optimiser.step()
    model.save_pretrained(out / "vit")


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("data", type=Path, help="the folder that holds the data sets")
    ask.add_argument("out", type=Path, help="the folder to write to")
    asked = ask.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    for name, make in {each.__name__: each for each in TABLES}.items():
        table = make(asked.data)
        table.to_parquet(asked.out / f"{name}.parquet", index=False)
        print(name, len(table), dict(table.split.value_counts()))
    clothes(asked.data, asked.out)


if __name__ == "__main__":
    main()
