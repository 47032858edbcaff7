# SPDX-License-Identifier: Apache-2.0
"""A workload for all engines but fedplan: model, rows, and the local training of a client."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

RATE = 0.01


@dataclass(frozen=True)
class Work:
    """The request of the benchmark: a workload's folder, all rounds, and its socket `line`."""

    folder: Path
    rounds: int
    line: str
    engine: str = ""
    workers: int = 1

    @cached_property
    def spec(self) -> dict[str, Any]:
        """The settings of the workload."""
        return json.loads((self.folder / "workload.json").read_text())

    @cached_property
    def rows(self) -> tuple[Tensor, Tensor]:
        """The rows of all clients, one after the other, and their labels."""
        with np.load(self.folder / "rows.npz") as file:
            rows, labels = file["rows"], torch.from_numpy(file["labels"])
        if self.spec["kind"] == "vit":
            pixels = torch.from_numpy(rows).permute(0, 3, 1, 2).float()
            return ((pixels / 255 - 0.5) / 0.5).contiguous(), labels
        return torch.from_numpy(rows), labels

    def client(self, number: int) -> tuple[Tensor, Tensor]:
        """The rows of one client."""
        each = self.spec["steps"] * self.spec["batch"]
        part = slice(number * each, (number + 1) * each)
        return self.rows[0][part], self.rows[1][part]

    def model(self) -> nn.Module:
        """The model with its start values."""
        if self.spec["kind"] == "linear":
            from safetensors.torch import load_file

            made = nn.Linear(784, 10)
            made.load_state_dict(load_file(self.folder / "model" / "model.safetensors"))
            return made
        import transformers

        name = {"vit": "ImageClassification", "bert": "SequenceClassification"}[self.spec["kind"]]
        built = getattr(transformers, f"AutoModelFor{name}")
        model = built.from_pretrained(self.folder / "model", local_files_only=True)
        if not self.spec["rank"]:
            return model
        import peft

        return peft.PeftModel.from_pretrained(model, self.folder / "adapter", is_trainable=True)

    def loss(self, model: Any, rows: Tensor, labels: Tensor) -> Tensor:
        """The loss of one batch."""
        kind = self.spec["kind"]
        if kind == "linear":
            logits = model(rows)
        elif kind == "vit":
            logits = model(pixel_values=rows).logits
        else:
            logits = model(input_ids=rows, attention_mask=torch.ones_like(rows)).logits
        return nn.functional.cross_entropy(logits, labels)

    def fit(self, model: nn.Module, number: int) -> float:
        """Train one client on its rows in a random order; return the mean loss."""
        (rows, labels), batch = self.client(number), self.spec["batch"]
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=RATE)
        model.train()
        losses = list[float]()
        for indices in torch.randperm(len(rows)).split(batch):
            loss = self.loss(model, rows[indices], labels[indices])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return sum(losses) / len(losses)


def read_work() -> Work:
    """The work in the JSON file that the command line names."""
    fields = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    return Work(**fields | {"folder": Path(fields["folder"])})


def moved(now: Mapping[str, Tensor], start: Mapping[str, Tensor]) -> dict[str, float]:
    """`moved`: the distance of two states; `trained`: the size of the tensors that differ."""
    differ = [k for k in start if not torch.equal(now[k], start[k])]
    distance = sum(float((now[k].double() - start[k].double()).square().sum()) for k in differ)
    return {"moved": distance**0.5, "trained": sum(start[k].numel() for k in differ)}
