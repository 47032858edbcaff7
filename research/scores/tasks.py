# SPDX-License-Identifier: Apache-2.0
"""Tasks: rows of short texts with labels, drawn by a seed from a folder of data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerBase

from research.prepare import medquad

NONE = -100
"""The label of a token that has none."""
TAGS = ("O", "B-Disease", "I-Disease")


@dataclass(frozen=True)
class Rows:
    """Texts of equal length with their masks; labels are of rows, or of the tokens of rows."""

    ids: Tensor
    mask: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.ids)

    def some(self, places: Tensor) -> Rows:
        return Rows(self.ids[places], self.mask[places], self.labels[places])


@dataclass(frozen=True)
class Task:
    """Rows to train on and rows to test on."""

    name: str
    classes: int
    train: Rows
    test: Rows

    @property
    def tags(self) -> bool:
        """Whether tokens are labelled, not texts."""
        return self.train.labels.ndim == 2


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean over labels."""
    return cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=NONE)


def score_of(logits: Tensor, labels: Tensor, *, tags: bool) -> float:
    """The part of texts that are told right; of tags, F1 over the tokens of diseases."""
    told = logits.argmax(-1)
    if not tags:
        return float((told == labels).double().mean())
    held, said = labels > 0, (told > 0) & (labels != NONE)
    right = int((held & (told == labels)).sum())
    return 2 * right / max(1, int(held.sum() + said.sum()))


def task_named(
    name: str,
    seed: int,
    sizes: tuple[int, int],
    tokens: int,
    tokenizer: PreTrainedTokenizerBase,
    data: Path,
) -> Task:
    """A task with so many rows of each kind."""
    table = _TABLES[name](data)
    random = np.random.default_rng(seed)
    classes = list(TAGS) if "tags" in table else sorted(table.label.unique())
    made = list[Rows]()
    for split, size in zip(("train", "test"), sizes, strict=True):
        held = table[table.split == split]
        drawn = held.iloc[random.permutation(len(held))[:size]]
        made.append(_rows(drawn, classes, tokens, tokenizer))
    return Task(name, len(classes), *made)


def _rows(
    table: pd.DataFrame, classes: Sequence[str], tokens: int, tokenizer: PreTrainedTokenizerBase
) -> Rows:
    tagged = "tags" in table
    texts: list[Any] = [list(each) for each in table.tokens] if tagged else list(table.text)
    found = tokenizer(
        texts, is_split_into_words=tagged, truncation=True, max_length=tokens,
        padding="max_length", return_tensors="pt",
    )  # fmt: skip
    places = {name: place for place, name in enumerate(classes)}
    if not tagged:
        labels = torch.tensor([places[each] for each in table.label])
        return Rows(found["input_ids"], found["attention_mask"], labels)
    labels = torch.full_like(found["input_ids"], NONE)
    for row, tags in enumerate(table.tags):
        for place, word, before in _firsts(found.word_ids(row)):
            labels[row, place] = places[tags[word]] if word != before else NONE
    return Rows(found["input_ids"], found["attention_mask"], labels)


def _firsts(words: Sequence[int | None]) -> list[tuple[int, int, int | None]]:
    """Places of words, with the word before: a word is labelled at its first piece alone."""
    pairs = zip(words, (None, *words[:-1]), strict=True)
    return [(i, word, before) for i, (word, before) in enumerate(pairs) if word is not None]


def _ncbi(data: Path) -> pd.DataFrame:
    table = pd.read_parquet(data / "text" / "bio_ner.parquet")
    return table[table.corpus == "NCBI-disease"]


def _medquad(data: Path) -> pd.DataFrame:
    return medquad(data).rename(columns={"answer": "text", "qtype": "label"})


def _newsgroups(data: Path) -> pd.DataFrame:
    table = pd.read_parquet(data / "text" / "20news_bydate.parquet")
    text = table.subject.str.cat(table.body, sep=". ")
    return table.assign(text=text, label=table.newsgroup)


def _abstracts(data: Path) -> pd.DataFrame:
    """For the pilot alone. It has one split: a quarter tests."""
    table = pd.read_parquet(data / "text" / "medical_tc_test.parquet")
    split = ["test" if place % 4 == 0 else "train" for place in range(len(table))]
    return table.assign(text=table.medical_abstract, label=table.condition_name, split=split)


_TABLES: dict[str, Callable[[Path], pd.DataFrame]] = {
    "ncbi": _ncbi,
    "medquad": _medquad,
    "newsgroups": _newsgroups,
    "abstracts": _abstracts,
}
