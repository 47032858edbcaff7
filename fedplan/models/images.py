# SPDX-License-Identifier: Apache-2.0
"""Images as tensors, and the normalization that a model expects."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from fedplan.models.hub import is_hub_id, strip_hub_prefix


def image_tensor(value: Any, size: int, *, cubic: bool = False) -> Tensor:
    """An image as a uint8 RGB tensor of shape (3, size, size), resized if needed.

    `value` is a PIL image, encoded bytes, an array of integers (height x width, with channels last
    if any), or a dict with `bytes` or `path`, as in Hugging Face datasets. Resizing is bilinear, or
    bicubic with `cubic`, and does not keep the aspect ratio. Raises ValueError for an array of
    other numbers than integers from 0 to 255.
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

    `source` is a folder or a hub id (hub:org/name, may download). Values that the config does not
    have, and all values of a folder without preprocessor config, are 0.5.
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
