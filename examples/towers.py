# SPDX-License-Identifier: Apache-2.0
"""Make a small model of pictures and texts, and pictures of four kinds for its clients.

It stands in for CLIP where nothing may be downloaded: half of scikit-learn's digits teach a picture
tower, a text tower and the bridge between them; the other half is given to four clients, each of
whom sees them in a way of its own.
"""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from PIL import Image
from safetensors.torch import save_file
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy
from transformers import (
    BertConfig,
    BertModel,
    BertTokenizer,
    VisionTextDualEncoderConfig,
    VisionTextDualEncoderModel,
    ViTConfig,
    ViTModel,
)

HERE = Path(__file__).parent / "towers"
NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "picture", "of", *NUMBERS]
KINDS = {
    "plain": lambda x: x,
    "negative": lambda x: 255 - x,
    "mirrored": lambda x: x[:, :, ::-1],
    "faint": lambda x: 96 + x // 4,
}


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    digits = load_digits()
    images = (digits.images * 255 / 16).astype(np.uint8)
    order = np.random.default_rng(0).permutation(len(images))
    taught, kept = order[:900], order[900:]
    HERE.mkdir(exist_ok=True)
    model, tokenizer = towers()
    teach(model, tokenizer, pixels(images[taught]), torch.tensor(digits.target[taught]))
    model.vision_model.save_pretrained(HERE / "vision")
    model.text_model.save_pretrained(HERE / "text")
    tokenizer.save_pretrained(HERE / "text")
    joins = ("visual_projection", "text_projection", "logit_scale")
    bridge = {n: t.clone() for n, t in model.state_dict().items() if n.startswith(joins)}
    save_file(bridge, HERE / "bridge.safetensors")
    table(images[kept], digits.target[kept]).to_parquet(HERE / "digits.parquet")


def towers() -> tuple[VisionTextDualEncoderModel, BertTokenizer]:
    (HERE / "vocab.txt").write_text("\n".join(WORDS))
    size = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128,
            "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
            "initializer_range": 0.1}  # fmt: skip
    vision = ViTConfig(image_size=8, patch_size=2, num_hidden_layers=4, **size)
    text = BertConfig(
        vocab_size=len(WORDS), num_hidden_layers=2, max_position_embeddings=32, **size
    )
    config = VisionTextDualEncoderConfig.from_vision_text_configs(vision, text, projection_dim=64)
    model = VisionTextDualEncoderModel(
        config, vision_model=ViTModel(vision), text_model=BertModel(text)
    )
    return model, BertTokenizer(str(HERE / "vocab.txt"))


def pixels(images: np.ndarray) -> torch.Tensor:
    return (torch.tensor(images).float() / 255 - 0.5)[:, None].expand(-1, 3, -1, -1) / 0.5


def teach(
    model: VisionTextDualEncoderModel,
    tokenizer: BertTokenizer,
    images: torch.Tensor,
    labels: torch.Tensor,
) -> None:
    """Bring each picture near the text of its number."""
    texts = tokenizer([f"a picture of a {name}" for name in NUMBERS], return_tensors="pt")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    for _ in range(12):
        for batch in torch.randperm(len(images)).split(32):
            logits = model(pixel_values=images[batch], **texts).logits_per_image
            loss = cross_entropy(logits, labels[batch])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    print(f"towers: loss {loss.item():.3f} in the end")


def table(images: np.ndarray, labels: np.ndarray) -> pd.DataFrame:
    """The pictures as four clients see them, a fifth of them for the common test."""
    rows = []
    for number, image in enumerate(images):
        kind = list(KINDS)[number % len(KINDS)]
        held = io.BytesIO()
        Image.fromarray(np.ascontiguousarray(KINDS[kind](image[None])[0])).save(held, "PNG")
        split = "test" if number % 5 == 0 else "train"
        rows.append((held.getvalue(), NUMBERS[labels[number]], kind, split))
    return pd.DataFrame(rows, columns=["image", "number", "kind", "split"])


if __name__ == "__main__":
    main()
