# SPDX-License-Identifier: Apache-2.0
"""Examples: a client's rows as tensors, ready to be taken in batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, final

import torch
from torch import Generator, Tensor

from fedplan.tables import is_hub_id, values

if TYPE_CHECKING:
    from datasets import Dataset

NO_LABEL = -100
"""Stands where nothing is to be predicted."""


@dataclass(frozen=True)
class Ragged:
    """Rows of whole numbers of different lengths, end to end in one tensor."""

    flat: Tensor
    starts: Tensor

    @staticmethod
    def of(rows: Sequence[Sequence[int]]) -> Ragged:
        """These rows."""
        ends = torch.tensor([0, *map(len, rows)]).cumsum(0)
        flat = torch.tensor([number for row in rows for number in row], dtype=torch.int32)
        return Ragged(flat, ends)

    def padded(self, indices: Tensor, fill: int) -> tuple[Tensor, Tensor]:
        """Some rows, filled up to the longest of them, and where they are not filled up."""
        starts, ends = self.starts[indices], self.starts[indices + 1]
        steps = torch.arange(int((ends - starts).max()))
        inside = steps < (ends - starts)[:, None]
        places = (starts[:, None] + steps).clamp(max=len(self.flat) - 1)
        return torch.where(inside, self.flat[places].long(), fill), inside


@final
@dataclass(frozen=True)
class Sequences:
    """Rows of tokens, with a label for each row or for each token."""

    ids: Ragged
    pad: int
    labels: Tensor | Ragged
    segments: Ragged | None = None

    def __len__(self) -> int:
        return len(self.ids.starts) - 1

    def batch(self, indices: Tensor) -> dict[str, Tensor]:
        """Some rows, filled up to the longest of them."""
        ids, inside = self.ids.padded(indices, self.pad)
        batch = {"input_ids": ids, "attention_mask": inside.long()}
        if self.segments is not None:
            batch["token_type_ids"] = self.segments.padded(indices, 0)[0]
        if isinstance(self.labels, Ragged):
            return {**batch, "labels": self.labels.padded(indices, NO_LABEL)[0]}
        return {**batch, "labels": self.labels[indices]}


@final
@dataclass(frozen=True)
class Masked:
    """Blocks of tokens, some hidden: BERT's 15 %, of which 80 % masked and 10 % replaced.

    Each row's masks follow from the seed: a turn that trains takes a seed of its own.
    """

    blocks: Sequences
    mask: int
    special: Tensor
    vocabulary: int
    share: float = 0.15
    seed: int = 0
    noise: Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        lengths = self.blocks.ids.starts.diff()
        shape = (len(self), int(lengths.max()) if len(self) else 0, 2)
        noise = torch.rand(shape, generator=Generator().manual_seed(self.seed))
        object.__setattr__(self, "noise", noise)

    def __len__(self) -> int:
        return len(self.blocks)

    def seeded(self, seed: int) -> Masked:
        """The same blocks with other masks."""
        return replace(self, seed=seed)

    def batch(self, indices: Tensor) -> dict[str, Tensor]:
        """Some blocks with masks; at least one token of each is hidden, if it has any."""
        batch = self.blocks.batch(indices)
        ids = batch["input_ids"]
        noise = self.noise[indices, : ids.shape[1]]
        plain = batch["attention_mask"].bool() & ~torch.isin(ids, self.special)
        draw = noise[..., 0].masked_fill(~plain, 2.0)
        hidden = plain & ((draw < self.share) | (draw == draw.amin(1, keepdim=True)))
        labels = ids.masked_fill(~hidden, NO_LABEL)
        return {**batch, "input_ids": self._hide(ids, hidden, noise[..., 1]), "labels": labels}

    def _hide(self, ids: Tensor, hidden: Tensor, how: Tensor) -> Tensor:
        other = ((how - 0.8) * 10 * self.vocabulary).long().clamp(0, self.vocabulary - 1)
        ids = torch.where(hidden & (how < 0.8), self.mask, ids)
        return torch.where(hidden & (how >= 0.8) & (how < 0.9), other, ids)


@final
@dataclass(frozen=True)
class Images:
    """Pictures in red, green and blue bytes, one label each."""

    pixels: Tensor
    labels: Tensor
    mean: Tensor
    std: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: Tensor) -> dict[str, Tensor]:
        """Some pictures, scaled and centred."""
        pixels = (self.pixels[indices].float() / 255 - self.mean) / self.std
        return {"pixel_values": pixels, "labels": self.labels[indices]}


def pad_of(tokenizer: Any) -> int:
    """What a tokenizer fills up with; under the attention mask any number will do."""
    return 0 if tokenizer.pad_token_id is None else int(tokenizer.pad_token_id)


def filled(rows: Sequence[Sequence[int]], fill: int) -> Ragged:
    """Rows of at least one number: no model takes a text without tokens."""
    return Ragged.of([row or [fill] for row in rows])


def pieces(count: int, size: int = 1000) -> Iterator[slice]:
    """Slices of a table that fit in memory."""
    return (slice(start, start + size) for start in range(0, count, size))


def pictures(table: Dataset, column: str) -> Iterator[Any]:
    """A column's pictures one by one, as bytes, or as arrays where it holds numbers."""
    import datasets

    feature = cast("Any", table.features).get(column)
    if isinstance(feature, datasets.Image):
        table = table.cast_column(column, datasets.Image(decode=False))
    elif isinstance(feature, datasets.Array2D | datasets.Array3D | datasets.List):
        table = table.select_columns([column]).with_format("numpy")
    for piece in pieces(len(table)):
        yield from values(table.select(range(*piece.indices(len(table)))), column)


def drawn(value: Any, size: int, *, cubic: bool = False) -> Tensor:
    """A picture of this size as bytes: channels, height, width."""
    import numpy as np
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
        found = read(source, local_files_only=local)[0]
    sides = (found.get(name, [0.5] * 3) for name in ("image_mean", "image_std"))
    mean, std = (torch.tensor(side).reshape(3, 1, 1) for side in sides)
    return mean, std


def _bytes(array: Any) -> Any:
    if array.dtype.kind not in "iu" or array.min() < 0 or array.max() > 255:
        raise ValueError(f"an array of {array.dtype} must hold whole numbers from 0 to 255")
    flat = array[..., 0] if array.ndim == 3 and array.shape[2] == 1 else array
    return flat.astype("uint8")
