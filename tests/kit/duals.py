# SPDX-License-Identifier: Apache-2.0
"""Tiny models of pictures and texts, and rows for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import nn
from zoo import TEXT, VISION

from fedplan.data.examples import ImageExamples
from fedplan.data.tasks.kinds import make_task
from fedplan.models.dual_encoder import DualEncoder, make_dual_encoder

NAMES = ("cat", "ice_cream", "big_old_dog")
ASKED = make_task("image-text", columns="x", label="y", labels=NAMES, image_size=16)


class Words:
    """A tokenizer of whole words: `first` and `last` frame a text, `pad` fills it up."""

    def __init__(self, first: int, last: int, pad: int) -> None:
        self.first, self.last, self.pad = first, last, pad
        self.words: dict[str, int] = {}

    def __call__(self, texts: list[str], *, add_special_tokens: bool = True, **_: Any) -> Any:
        ids = [[self.words.setdefault(w, 4 + len(self.words)) for w in t.split()] for t in texts]
        if not add_special_tokens:
            return {"input_ids": ids}
        ids = [[self.first, *row, self.last] for row in ids]
        most = max(map(len, ids))
        mask = torch.tensor([[1] * len(row) + [0] * (most - len(row)) for row in ids])
        padded = torch.tensor([row + [self.pad] * (most - len(row)) for row in ids])
        return {"input_ids": padded, "attention_mask": mask}


def clip(eos: int = 63) -> nn.Module:
    text = {**TEXT, "eos_token_id": eos, "bos_token_id": 62, "hidden_size": 12}
    return hf.CLIPModel(hf.CLIPConfig(text_config=text, vision_config=VISION, projection_dim=16))


def joined(vision: Any) -> nn.Module:
    config = hf.VisionTextDualEncoderConfig.from_vision_text_configs(
        vision, hf.BertConfig(**{**TEXT, "hidden_size": 12}), projection_dim=16
    )
    return hf.VisionTextDualEncoderModel(config)


BACKBONES: dict[str, tuple[Callable[[], nn.Module], Words]] = {
    "clip": (clip, Words(62, 63, 63)),
    "old-clip": (lambda: clip(eos=2), Words(62, 63, 0)),
    "vit-bert": (lambda: joined(hf.ViTConfig(**VISION)), Words(1, 2, 0)),
    "dinov2-bert": (lambda: joined(hf.Dinov2Config(mlp_ratio=2, **VISION)), Words(1, 2, 0)),
}


def build(name: str, template: str = "a picture of a {}", seed: int = 0) -> DualEncoder:
    torch.manual_seed(seed)
    make, tokenizer = BACKBONES[name]
    return make_dual_encoder(make().eval(), tokenizer, NAMES, template).eval()


def pictures_of(*clients: str) -> dict[str, ImageExamples]:
    """Four random pictures for each client."""
    return {name: _pictures(len(name)) for name in clients}


def _pictures(seed: int) -> ImageExamples:
    drawn = torch.Generator().manual_seed(seed)
    pictures = torch.randint(0, 255, (4, 3, 16, 16), generator=drawn, dtype=torch.uint8)
    return ImageExamples(
        pictures, torch.arange(4) % 3, torch.full((3, 1, 1), 0.5), torch.ones(3, 1, 1)
    )
