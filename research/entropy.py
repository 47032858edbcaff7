# SPDX-License-Identifier: Apache-2.0
"""How much smaller zstd makes the update of a client, and what this costs.

    python research/entropy.py

Trains a small ViT and a MiniLM of random values for some steps on random rows, and compresses the
change of the values: in bf16 (as it is, and by planes of bytes), int8 and int4. Writes
research/results/entropy.json: bytes before over bytes after, and CPU seconds for each MB.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import torch
import transformers
from study import FACTS, LAB
from torch import Tensor, nn

LEVEL, BATCH, SEEN = 1, 8, 30_000
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_labels": 10}
Batch = Callable[[], dict[str, Tensor]]


def vit() -> tuple[nn.Module, Batch]:
    """A ViT of 0.2 M parameters, and random images."""
    sizes = {"image_size": 32, "patch_size": 8, "hidden_size": 64, "intermediate_size": 256}
    config = transformers.ViTConfig(**sizes, **STILL, num_hidden_layers=4, num_attention_heads=4)
    model = transformers.ViTForImageClassification(config)
    return model, lambda: {"pixel_values": torch.randn(BATCH, 3, 32, 32)}


def minilm() -> tuple[nn.Module, Batch]:
    """A BERT of MiniLM's size, and random words."""
    sizes = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12}
    config = transformers.BertConfig(**sizes, **STILL, intermediate_size=1536)
    model = transformers.BertForSequenceClassification(config)
    return model, lambda: {"input_ids": torch.randint(5, SEEN, (BATCH, 64))}


def change(
    model: nn.Module, batch: Batch, optimizer: torch.optim.Optimizer, steps: int
) -> list[Tensor]:
    """Train, and return the change of all values, one after the other."""
    start = [value.detach().clone() for value in model.parameters()]
    for _ in range(steps):
        logits = model(**batch()).logits
        nn.functional.cross_entropy(logits, torch.randint(10, (BATCH,))).backward()
        optimizer.step()
        optimizer.zero_grad()
    pairs = zip(model.parameters(), start, strict=True)
    return [(now.detach() - before).reshape(-1) for now, before in pairs]


def rounded(values: Tensor, bits: int) -> np.ndarray:
    """Return values as whole numbers of so many bits, rounded at random."""
    top = 2 ** (bits - 1) - 1
    step = values.abs().max() / top
    if not step:
        return np.zeros(values.numel(), dtype=np.uint8)
    whole = torch.floor(values / step + torch.rand_like(values)).clamp(-top, top)
    return whole.to(torch.int8).numpy().astype(np.uint8)


def forms(values: list[Tensor]) -> dict[str, bytes]:
    """Return the bytes of a change in each form."""
    bf16 = torch.cat([each.bfloat16() for each in values]).view(torch.int16).numpy()
    planes = bf16.view(np.uint8).reshape(-1, 2).T
    int8 = np.concatenate([rounded(each, 8) for each in values])
    int4 = np.concatenate([rounded(each, 4) for each in values])
    int4 = np.append(int4, np.zeros(len(int4) % 2, dtype=np.uint8))
    return {
        "bf16": bf16.tobytes(),
        "bf16, planes of bytes": planes.tobytes(),
        "int8": int8.tobytes(),
        "int4": ((int4[::2] & 15) | (int4[1::2] & 15) << 4).tobytes(),
    }


def main() -> None:
    """Measure all cases."""
    torch.set_num_threads(1)
    codec, rows = pa.Codec("zstd", LEVEL), list[dict[str, object]]()
    for name, build, steps in (("ViT 0.2 M", vit, 16), ("MiniLM 22.7 M", minilm, 4)):
        for kind in ("SGD", "AdamW"):
            torch.manual_seed(0)
            model, batch = build()
            lr = 0.01 if kind == "SGD" else 1e-4
            optimizer = getattr(torch.optim, kind)(model.parameters(), lr=lr)
            values = change(model, batch, optimizer, steps)
            for form, content in forms(values).items():
                began = time.process_time()
                size = len(codec.compress(content, asbytes=True))
                seconds = (time.process_time() - began) / len(content) * 1e6
                row = {"model": name, "optimizer": kind, "steps": steps, "form": form}
                rows.append(
                    row | {"factor": round(len(content) / size, 2), "s per MB": round(seconds, 4)}
                )
                print(*rows[-1].values(), flush=True)
    result = {"command": "python research/entropy.py", "codec": f"zstd {LEVEL}", **FACTS}
    text = json.dumps(result | {"rows": rows}, indent=1) + "\n"
    (LAB / "results" / "entropy.json").write_text(text)


if __name__ == "__main__":
    main()
