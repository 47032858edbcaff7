# SPDX-License-Identifier: Apache-2.0
"""Named entities: three wards mark drugs and complaints in notes; each keeps its own head.

The notes are made up. Needs the extra `tokens`, for scores of entities.
"""

from tempfile import mkdtemp

import datasets
import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertForTokenClassification, PreTrainedTokenizerFast

import fedplan as fp

TAGS = ["O", "B-DRUG", "B-COMPLAINT", "I-COMPLAINT"]
DRUGS = ["aspirin", "heparin", "insulin", "codeine", "digoxin", "warfarin"]
COMPLAINTS = ["chest pain", "short breath", "head ache", "dry cough", "back pain", "mild fever"]
NOTES = [
    "patient reports {c} since monday and takes {d}",
    "{c} after two days of {d} , dose halved",
    "no {c} today , {d} continued",
]


def notes(seed, count):
    draw, rows = np.random.default_rng(seed), []
    for _ in range(count):
        words, tags = [], []
        for word in str(draw.choice(NOTES)).split():
            kind, names = {"{c}": ("COMPLAINT", COMPLAINTS), "{d}": ("DRUG", DRUGS)}.get(
                word, ("", [word])
            )
            for place, piece in enumerate(str(draw.choice(names)).split()):
                words.append(piece)
                tags.append(f"{'I' if place else 'B'}-{kind}" if kind else "O")
        rows.append({"words": words, "tags": tags})
    return datasets.Dataset.from_list(rows)


def make_model(folder):
    """Write a tiny untrained BERT and its tokenizer, which knows the words of the notes."""
    words = sorted({word for row in notes(0, 300) for word in row["words"]})
    special = {
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "cls_token": "[CLS]",
        "sep_token": "[SEP]",
    }
    numbers = {word: number for number, word in enumerate([*special.values(), *words])}
    inner = Tokenizer(models.WordLevel(numbers, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=inner, **special).save_pretrained(folder)
    torch.manual_seed(0)
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = BertConfig(vocab_size=len(numbers), intermediate_size=64, num_labels=len(TAGS), **size)
    return BertForTokenClassification(config)


folder = mkdtemp()
model = make_model(folder)
wards = {
    name: {"train": notes(seed, 60), "test": notes(seed + 10, 20)}
    for seed, name in enumerate(["north", "south", "east"])
}
run = fp.simulate(
    fp.methods.fedper(),
    model,
    wards,
    task=fp.data.make_task(
        "token-classification", columns="words", label="tags", labels=TAGS, model=folder
    ),
    train=fp.TrainConfig(rounds=6, epochs=1, lr=3e-3, batch_size=12),
)
print(run.metrics.to_pandas()[["round", "loss", "personal.f1", "upload_bytes"]])
