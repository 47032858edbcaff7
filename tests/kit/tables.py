# SPDX-License-Identifier: Apache-2.0
"""Small tables of every task, studies of them, and what their examples hold."""

from __future__ import annotations

import hashlib
import io
import json
from collections import Counter
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.csv
import pyarrow.parquet
import pytest
import torch
import transformers as hf
from PIL import Image

from fedplan.data.examples import Examples, MaskedTokens, SeededExamples
from fedplan.studies.schema import Study, study_from_dict
from fedplan.tensors.named import digest

KINDS = (
    "text-classification",
    "multi-label",
    "regression",
    "token-classification",
    "image-classification",
    "image-text",
    "causal-lm",
    "masked-lm",
    "seq2seq-lm",
    "instruction",
)
LANGUAGE = ("causal-lm", "masked-lm", "seq2seq-lm", "instruction")
"""The kinds whose answers are tokens: a label is for who divides by it."""
TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{{ '[SEP]' if message['role'] == 'assistant' else ' ' }}{% endfor %}"
)
RARER = ("multi-label", "regression", "seq2seq-lm", "instruction")
"""Kinds that share all their code with others: by day they go some of the ways."""
WORDS = ["cat", "dog", "sat", "ran", "on", "mat", "the", "a", "hen", "egg"]
PETS = ["cat", "dog", "hen"]
MOODS = ["calm", "wild", "sad"]
SITES = ["north", "south", "east"]
Row = dict[str, Any]


def cases(ways: Iterable[str], day: Collection[str]) -> list[Any]:
    """Every kind with every way; the rarer kinds by day with some of them, by night with all."""
    return [
        pytest.param(kind, way, marks=[pytest.mark.nightly] if late else [])
        for kind in KINDS
        for way in ways
        for late in [kind in RARER and way not in day]
    ]


def tokenizer(folder: Path) -> str:
    """A tokenizer of few words, with every special token."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    made = hf.BertTokenizer(vocab={word: i for i, word in enumerate(words)})
    made.chat_template = TEMPLATE
    made.save_pretrained(folder / "tokenizer")
    return str(folder / "tokenizer")


def row(number: int, **changed: Any) -> Row:
    """A row of all columns, that follows from its number."""
    draw = np.random.default_rng(number)
    words = [WORDS[i] for i in draw.integers(0, len(WORDS), 3 + number % 9)]
    picture = io.BytesIO()
    Image.fromarray(draw.integers(0, 256, (4, 4, 3), dtype="uint8")).save(picture, "PNG")
    made = {
        "text": " ".join(words),
        "words": words,
        "tags": ["B-pet" if word in PETS else "O" for word in words],
        "mood": MOODS[draw.integers(0, 3)],
        "site": SITES[draw.integers(0, 3)],
        "fold": int(draw.integers(1, 4)),
        "picture": picture.getvalue(),
        "pets": sorted({word for word in words if word in PETS}),
        "degree": len(words) + 0.5,
        "ask": words[0],
    }
    return {**made, **changed}


def written(rows: list[Row], file: Path) -> str:
    """A file of these rows, in the form that its name says."""
    names = list(dict.fromkeys(name for each in rows for name in each))
    plain = [{n: v for n, v in each.items() if n != "picture"} for each in rows]
    flat = [{n: v for n, v in each.items() if not isinstance(v, list | bytes)} for each in rows]
    if file.suffix == ".parquet":
        table = pyarrow.Table.from_pylist(rows)
        pyarrow.parquet.write_table(table, file)
    elif file.suffix == ".csv":
        pyarrow.csv.write_csv(pyarrow.Table.from_pylist([_texts(each) for each in flat]), file)
    elif file.suffix == ".npz":
        columns = [n for n in names if not isinstance(rows[0].get(n), list | bytes)]
        np.savez(file, **{n: np.array([each[n] for each in flat]) for n in columns})
    else:
        file.write_text("\n".join(map(json.dumps, plain)))
    return str(file)


def _texts(each: Row) -> Row:
    return {name: str(value) for name, value in each.items()}


def study(kind: str, tokenizer: str, **sections: Any) -> Study:
    """A study of such a table: what is said of a section comes on top."""
    columns: dict[str, Row] = {
        "text-classification": {"input": "text", "label": "mood", "labels": MOODS},
        "multi-label": {"input": "text", "label": "pets", "labels": PETS},
        "regression": {"input": "text", "label": "degree"},
        "token-classification": {"input": "words", "label": "tags", "labels": ["O", "B-pet"]},
        "image-classification": {"input": "picture", "label": "mood", "labels": MOODS},
        "image-text": {"input": "picture", "label": "mood", "labels": MOODS},
        "causal-lm": {"input": "text", "label": "mood"},
        "masked-lm": {"input": "text", "label": "mood"},
        "seq2seq-lm": {"input": "text ask", "label": "mood"},
        "instruction": {"input": "ask text", "label": "mood"},
    }
    said: Row = {
        "model": {"type": "bert"},
        "task": {
            "kind": kind,
            "tokenizer": tokenizer if "image" not in kind else "",
            "max_length": 8,
            "image_size": 4,
            **columns[kind],
        },
        "method": {"plan": "share()"},
        "train": {"steps": 1, "batch_size": 4},
    }
    for name, section in sections.items():
        said[name] = {**said.get(name, {}), **section}
    return study_from_dict(said)


def held(examples: Examples) -> Counter[str]:
    """Each example by what a batch of it alone holds; of masks, those of two turns."""
    turns = (
        [examples.with_seed(seed) for seed in (0, 5)]
        if isinstance(examples, SeededExamples)
        else []
    )
    return Counter(
        "".join(_digest(each, number) for each in turns or [examples])
        for number in range(len(examples))
    )


def seen(examples: Examples) -> Counter[str]:
    """Each example by what it holds, whatever tokens are hidden."""
    return held(examples.blocks if isinstance(examples, MaskedTokens) else examples)


def _digest(examples: Examples, number: int) -> str:
    batch = examples.batch(torch.tensor([number]))
    words = (f"{name} {digest(tensor)}" for name, tensor in sorted(batch.items()))
    return hashlib.sha256(" ".join(words).encode()).hexdigest()
