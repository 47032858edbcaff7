# SPDX-License-Identifier: Apache-2.0
"""Prepare the studies: MedQuAD with a split, PACS and CIFAR-10 as the bridge left them, pictures
that each client sees turned, a small ViT, a small BERT.

They go to a folder outside the repository: the licences of the data do not let us copy them.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from datasets import Dataset
from PIL import Image
from tokenizers import BertWordPieceTokenizer
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d, cross_entropy
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertTokenizerFast,
    ViTConfig,
    ViTForImageClassification,
)

from fedplan.data.partition import Partition, partition_table

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


def pacs(data: Path, shots: int = SHOTS) -> pd.DataFrame:
    """The half of PACS that the bridge has not seen, so many of each class and domain."""
    pictures = pd.read_parquet(data / "pacs" / "pacs_96px.parquet")
    split = pd.read_csv(data / "dinov2-minilm-bridge" / "pacs_split.csv")
    table = pictures.merge(split, on=["domain", "label", "file"], validate="one_to_one")
    table = table[table.split == "federated"].drop(columns="split")
    shuffled = table.sample(frac=1, random_state=0)
    kept = shuffled.groupby(["domain", "label"]).head(shots + shots // 4)
    place = kept.groupby(["domain", "label"]).cumcount()
    kept = kept.assign(split=["train" if n < shots else "test" for n in place])
    return kept[["domain", "label", "jpeg", "split"]]


def pacs_more(data: Path) -> pd.DataFrame:
    """Twice as many of each class and domain, all to train on: clients hold out what they test.

    The columns `out_photo` and so on set one domain aside as a common test.
    """
    table = pacs(data, 2 * SHOTS).assign(split="train")
    marks = {
        f"out_{name}": ["test" if each == name else "train" for each in table.domain]
        for name in sorted(table.domain.unique())
    }
    return table.assign(**marks)


def cifar(data: Path) -> pd.DataFrame:
    """The test rows of CIFAR-10, which the bridge has not seen, with the names of their classes."""
    table = pd.read_parquet(data / "cifar10" / "cifar10_6k_lossless.parquet")
    table = table[table.split == "test"]
    return table.assign(label=[CIFAR[int(label)] for label in table.label])


def fashion(data: Path) -> dict[str, np.ndarray]:
    """Fashion-MNIST as it is."""
    with np.load(data / "fashion-mnist" / "fashion_mnist_24k.npz", allow_pickle=False) as held:
        return {name: held[name] for name in ("x_train", "y_train", "x_test", "y_test")}


def fashion_few(data: Path) -> dict[str, np.ndarray]:
    """The first rows of Fashion-MNIST: cut by a number that is public, as privacy asks."""
    return {name: held[: FEW[name[2:]]] for name, held in fashion(data).items()}


FEW = {"train": 3000, "test": 500}
"""Of Fashion-MNIST: the rows that clients divide. The small ViT of that size has seen others."""


def cifar_arrays(data: Path) -> dict[str, np.ndarray]:
    """CIFAR-10 as arrays."""
    table = pd.read_parquet(data / "cifar10" / "cifar10_6k_lossless.parquet")
    found = dict[str, np.ndarray]()
    for split in ("train", "test"):
        own = table[table.split == split]
        found[f"x_{split}"] = np.stack([np.array(Image.open(BytesIO(p))) for p in own.webp])
        found[f"y_{split}"] = own.label.to_numpy(dtype=np.int64)
    return found


def turned(
    arrays: dict[str, np.ndarray], alpha: float, seed: int, out: Path, *, clients: int
) -> None:
    """Pictures that each client sees turned otherwise, by client % 4 quarters, in a file by seed.

    Labels are divided by Dirichlet shares, or evenly where `alpha` is 0. Of the common test each
    quarter of the rows is turned by as many quarters: the federation's model must know all four.
    """
    marks = [hashlib.sha256(picture.tobytes()).hexdigest() for picture in arrays["x_train"]]
    table = Dataset.from_dict({"x": marks, "y": arrays["y_train"].tolist()})
    kind = Partition("dirichlet", clients, alpha=alpha, min_examples=LEAST)
    rows = partition_table(
        table, kind if alpha else Partition("iid", clients), seed=seed, label="y"
    )
    pictures, whose = arrays["x_train"].copy(), np.empty(len(arrays["x_train"]), dtype="<U9")
    for number, (client, own) in enumerate(rows.items()):
        pictures[own], whose[own] = np.rot90(pictures[own], number % 4, (1, 2)), client
    test = arrays["x_test"].copy()
    for quarter in range(4):
        test[quarter::4] = np.rot90(test[quarter::4], quarter, (1, 2))
    # The test has the column too, so that both splits are one table; it means nothing there.
    columns = {"client_train": whose, "client_test": np.full(len(test), "")}
    held = arrays | {"x_train": pictures, "x_test": test} | columns
    out.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(out / f"{seed}.npz", **held)
    print(out.name, seed, {client: len(own) for client, own in rows.items()})


CLIENTS, LEAST, SEEDS = 10, 50, 8
"""Of turned pictures: clients, the fewest rows of each, and how many divisions."""
TURNED = {"fashion": fashion, "few": fashion_few, "cifar": cifar_arrays}
FEWER = {"few": 6}
"""Where there are other than so many clients."""
ALPHAS = {"0.1": 0.1, "0.3": 0.3, "iid": 0.0}


def all_turned(data: Path, out: Path, only: list[str]) -> None:
    """The files of turned pictures: `turned-fashion-0.3/0.npz` and so on."""
    for name, make in TURNED.items():
        for text, alpha in ALPHAS.items():
            if only and f"turned-{name}-{text}" not in only:
                continue
            arrays = make(data)
            for seed in range(SEEDS):
                place, clients = out / f"turned-{name}-{text}", FEWER.get(name, CLIENTS)
                turned(arrays, alpha, seed, place, clients=clients)


TABLES = (medquad, medquad_more, medquad_rare, pacs, pacs_more, cifar)


def clothes(data: Path, out: Path) -> None:
    """A small ViT that has seen public pictures of clothes, of the size of scikit-learn's digits."""
    held = fashion(data)
    seen = adaptive_avg_pool2d(torch.tensor(held["x_train"]).float()[:, None] / 255, 8)
    sizes = {"image_size": 8, "patch_size": 2, "hidden_size": 32, "intermediate_size": 64}
    sees(seen, held["y_train"], {**sizes, "num_hidden_layers": 4}, out / "vit")


