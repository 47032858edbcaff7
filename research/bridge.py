# SPDX-License-Identifier: Apache-2.0
"""A small model of pictures and texts: DINOv2-small and six blocks of gte-small, joined by a bridge.

Both towers stay as they are; the bridge is two projections, the text's pooler and a scale. It sees
the half of PACS that is marked for it, and CIFAR-10's rows to train on: no row of any question.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pandas as pd
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize
from transformers import AutoModel, AutoTokenizer

from fedplan.models.folder import image_mean_std, image_tensor
from research.prepare import CIFAR

SIZE, BLOCKS, WIDTH, BATCH = 70, 6, 256, 64
PACS, OTHERS, EPOCHS = 3000, 2000, 12
"""How many pictures of each set, and how often each is seen."""
TEMPLATES = ("a picture of a {}", "an image of a {}", "{}")
DOMAINS = {"photo": "photo", "cartoon": "cartoon", "art_painting": "painting", "sketch": "sketch"}


@dataclass(frozen=True)
class Seen:
    """Pictures as their tower makes them, and for each list of captions which of it is theirs."""

    pooled: Tensor
    captions: tuple[tuple[str, ...], ...]
    which: tuple[Tensor, ...]


class Bridge(nn.Module):
    """All that is trained, by the names that a model of two towers has for it."""

    def __init__(self, vision: int, text: int) -> None:
        super().__init__()
        self.visual, self.textual = (
            nn.Linear(vision, WIDTH, bias=False),
            nn.Linear(text, WIDTH, bias=False),
        )
        self.pooler = nn.Linear(text, text)
        self.scale = nn.Parameter(torch.tensor(2.66))

    def forward(self, pooled: Tensor, first: Tensor) -> Tensor:
        """The logits of pictures over captions."""
        texts = normalize(self.textual(self.pooler(first).tanh()), dim=-1)
        return normalize(self.visual(pooled), dim=-1) @ texts.T * self.scale.exp()

    def held(self) -> dict[str, Tensor]:
        """Its weights as a file has them."""
        return {
            "visual_projection.weight": self.visual.weight.detach(),
            "text_projection.weight": self.textual.weight.detach(),
            "text_model.pooler.dense.weight": self.pooler.weight.detach(),
            "text_model.pooler.dense.bias": self.pooler.bias.detach(),
            "logit_scale": self.scale.detach(),
        }


def written(classes: list[str]) -> Iterator[tuple[str, ...]]:
    for template in TEMPLATES:
        yield tuple(template.format(each.replace("_", " ")) for each in classes)


@torch.no_grad()
def pooled(tower: Any, pictures: list[bytes], source: str) -> Tensor:
    mean, std = image_mean_std(source)
    found = list[Tensor]()
    for start in range(0, len(pictures), BATCH):
        drawings = [
            image_tensor(each, SIZE, cubic=True) for each in pictures[start : start + BATCH]
        ]
        pixels = (torch.stack(drawings).float() / 255 - mean) / std
        found.append(tower(pixels, interpolate_pos_encoding=True).pooler_output)
    return torch.cat(found)


def pacs(data: Path, tower: Any, source: str) -> Seen:
    table = pd.read_parquet(data / "pacs" / "pacs_96px.parquet")
    split = pd.read_csv(data / "dinov2-minilm-bridge" / "pacs_split.csv")
    table = table.merge(split, on=["domain", "label", "file"], validate="one_to_one")
    table = table[table.split == "bridge"].sample(PACS, random_state=0)
    classes, kinds = sorted(table.label.unique()), list(DOMAINS)
    label = torch.tensor([classes.index(each) for each in table.label])
    kind = torch.tensor([kinds.index(each) for each in table.domain])
    both = tuple(f"a {DOMAINS[k]} of a {c}" for k in kinds for c in classes)
    captions = (*written(classes), both)
    which = (*(label for _ in TEMPLATES), kind * len(classes) + label)
    return Seen(pooled(tower, list(table.jpeg), source), captions, which)


def cifar(data: Path, tower: Any, source: str) -> Seen:
    table = pd.read_parquet(data / "cifar10" / "cifar10_6k_lossless.parquet")
    table = table[table.split == "train"].sample(OTHERS, random_state=0)
    label = torch.tensor(table.label.to_numpy(dtype="int64"))
    captions = tuple(written(list(CIFAR)))
    return Seen(pooled(tower, list(table.webp), source), captions, tuple(label for _ in captions))


def trained(sets: list[Seen], firsts: list[list[Tensor]]) -> Bridge:
    bridge = Bridge(sets[0].pooled.shape[1], firsts[0][0].shape[1])
    optimizer = torch.optim.AdamW(bridge.parameters(), 1e-3)
    steps = EPOCHS * sum(len(each.pooled) for each in sets) // BATCH
    for _ in range(steps):
        number = int(torch.multinomial(torch.tensor([float(len(s.pooled)) for s in sets]), 1))
        seen, rows = sets[number], torch.randint(len(sets[number].pooled), (BATCH,))
        said = [(f, w) for f, w in zip(firsts[number], seen.which, strict=True)]
        loss = torch.stack([cross_entropy(bridge(seen.pooled[rows], f), w[rows]) for f, w in said])
        optimizer.zero_grad()
        loss.mean().backward()
        optimizer.step()
    return bridge


def places(about: str | None, **others: str) -> argparse.Namespace:
    """The folder of the data sets, and others by their names; all that follows has one thread."""
    ask = argparse.ArgumentParser(description=about)
    for name, said in {"data": "the folder that holds the data sets", **others}.items():
        ask.add_argument(name, type=Path, help=said)
    torch.set_num_threads(1)
    return ask.parse_args()


def main() -> None:
    asked = places(__doc__, out="the folder to write to")
    torch.manual_seed(0)
    source, words = str(asked.data / "dinov2-small"), str(asked.data / "gte-small")
    vision = AutoModel.from_pretrained(source, dtype=torch.float32).eval()
    text = AutoModel.from_pretrained(words, dtype=torch.float32, num_hidden_layers=BLOCKS).eval()
    reader = cast("Any", AutoTokenizer.from_pretrained(words))
    sets = [make(asked.data, vision, source) for make in (pacs, cifar)]

    @torch.no_grad()
    def first(captions: tuple[str, ...]) -> Tensor:
        ready = reader(list(captions), padding=True, return_tensors="pt")
        return text(**ready).last_hidden_state[:, 0]

    firsts = [[first(each) for each in seen.captions] for seen in sets]
    bridge = trained(sets, firsts)
    with torch.no_grad():
        text.pooler.dense.weight.copy_(bridge.pooler.weight)
        text.pooler.dense.bias.copy_(bridge.pooler.bias)
        for seen, known in zip(sets, firsts, strict=True):
            right = bridge(seen.pooled, known[0]).argmax(-1) == seen.which[0]
            print(f"{len(seen.captions[0])} classes: {right.float().mean():.3f} of what it saw")
    text.save_pretrained(asked.out / "gte-6")
    reader.save_pretrained(asked.out / "gte-6")
    save_file(
        {name: each.contiguous() for name, each in bridge.held().items()},
        asked.out / "bridge.safetensors",
    )


if __name__ == "__main__":
    main()
