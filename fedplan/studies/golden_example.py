# SPDX-License-Identifier: Apache-2.0
"""Golden example: a synthetic input and the model's output, stored beside an exported model."""

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
from fedplan.models.dual_encoder import DualEncoder
from fedplan.models.folder import image_mean_std
from fedplan.tensors.devices import model_device, to_device
from fedplan.tensors.named import Tensors

TENSORS_FILE, JSON_FILE = "test_vector.safetensors", "test_vector.json"
"""Files in an exported folder: tensors of input and output; a readable summary."""
SENTENCE = "A federation is a promise that several keep, each in its own house: 1, 2, 3."
"""Input of text models."""
SHOWN_LOGITS = 16
"""Number of logits in the readable summary."""
TOLERANCE = 1e-5
"""Largest accepted deviation of logits, relative to the largest one if that is above 1."""


@dataclass(frozen=True)
class GoldenExample:
    """A synthetic input and the logits that an exported model gives, to check the model elsewhere.

    `loader`: name of the transformers class that loads the model: "AutoModelForCausalLM".
    `inputs`: the model's input tensors by name, a batch of one. `logits`: the output, float32.
    `text`: the raw text behind the inputs, or "".
    `image`: the raw image as uint8 tensor (height, width, RGB), or None.
    `labels`: the label names of a classifier, else empty. `write` stores the example beside the
    model, and `read_golden_example` reads the files again.
    """

    loader: str
    inputs: Tensors
    logits: Tensor
    text: str = ""
    image: Tensor | None = None
    labels: tuple[str, ...] = ()

    def write(self, folder: Path) -> None:
        """Write TENSORS_FILE and JSON_FILE into an existing folder; overwrites both."""
        tensors = {**self.inputs, "logits": self.logits}
        tensors |= {"image": self.image} if self.image is not None else {}
        save_file(
            {name: value.contiguous() for name, value in tensors.items()}, folder / TENSORS_FILE
        )
        first_logits = cast("list[float]", self.logits.flatten()[:SHOWN_LOGITS].tolist())
        summary = {
            "loader": self.loader,
            "inputs": sorted(self.inputs),
            "text": self.text,
            "labels": list(self.labels),
            "logits_shape": list(self.logits.shape),
            "logits": [round(value, 6) for value in first_logits],
            "tolerance": TOLERANCE,
        }
        (folder / JSON_FILE).write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")


def read_golden_example(folder: Path) -> GoldenExample:
    """Read the golden example of a folder; raise ValueError if a file is missing or damaged."""
    try:
        summary = json.loads((folder / JSON_FILE).read_text(encoding="utf-8"))
        tensors = load_file(folder / TENSORS_FILE)
        inputs = {str(name): tensors[name] for name in summary["inputs"]}
        example = GoldenExample(
            str(summary["loader"]),
            inputs,
            tensors["logits"],
            str(summary["text"]),
            tensors.get("image"),
            tuple(map(str, summary["labels"])),
        )
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise ValueError(f"{folder} has no readable golden example: {error!r}") from error
    if list(example.logits.shape) != summary["logits_shape"]:
        raise ValueError(f"{folder}: {JSON_FILE} does not belong to {TENSORS_FILE}")
    return example


def make_golden_example(model: nn.Module, task: Task) -> GoldenExample | None:
    """Run a model on a fixed synthetic image or sentence, and return the golden example.

    The image has the task's size and normalization, the sentence the task's tokenizer. Puts the
    model into eval mode. Returns None for a model that takes neither images nor tokens, or a task
    without tokenizer.
    """
    input_name = (
        "pixel_values" if isinstance(model, DualEncoder) else cast("Any", model).main_input_name
    )
    text, image, size = "", None, task.image_size
    if input_name == "pixel_values":
        index = torch.arange(size * size * 3, dtype=torch.int64)
        image = (index * 2654435761 % 2**32 // 2**24).to(torch.uint8).reshape(size, size, 3)
        mean, std = image_mean_std(task.source)
        # Channels first, in a batch of one.
        inputs = {input_name: ((image.permute(2, 0, 1).float() / 255 - mean) / std)[None]}
    elif input_name == "input_ids" and task.source:
        text = SENTENCE
        inputs = tokenize_text(task.tokenizer, text, task.max_length, task.model_class)
    else:
        return None
    return GoldenExample(
        task.model_class, inputs, compute_logits(model, inputs), text, image, tuple(task.labels)
    )


@torch.no_grad()
def compute_logits(model: nn.Module, inputs: Tensors) -> Tensor:
    """Run a model on input tensors without gradients; return the logits as float32 on the CPU.

    Copies the inputs to the model's device. Puts the model into eval mode and leaves it there.
    """
    model.eval()
    moved = to_device(inputs, model_device(model))
    output: Any = model(moved["pixel_values"]) if isinstance(model, DualEncoder) else model(**moved)
    logits = output if isinstance(output, Tensor) else output.logits
    return logits.detach().float().cpu()


def tokenize_text(tokenizer: Any, text: str, max_length: int, loader: str) -> dict[str, Tensor]:
    """Return `input_ids` and `attention_mask` of a text, truncated to `max_length` tokens.

    `tokenizer`: a transformers tokenizer; its own maximum length is respected. `loader`: name of
    the transformers class of the model; for a sequence-to-sequence model, the first four tokens are
    also returned as `decoder_input_ids`.
    """
    max_length = min(max_length, int(tokenizer.model_max_length))
    encoding = tokenizer(text, truncation=True, max_length=max_length, return_tensors="pt")
    inputs = {name: encoding[name] for name in ("input_ids", "attention_mask")}
    if loader == "AutoModelForSeq2SeqLM":
        inputs["decoder_input_ids"] = inputs["input_ids"][:, :4].clone()
    return inputs
