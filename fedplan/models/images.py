# SPDX-License-Identifier: Apache-2.0
"""Images: pictures as tensors, and the colours that a model expects."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from fedplan.models.hub import bare, is_hub_id


def drawn(value: Any, size: int, *, cubic: bool = False) -> Tensor:
    """A picture of this size as bytes: channels, height, width."""
    from PIL import Image

    if isinstance(value, dict):
        held = cast("dict[str, Any]", value)
        value = held["bytes"] if held.get("bytes") is not None else Path(held["path"]).read_bytes()
    if isinstance(value, bytes):
        picture = Image.open(BytesIO(value))
    elif isinstance(value, Image.Image):
        picture = value
    else:
        picture = Image.fromarray(_bytes(np.asarray(value)))
    picture = picture.convert("RGB")
    if picture.size != (size, size):
        how = Image.Resampling.BICUBIC if cubic else Image.Resampling.BILINEAR
        picture = picture.resize((size, size), how)
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1)


def centre_of(source: str) -> tuple[Tensor, Tensor]:
    """The mean and spread that a model's processor names, or a half each: from -1 to 1."""
    found: dict[str, Any] = {}
    if Path(source, "preprocessor_config.json").is_file() or is_hub_id(source):
        from transformers.image_processing_base import ImageProcessingMixin

        local = not is_hub_id(source)
        read = cast("Any", ImageProcessingMixin).get_image_processor_dict
        found = read(bare(source), local_files_only=local)[0]
    sides = (found.get(name, [0.5] * 3) for name in ("image_mean", "image_std"))
    mean, std = (torch.tensor(side).reshape(3, 1, 1) for side in sides)
    return mean, std


def _bytes(array: Any) -> Any:
    if array.dtype.kind not in "iu" or array.min() < 0 or array.max() > 255:
        raise ValueError(f"an array of {array.dtype} must hold whole numbers from 0 to 255")
    flat = array[..., 0] if array.ndim == 3 and array.shape[2] == 1 else array
    return flat.astype("uint8")