def upright(data: Path, out: Path) -> None:
    """A small ViT that has seen public pictures of clothes upright, others than clients divide."""
    held = {name: rows[FEW["train"] :] for name, rows in fashion(data).items()}
    seen = torch.tensor(held["x_train"]).float()[:, None] / 255
    sizes = {"image_size": 28, "patch_size": 7, "hidden_size": 48, "intermediate_size": 96}
    sees(seen, held["y_train"], {**sizes, "num_hidden_layers": 2}, out / "upright")


def sees(pictures: Tensor, answers: np.ndarray, sizes: dict[str, int], out: Path) -> None:
    """Make a ViT that tells pictures apart, and save it."""
    torch.manual_seed(0)
    pictures, labels = pictures.repeat(1, 3, 1, 1) * 2 - 1, torch.tensor(answers).long()
    depth = {"num_attention_heads": 4, "num_labels": 10}
    model = ViTForImageClassification(ViTConfig(**sizes, **depth, **STILL))
    teach(model, labels, lambda rows: model(pictures[rows]).logits, steps=800)
    model.save_pretrained(out)


def teach(
    model: nn.Module, labels: Tensor, answers: Callable[[Tensor], Tensor], *, steps: int
) -> None:
    """Train a model on all rows in one place."""
    torch.set_num_threads(1)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for _ in range(steps):
        rows = torch.randint(len(labels), (64,))
        optimizer.zero_grad()
        cross_entropy(answers(rows), labels[rows]).backward()
        optimizer.step()


STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
WORDS, READ = 4000, 32
"""Of the small BERT: how many pieces of words it knows, and how many of them it reads."""


def posts(data: Path, out: Path) -> None:
    """A small BERT that has told public posts' newsgroups apart, with a vocabulary of its own."""
    torch.manual_seed(0)
    table = pd.read_parquet(data / "text" / "20news_bydate.parquet")
    table = table[table.split == "train"]
    words = vocabulary(table.body.tolist())
    read = words(table.body.tolist(), truncation=True, max_length=READ, padding="max_length")
    tokens, seen = torch.tensor(read["input_ids"]), torch.tensor(read["attention_mask"])
    labels = torch.tensor(pd.factorize(table.newsgroup)[0])
    sizes = {"vocab_size": len(words), "hidden_size": 48, "intermediate_size": 96}
    depth = {"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": READ}
    model = BertForSequenceClassification(BertConfig(**sizes, **depth, **STILL, num_labels=20))
    teach(model, labels, lambda r: model(tokens[r], attention_mask=seen[r]).logits, steps=1200)
    model.bert.save_pretrained(out / "bert")  # its head is of no use to others
    words.save_pretrained(out / "bert")


def vocabulary(texts: list[str]) -> BertTokenizerFast:
    """Pieces of words, as texts have them."""
    made = BertWordPieceTokenizer()
    made.train_from_iterator(texts, vocab_size=WORDS, show_progress=False)
    return BertTokenizerFast(vocab=made.get_vocab(), model_max_length=READ)


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("data", type=Path, help="the folder that holds the data sets")
    ask.add_argument("out", type=Path, help="the folder to write to")
    ask.add_argument("--only", nargs="+", default=[], help="the names of what to make")
    asked = ask.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    for name, make in {each.__name__: each for each in TABLES}.items():
        if asked.only and name not in asked.only:
            continue
        table = make(asked.data)
        table.to_parquet(asked.out / f"{name}.parquet", index=False)
        print(name, len(table), dict(table.split.value_counts()))
    all_turned(asked.data, asked.out, asked.only)
    for name, make in {"vit": clothes, "upright": upright, "bert": posts}.items():
        if not asked.only or name in asked.only:
            make(asked.data, asked.out)


if __name__ == "__main__":
    main()
