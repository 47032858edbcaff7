# SPDX-License-Identifier: Apache-2.0
"""Saving and loading a DualEncoder with its prompts, and images as tensors for it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, cast, final

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor, nn

from fedplan.models.architectures import DUALS
from fedplan.models.catalog import is_hub_id, load_pretrained, strip_hub_prefix
from fedplan.models.dual_encoder import DualEncoder, ModelError
from fedplan.models.prompts import PromptConfig, attach_prompts
from fedplan.tensors.devices import fork_rng_state


def image_tensor(value: Any, size: int, *, cubic: bool = False) -> Tensor:
    """An image as a uint8 RGB tensor of shape (3, size, size), resized if needed.

    `value` is a PIL image, encoded bytes, an array of integers (channels last, if any), or a dict
    with `bytes` or `path`, as in Hugging Face datasets. Raises ValueError for an array of other
    numbers than integers from 0 to 255.
    """
    from PIL import Image

    if isinstance(value, dict):
        item = cast("dict[str, Any]", value)
        value = item["bytes"] if item.get("bytes") is not None else Path(item["path"]).read_bytes()
    if isinstance(value, bytes):
        image = Image.open(BytesIO(value))
    elif isinstance(value, Image.Image):
        image = value
    else:
        array: Any = np.asarray(value)
        if array.dtype.kind not in "iu" or array.min() < 0 or array.max() > 255:
            raise ValueError(f"an array of {array.dtype} must hold whole numbers from 0 to 255")
        gray = array.ndim == 3 and array.shape[2] == 1
        image = Image.fromarray((array[..., 0] if gray else array).astype("uint8"))
    image = image.convert("RGB")
    if image.size != (size, size):
        resampling = Image.Resampling.BICUBIC if cubic else Image.Resampling.BILINEAR
        image = image.resize((size, size), resampling)
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def image_mean_std(source: str) -> tuple[Tensor, Tensor]:
    """Return (mean, std) of a model's preprocessor config, each of shape (3, 1, 1).

    `source` is a folder or a hub id (may download). Values that the config does not have are 0.5.
    """
    config: dict[str, Any] = {}
    if Path(source, "preprocessor_config.json").is_file() or is_hub_id(source):
        from transformers.image_processing_base import ImageProcessingMixin

        load_config = cast("Any", ImageProcessingMixin).get_image_processor_dict
        local_only = not is_hub_id(source)
        config = load_config(strip_hub_prefix(source), local_files_only=local_only)[0]
    stats = (config.get(name, [0.5] * 3) for name in ("image_mean", "image_std"))
    mean, std = (torch.tensor(each).reshape(3, 1, 1) for each in stats)
    return mean, std


WEIGHTS, SETTINGS = "prompts.safetensors", "prompts.json"
"""The files beside the backbone: values of prompts and fusion, and settings."""


@final
@dataclass(frozen=True)
class Preprocessing:
    """How to prepare an image for a model: call `tensor(path)`.

    `size`: width and height in pixels. `mean`, `std`: of each RGB channel, for values in [0, 1].
    """

    size: int = 224
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)

    def tensor(self, path: str | Path) -> Tensor:
        """The image in a file, resized, as a normalized float tensor of shape (3, size, size)."""
        mean, std = (torch.tensor(each).reshape(3, 1, 1) for each in (self.mean, self.std))
        image = image_tensor(Path(path).read_bytes(), self.size, cubic=True)
        return (image.float() / 255 - mean) / std


def save_folder(
    model: DualEncoder, folder: str | Path, *, preprocessing: Preprocessing | None = None
) -> None:
    """Save a model into a folder, created if missing; existing files are overwritten.

    Writes the backbone by save_pretrained, SETTINGS (JSON) and, if the model has prompts, WEIGHTS
    (safetensors). `preprocessing` is stored for `predict_classes`.
    """
    path = Path(folder)
    cast("Any", model.backbone).save_pretrained(path)
    if added := _added_params(model):
        save_file({n: t.detach().contiguous() for n, t in added.items()}, path / WEIGHTS)
    settings: dict[str, Any] = {
        "class_names": model.names,
        "prompt_template": model.template,
        "tokens_before_name": model.lead,
        "input_ids": model.ids.tolist(),
        "attention_mask": model.mask.tolist(),
        "prompts": asdict(model.prompt_config)
        if isinstance(model.prompt_config, PromptConfig)
        else None,
        "image": asdict(preprocessing or Preprocessing()),
    }
    (path / SETTINGS).write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")


def load_folder(folder: str | Path) -> DualEncoder:
    """Load a model saved by `save_folder`, in float32 and eval mode, on the CPU.

    The logits are bitwise those of the saved model, if that is in the same state. Raises ModelError
    if a file is missing, unreadable or does not match the others.
    """
    import transformers

    path, settings = Path(folder), _read_settings(folder)
    config = load_pretrained(transformers.AutoConfig, str(path))
    if config.model_type not in DUALS:
        raise ModelError(f"{folder} has a {config.model_type}, which is no dual encoder")
    loader = getattr(transformers, DUALS[config.model_type])
    backbone = load_pretrained(loader, str(path), dtype=torch.float32)
    model = DualEncoder(
        backbone,
        torch.tensor(settings["input_ids"]),
        torch.tensor(settings["attention_mask"]),
        names=settings["class_names"],
        template=settings["prompt_template"],
        lead=settings["tokens_before_name"],
    )
    if prompts := settings["prompts"]:
        values: dict[str, Any] = {**prompts, "levels": tuple(prompts["levels"])}
        with fork_rng_state():
            attach_prompts(model, PromptConfig(**values))
        added = _added_params(model)
        try:
            saved = load_file(path / WEIGHTS)
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{path / WEIGHTS} cannot be read: {error}") from error
        if {n: t.shape for n, t in added.items()} != {n: t.shape for n, t in saved.items()}:
            raise ModelError(
                f"{path / WEIGHTS} does not have the prompts that {SETTINGS} beside it describes"
            )
        with torch.no_grad():
            for name, tensor in added.items():
                tensor.copy_(saved[name])
    return model.eval()


def predict_classes(folder: str | Path, images: Sequence[str | Path]) -> list[str]:
    """The predicted class name of each image file, by the model in a folder (`save_folder`).

    Runs on the CPU, image by image. Raises ModelError as `load_folder`.
    """
    model, settings = load_folder(folder), _read_settings(folder)["image"]
    preprocessing = Preprocessing(settings["size"], tuple(settings["mean"]), tuple(settings["std"]))
    with torch.no_grad():
        classes = [model(preprocessing.tensor(each)[None]).argmax().item() for each in images]
    return [model.names[int(index)] for index in classes]


def _read_settings(folder: str | Path) -> dict[str, Any]:
    try:
        return json.loads((Path(folder) / SETTINGS).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder} has no {SETTINGS} of a saved model: {error}") from error


def _added_params(model: DualEncoder) -> dict[str, nn.Parameter]:
    return {n: t for n, t in model.named_parameters() if n.startswith(("prompts.", "fusion."))}
