# SPDX-License-Identifier: Apache-2.0
"""Folders of a Dual: safetensors and JSON, and nothing else."""

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
from fedplan.models.dual import Dual, ModelError
from fedplan.models.hub import fetched
from fedplan.models.images import drawn
from fedplan.models.prompts import Settings, attach
from fedplan.tensors.devices import forked

WEIGHTS, SETTINGS = "prompts.safetensors", "prompts.json"
_ADDED = ("prompts.", "fusion.")


@final
@dataclass(frozen=True)
class Preprocessing:
    """How a picture is made ready: its size, and the mean and spread of each colour."""

    size: int = 224
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)

    def tensor(self, path: str | Path) -> Tensor:
        """The picture in a file, as a model takes it."""
        mean, std = (torch.tensor(side).reshape(3, 1, 1) for side in (self.mean, self.std))
        return (drawn(Path(path).read_bytes(), self.size, cubic=True).float() / 255 - mean) / std


def save_folder(dual: Dual, folder: str | Path, *, picture: Preprocessing | None = None) -> None:
    """Write a model with its prompts: the backbone as Hugging Face does, the rest beside it."""
    place = Path(folder)
    cast("Any", dual.backbone).save_pretrained(place)
    added = {n: t.detach() for n, t in dual.named_parameters() if n.startswith(_ADDED)}
    if added:
        save_file({n: t.contiguous() for n, t in added.items()}, place / WEIGHTS)
    held: dict[str, Any] = {
        "names": dual.names,
        "template": dual.template,
        "lead": dual.lead,
        "ids": dual.ids.tolist(),
        "mask": dual.mask.tolist(),
        "prompts": asdict(dual.settings) if isinstance(dual.settings, Settings) else None,
        "picture": asdict(picture or Preprocessing()),
    }
    (place / SETTINGS).write_text(json.dumps(held, indent=1) + "\n", encoding="utf-8")


def load_folder(folder: str | Path) -> Dual:
    """A model as it was saved: its logits are the same to the bit."""
    import transformers

    place, held = Path(folder), _settings(folder)
    config = fetched(transformers.AutoConfig, str(place))
    if config.model_type not in DUALS:
        raise ModelError(f"{folder} holds a {config.model_type}, and no model of two towers")
    loader = getattr(transformers, DUALS[config.model_type])
    backbone = fetched(loader, str(place), dtype=torch.float32)
    ids, mask = torch.tensor(held["ids"]), torch.tensor(held["mask"])
    words = {"names": held["names"], "template": held["template"], "lead": held["lead"]}
    dual = Dual(backbone, ids, mask, **words)
    if held["prompts"]:
        asked: dict[str, Any] = {**held["prompts"], "levels": tuple(held["prompts"]["levels"])}
        with forked():
            attach(dual, Settings(**asked))
        added = {n: t for n, t in dual.named_parameters() if n.startswith(_ADDED)}
        _fill(added, place / WEIGHTS)
    return dual.eval()


def predict(folder: str | Path, pictures: Sequence[str | Path]) -> list[str]:
    """The class of each picture, by the model in a folder."""
    dual, held = load_folder(folder), _settings(folder)["picture"]
    picture = Preprocessing(held["size"], tuple(held["mean"]), tuple(held["std"]))
    with torch.no_grad():
        found = [dual(picture.tensor(each)[None]).argmax().item() for each in pictures]
    return [dual.names[int(number)] for number in found]


def _settings(folder: str | Path) -> dict[str, Any]:
    try:
        return json.loads((Path(folder) / SETTINGS).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder} holds no {SETTINGS} of a saved model: {error}") from error


def _fill(added: Mapping[str, Tensor], path: Path) -> None:
    """Copy saved values into a model; both must have the same names and shapes."""
    try:
        saved = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if {n: t.shape for n, t in added.items()} != {n: t.shape for n, t in saved.items()}:
        raise ModelError(f"{path} does not hold the prompts that {SETTINGS} beside it speaks of")
    with torch.no_grad():
        for name, tensor in added.items():
            tensor.copy_(saved[name])
