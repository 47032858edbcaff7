# SPDX-License-Identifier: Apache-2.0
"""Tiny models and synthetic client data to attack.

The tokens of one client are uniform and distinct, so that no guess is better than chance.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedplan import seeds
from fedplan.data.examples import ImageExamples, RaggedArray, TokenSequences
from fedplan.models.dual_encoder import DualEncoder
from fedplan.tensors.devices import fork_rng_state

START_TOKEN = 1
"""First token of every text."""
FIRST_WORD = 4
"""First token that is a word; those before are special."""
CLASSES = ("cat", "dog", "fox")


def text_classifier(
    *,
    vocabulary: int,
    width: int,
    blocks: int,
    length: int,
    spread: float,
    dropout: float = 0.0,
    number: int = 0,
    classes: int = 2,
) -> nn.Module:
    """Make a BERT text classifier with random weights, in eval mode.

    vocabulary: number of tokens; width: hidden size; blocks: number of layers; length: longest
    text; spread: standard deviation of the initial weights; dropout: probability; number: seed;
    classes: number of labels. The same arguments give the same weights; the global random state is
    kept.
    """
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
        num_labels=classes,
    )
    return _random_model(transformers.BertForSequenceClassification, config, number)


def image_classifier() -> DualEncoder:
    """A randomly initialized CLIP that classifies images by the texts of CLASSES."""
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
    backbone = _random_model(transformers.CLIPModel, config)
    return DualEncoder(backbone, ids, torch.ones_like(ids), names=CLASSES, lead=4).eval()


def _random_model(make: Any, config: Any, number: int = 0) -> nn.Module:
    with fork_rng_state(seed=seeds.seed("victims", "model", number)):
        return make(config).eval()


def random_texts(number: int, examples: int, *, vocabulary: int, length: int) -> TokenSequences:
    """Texts of client `number`: `examples` texts of `length` tokens, with random labels 0 or 1.

    Each starts with START_TOKEN. Words are tokens from FIRST_WORD to `vocabulary` - 1, without
    replacement: none occurs twice in a client's texts, so the vocabulary must have enough. The same
    arguments give the same texts.
    """
    draw = seeds.generator("victims", "texts", number)
    words = (
        torch.randperm(vocabulary - FIRST_WORD, generator=draw)[: examples * (length - 1)]
        + FIRST_WORD
    )
    return _sequences(words.view(examples, -1), draw)


def population_texts(
    population: int,
    number: int,
    examples: int,
    *,
    vocabulary: int,
    length: int,
    classes: int = 2,
) -> TokenSequences:
    """Texts of client `number` of a population: `examples` texts of `length` tokens, random labels.

    Labels are below `classes`. Each text starts with START_TOKEN. Words follow Zipf-like frequencies, with the vocabulary in the
    population's own random order. The same arguments give the same texts.
    """
    order = torch.randperm(
        vocabulary - FIRST_WORD, generator=seeds.generator("victims", "people", population)
    )
    often = torch.arange(1, vocabulary - FIRST_WORD + 1) ** -1.5
    draw = seeds.generator("victims", "spoken", population, number)
    words = (
        order[often.multinomial(examples * (length - 1), replacement=True, generator=draw)]
        + FIRST_WORD
    )
    return _sequences(words.view(examples, -1), draw, classes)


def _sequences(words: Tensor, draw: torch.Generator, classes: int = 2) -> TokenSequences:
    ids = torch.cat([torch.full((len(words), 1), START_TOKEN), words], 1)
    labels = torch.randint(classes, (len(words),), generator=draw)
    return TokenSequences(RaggedArray.from_lists(ids.tolist()), 0, labels)


def distinct_words(examples: TokenSequences) -> set[int]:
    """All words of a client's texts, without special tokens."""
    return {token for token in cast("list[int]", examples.ids.flat.tolist()) if token >= FIRST_WORD}


def random_images(number: int, examples: int) -> ImageExamples:
    """Images of client `number`: random pixels and labels."""
    draw = seeds.generator("victims", "pictures", number)
    pixels = torch.randint(0, 256, (examples, 3, 16, 16), generator=draw, dtype=torch.uint8)
    labels = torch.randint(len(CLASSES), (examples,), generator=draw)
    return ImageExamples(pixels, labels, torch.full((3, 1, 1), 0.5), torch.full((3, 1, 1), 0.5))


def classification_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Mean cross entropy of a batch, for models that return logits or an output with logits."""
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
    output: Any = model(**inputs)
    logits = cast("Tensor", output if isinstance(output, Tensor) else output.logits)
    return cross_entropy(logits, batch["labels"])
