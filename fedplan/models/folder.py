# SPDX-License-Identifier: Apache-2.0
"""Saving and loading a DualEncoder with its prompts: safetensors and JSON only."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast, final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor

from fedplan.models.architectures import DUALS
from fedplan.models.dual_encoder import DualEncoder, ModelError
from fedplan.models.hub import load_pretrained
from fedplan.models.images import image_tensor
from fedplan.models.prompts import PromptConfig, attach_prompts
from fedplan.tensors.devices import fork_rng_state

WEIGHTS, SETTINGS = "prompts.safetensors", "prompts.json"
"""The files beside the backbone: values of prompts and fusion, and settings."""
_ADDED_PREFIXES = ("prompts.", "fusion.")


@final
@dataclass(frozen=True)
class Preprocessing:
    """How an image is prepared: its size in pixels, and the mean and std of each channel."""

    size: int = 224
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)

    def tensor(self, path: str | Path) -> Tensor:
        """The image in a file as a normalized tensor of shape (3, size, size)."""
        mean, std = (torch.tensor(each).reshape(3, 1, 1) for each in (self.mean, self.std))
        image = image_tensor(Path(path).read_bytes(), self.size, cubic=True)
        return (image.float() / 255 - mean) / std


def save_folder(
    model: DualEncoder, folder: str | Path, *, preprocessing: Preprocessing | None = None
) -> None:
    """Save a model into a folder: the backbone by save_pretrained, prompts and settings beside it.

    `preprocessing` is stored for `predict_classes`; default values if None.
    """
    path = Path(folder)
    cast("Any", model.backbone).save_pretrained(path)
    added = {n: t.detach() for n, t in model.named_parameters() if n.startswith(_ADDED_PREFIXES)}
    if added:
        save_file({n: t.contiguous() for n, t in added.items()}, path / WEIGHTS)
    settings: dict[str, Any] = {
        "names": model.names,
        "template": model.template,
        "lead": model.lead,
        "ids": model.ids.tolist(),
        "mask": model.mask.tolist(),
        "prompts": asdict(model.prompt_config)
        if isinstance(model.prompt_config, PromptConfig)
        else None,
        "picture": asdict(preprocessing or Preprocessing()),
    }
    (path / SETTINGS).write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")


def load_folder(folder: str | Path) -> DualEncoder:
    """Load a model saved by `save_folder`, in eval mode; its logits are bitwise the same.

    Raises ModelError if the folder has no such model.
    """
    import transformers

    path, settings = Path(folder), _read_settings(folder)
    config = load_pretrained(transformers.AutoConfig, str(path))
    if config.model_type not in DUALS:
        raise ModelError(f"{folder} has a {config.model_type}, which is no dual encoder")
    loader = getattr(transformers, DUALS[config.model_type])
    backbone = load_pretrained(loader, str(path), dtype=torch.float32)
    ids, mask = torch.tensor(settings["ids"]), torch.tensor(settings["mask"])
    texts = {name: settings[name] for name in ("names", "template", "lead")}
    model = DualEncoder(backbone, ids, mask, **texts)
    if prompts := settings["prompts"]:
        values: dict[str, Any] = {**prompts, "levels": tuple(prompts["levels"])}
        with fork_rng_state():
            attach_prompts(model, PromptConfig(**values))
        added = {n: t for n, t in model.named_parameters() if n.startswith(_ADDED_PREFIXES)}
        _load_values(added, path / WEIGHTS)
    return model.eval()


def predict_classes(folder: str | Path, images: Sequence[str | Path]) -> list[str]:
    """The predicted class name of each image file, by the model saved in a folder.

    Raises ModelError if the folder has no such model.
    """
    model, settings = load_folder(folder), _read_settings(folder)["picture"]
    preprocessing = Preprocessing(settings["size"], tuple(settings["mean"]), tuple(settings["std"]))
    with torch.no_grad():
        classes = [model(preprocessing.tensor(each)[None]).argmax().item() for each in images]
    return [model.names[int(index)] for index in classes]


def _read_settings(folder: str | Path) -> dict[str, Any]:
    """The settings file of a folder; raises ModelError if it is missing or no JSON."""
    try:
        return json.loads((Path(folder) / SETTINGS).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder} has no {SETTINGS} of a saved model: {error}") from error


def _load_values(added: Mapping[str, Tensor], path: Path) -> None:
    """Copy the tensors of a safetensors file into `added`.

    Raises ModelError if the file cannot be read, or has other names or shapes.
    """
    try:
        saved = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if {n: t.shape for n, t in added.items()} != {n: t.shape for n, t in saved.items()}:
        raise ModelError(f"{path} does not have the prompts that {SETTINGS} beside it describes")
    with torch.no_grad():
        for name, tensor in added.items():
            tensor.copy_(saved[name])
