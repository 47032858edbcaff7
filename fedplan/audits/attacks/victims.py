# SPDX-License-Identifier: Apache-2.0
"""Victims: tiny models made from configurations, and clients whose rows are known, to be attacked.

Tokens of one client are drawn evenly and never twice, so that no guess is better than chance.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedplan import seeds
from fedplan.data.examples import Images, Ragged, Sequences
from fedplan.models.dual import Dual
from fedplan.tensors.devices import forked

FIRST = 1
"""The token that every text begins with."""
WORDS = 4
"""The first token that is a word; those before are special."""
CLASSES = ("cat", "dog", "fox")


def reader(
    *,
    vocabulary: int,
    width: int,
    blocks: int,
    length: int,
    spread: float,
    dropout: float = 0.0,
    number: int = 0,
) -> nn.Module:
    """A BERT that classifies texts, as it is drawn; the same for the same number."""
    import transformers

    config = transformers.BertConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=blocks,
        num_attention_heads=4,
        max_position_embeddings=length,
        initializer_range=spread,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    return _drawn(transformers.BertForSequenceClassification, config, number)


def viewer() -> Dual:
    """A CLIP that classifies pictures by the texts of their classes."""
    import transformers

    tower = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    tower |= {"num_attention_heads": 2}
    # The last token has the highest number: CLIP takes its text's end from there.
    special = {"vocab_size": 64, "bos_token_id": 62, "eos_token_id": 63, "pad_token_id": 63}
    config = transformers.CLIPConfig(
        text_config={**tower, **special, "max_position_embeddings": 16},
        vision_config={**tower, "image_size": 16, "patch_size": 4},
        projection_dim=32,
    )
    ids = torch.tensor([[62, 4, 5, 6, 7, 8 + i, 63] for i in range(len(CLASSES))])
    backbone = _drawn(transformers.CLIPModel, config)
    return Dual(backbone, ids, torch.ones_like(ids), names=CLASSES, lead=4).eval()


def _drawn(make: Any, config: Any, number: int = 0) -> nn.Module:
    with forked(seed=seeds.seed("victims", "model", number)):
        return make(config).eval()


def texts(number: int, rows: int, *, vocabulary: int, length: int) -> Sequences:
    """A client's texts; no word of them comes twice."""
    draw = seeds.generator("victims", "texts", number)
    words = torch.randperm(vocabulary - WORDS, generator=draw)[: rows * (length - 1)] + WORDS
    return _sequences(words.view(rows, -1), draw)


def spoken(people: int, number: int, rows: int, *, vocabulary: int, length: int) -> Sequences:
    """Texts of a client of some people: each has words that it uses more often than others."""
    order = torch.randperm(
        vocabulary - WORDS, generator=seeds.generator("victims", "people", people)
    )
    often = torch.arange(1, vocabulary - WORDS + 1) ** -1.5
    draw = seeds.generator("victims", "spoken", people, number)
    words = order[often.multinomial(rows * (length - 1), replacement=True, generator=draw)] + WORDS
    return _sequences(words.view(rows, -1), draw)


def _sequences(words: Tensor, draw: torch.Generator) -> Sequences:
    ids = torch.cat([torch.full((len(words), 1), FIRST), words], 1)
    labels = torch.randint(2, (len(words),), generator=draw)
    return Sequences(Ragged.of(ids.tolist()), 0, labels)


def words_in(rows: Sequences) -> set[int]:
    """The words of a client's texts."""
    return {token for token in cast("list[int]", rows.ids.flat.tolist()) if token >= WORDS}


def pictures(number: int, rows: int) -> Images:
    """A client's pictures: noise, each of some class."""
    draw = seeds.generator("victims", "pictures", number)
    pixels = torch.randint(0, 256, (rows, 3, 16, 16), generator=draw, dtype=torch.uint8)
    labels = torch.randint(len(CLASSES), (rows,), generator=draw)
    return Images(pixels, labels, torch.full((3, 1, 1), 0.5), torch.full((3, 1, 1), 0.5))


def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """The mean cross entropy of a batch."""
    inputs = {name: each for name, each in batch.items() if name != "labels"}
    output: Any = model(**inputs)
    logits = cast("Tensor", output if isinstance(output, Tensor) else output.logits)
    return cross_entropy(logits, batch["labels"])
