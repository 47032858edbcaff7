# SPDX-License-Identifier: Apache-2.0
"""Test vectors: an input made of no row, and what a model says to it, written beside the model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor, nn

from fedplan.data.tasks import Task
from fedplan.models.dual import Dual
from fedplan.models.images import centre_of
from fedplan.tensors.devices import brought, device_of
from fedplan.tensors.named import Tensors

TENSORS, EXPECTED = "test_vector.safetensors", "test_vector.json"
"""In an exported folder: the input with the whole output, and the same for people to read."""
SENTENCE = "A federation is a promise that several keep, each in its own house: 1, 2, 3."
SHOWN = 16
"""Numbers of the output that the readable file shows."""
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Vector:
    """An input, the output that was seen, and how the input comes from what a person has.

    `raw` is a text, or nothing: then `picture` is among the tensors, as bytes of red, green, blue.
    """

    loader: str
    inputs: Tensors
    logits: Tensor
    raw: str = ""
    picture: Tensor | None = None
    labels: tuple[str, ...] = ()

    def write(self, folder: Path) -> None:
        """Write it into the folder of a model."""
        held = {**self.inputs, "logits": self.logits}
        held |= {"picture": self.picture} if self.picture is not None else {}
        save_file({name: value.contiguous() for name, value in held.items()}, folder / TENSORS)
        shown = cast("list[float]", self.logits.flatten()[:SHOWN].tolist())
        said = {
            "loader": self.loader,
            "inputs": sorted(self.inputs),
            "text": self.raw,
            "labels": list(self.labels),
            "shape": list(self.logits.shape),
            "logits": [round(value, 6) for value in shown],
            "tolerance": TOLERANCE,
        }
        (folder / EXPECTED).write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")


def read_vector(folder: Path) -> Vector:
    """The vector of an exported folder; whatever is wrong with its files is a ValueError."""
    try:
        said = json.loads((folder / EXPECTED).read_text(encoding="utf-8"))
        held = load_file(folder / TENSORS)
        inputs = {str(name): held[name] for name in said["inputs"]}
        made = Vector(
            str(said["loader"]),
            inputs,
            held["logits"],
            str(said["text"]),
            held.get("picture"),
            tuple(map(str, said["labels"])),
        )
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise ValueError(f"{folder} has no test vector that can be read: {error!r}") from error
    if list(made.logits.shape) != said["shape"]:
        raise ValueError(f"{folder}: {EXPECTED} is not of {TENSORS}")
    return made


def vector_of(model: nn.Module, task: Task) -> Vector | None:
    """The vector of a model; none of one that takes neither pictures nor tokens."""
    taken = "pixel_values" if isinstance(model, Dual) else cast("Any", model).main_input_name
    raw, picture, inputs = "", None, dict[str, Tensor]()
    if taken == "pixel_values":
        picture = _picture(task.image_size)
        inputs = {taken: pixels_of(picture, *centre_of(task.source))}
    elif taken == "input_ids" and task.source:
        raw = SENTENCE
        inputs = tokens_of(task.tokenizer, raw, task.max_length, task.model_class)
    if not inputs:
        return None
    return Vector(
        task.model_class, inputs, logits_of(model, inputs), raw, picture, tuple(task.labels)
    )


@torch.no_grad()
def logits_of(model: nn.Module, inputs: Tensors) -> Tensor:
    """What a model says to an input, as floats of this machine."""
    model.eval()
    placed = brought(inputs, device_of(model))
    found: Any = model(placed["pixel_values"]) if isinstance(model, Dual) else model(**placed)
    logits = found if isinstance(found, Tensor) else found.logits
    return logits.detach().float().cpu()


def pixels_of(picture: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """A picture of bytes as a model takes it."""
    return ((picture.permute(2, 0, 1).float() / 255 - mean) / std)[None]


def tokens_of(tokenizer: Any, text: str, limit: int, loader: str) -> dict[str, Tensor]:
    """A text as a model takes it; a model that answers in texts is given the first of one too."""
    limit = min(limit, int(tokenizer.model_max_length))
    found = tokenizer(text, truncation=True, max_length=limit, return_tensors="pt")
    inputs = {name: found[name] for name in ("input_ids", "attention_mask")}
    if loader == "AutoModelForSeq2SeqLM":
        inputs["decoder_input_ids"] = inputs["input_ids"][:, :4].clone()
    return inputs


def _picture(size: int) -> Tensor:
    """A picture of no one: bytes that follow from where they stand."""
    place = torch.arange(size * size * 3, dtype=torch.int64)
    return (place * 2654435761 % 2**32 // 2**24).to(torch.uint8).reshape(size, size, 3)
