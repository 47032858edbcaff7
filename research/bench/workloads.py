# SPDX-License-Identifier: Apache-2.0
"""Workloads: a model with its initial values, and the rows of each client, as files."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

LABELS, WORDS, LENGTH, SIDE, PIXELS = 10, 30522, 64, 32, 784
VIT: dict[str, Any] = {
    "image_size": SIDE,
    "num_labels": LABELS,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
TINY: dict[str, Any] = {
    "patch_size": 8,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 256,
}
SMALL: dict[str, Any] = {
    "patch_size": 4,
    "hidden_size": 192,
    "num_hidden_layers": 6,
    "num_attention_heads": 3,
    "intermediate_size": 768,
}
MINILM: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
    "num_labels": LABELS,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "ViT 0.2 M": ("vit", VIT | TINY),
    "ViT 2.7 M": ("vit", VIT | SMALL),
    "MiniLM 22.7 M": ("bert", MINILM),
    "LR 7,850": ("linear", {}),
}


@dataclass(frozen=True)
class Workload:
    """The work of a round for all engines: each client does `steps` of SGD with `batch` rows.

    `asked`: clients of a round; 0 for all. With a `rank`, only a LoRA adapter on query and value is
    trained.
    """

    model: str
    clients: int
    steps: int
    batch: int
    asked: int = 0
    rank: int = 0

    @property
    def cohort(self) -> int:
        """Number of clients of a round."""
        return self.asked or self.clients

    @property
    def rows(self) -> int:
        """Number of rows of each client, each used once in a round."""
        return self.steps * self.batch

    @property
    def name(self) -> str:
        """Name of its folder."""
        words = [*self.model.split()[:2], *([f"lora{self.rank}"] if self.rank else [])]
        return "-".join((*words, str(self.clients), str(self.steps), str(self.batch))).lower()


def write_workload(workload: Workload, place: Path) -> Path:
    """Write the folder of a workload, if it is missing, and return it; workload.json is last."""
    folder = place / workload.name.replace(",", "")
    if not (folder / "workload.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        kind, settings = MODELS[workload.model]
        params = _model(kind, settings, folder / "model", workload.rank)
        _rows(kind, workload, folder)
        spec = asdict(workload) | {"kind": kind, "cohort": workload.cohort, "params": params}
        (folder / "workload.json").write_text(json.dumps(spec))
    return folder


def _model(kind: str, settings: dict[str, Any], folder: Path, rank: int) -> int:
    """Write the model and its adapter, and return the number of values of the model."""
    import torch
    import transformers
    from safetensors.torch import save_file

    transformers.logging.disable_progress_bar()
    torch.manual_seed(0)
    folder.mkdir(exist_ok=True)
    if kind == "linear":
        made: Any = torch.nn.Linear(PIXELS, LABELS)
        save_file(dict(made.state_dict()), folder / "model.safetensors")
    elif kind == "vit":
        made = transformers.ViTForImageClassification(transformers.ViTConfig(**settings))
        made.save_pretrained(folder)
    else:
        made = transformers.BertForSequenceClassification(transformers.BertConfig(**settings))
        made.save_pretrained(folder)
        _tokenizer(folder)
    count = sum(p.numel() for p in made.parameters())
    if rank:
        import peft

        settings = {"r": rank, "lora_alpha": rank, "target_modules": ["query", "value"]}
        peft.get_peft_model(made, peft.LoraConfig(**settings)).save_pretrained(
            folder.parent / "adapter"
        )
    return count


def _tokenizer(folder: Path) -> None:
    """Words w4, w5, ... with the ids 4, 5, ...: the other engines read the ids."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    marks = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    words = {word: at for at, word in enumerate([*marks, *(f"w{i}" for i in range(4, WORDS))])}
    made = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    ends = [("[CLS]", 2), ("[SEP]", 3)]
    made.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
        single="[CLS] $A [SEP]", pair=None, special_tokens=ends
    )
    tokens = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    fast = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]", **tokens)
    fast.save_pretrained(folder)


def _rows(kind: str, workload: Workload, folder: Path) -> None:
    """Random rows: their content does not change the time of a step."""
    import numpy as np
    from datasets import Dataset, disable_progress_bars

    disable_progress_bars()
    draw, count = np.random.default_rng(0), workload.clients * workload.rows
    labels = draw.integers(LABELS, size=count)
    names = [f"c{i // workload.rows:05}" for i in range(count)]
    if kind == "vit":
        rows = draw.integers(256, size=(count, SIDE, SIDE, 3), dtype=np.uint8)
        np.savez(folder / "table.npz", image=rows, label=labels, client=np.array(names))
    elif kind == "bert":
        rows = draw.integers(4, WORDS, size=(count, LENGTH))
        rows[:, 0], rows[:, -1] = 2, 3
        texts = [" ".join(f"w{i}" for i in row[1:-1]) for row in rows]
        table = {"text": texts, "label": [str(label) for label in labels], "client": names}
        Dataset.from_dict(table).to_parquet(folder / "table.parquet")
    else:
        rows = draw.standard_normal((count, PIXELS), dtype=np.float32)
    np.savez(folder / "rows.npz", rows=rows, labels=labels)
