# SPDX-License-Identifier: Apache-2.0
"""Examples: a client's rows as tensors, ready to be taken in batches."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast, final

import numpy as np
import torch
from torch import Tensor

from fedplan.data.content import told_apart
from fedplan.data.tables import values

if TYPE_CHECKING:
    from datasets import Dataset
from collections.abc import Callable
from typing import Protocol, runtime_checkable

from torch import nn

from fedplan.tensors.named import Batch

Loss = Callable[[nn.Module, Batch], Tensor]
"""The loss of a model on a batch."""

NO_LABEL = -100
"""Stands where nothing is to be predicted."""


class Examples(Protocol):
    """A client's examples, ready to be taken in batches."""

    def __len__(self) -> int: ...
    def batch(self, indices: Tensor) -> dict[str, Tensor]: ...


@runtime_checkable
class Seeded(Protocol):
    """Examples that are drawn anew for each turn, as masks are."""

    def seeded(self, seed: int) -> Examples: ...


@runtime_checkable
class Hollow(Protocol):
    """Examples whose inputs can be left out of a batch, where nobody reads them."""

    def hollow(self, indices: Tensor) -> dict[str, Tensor]: ...


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
    """Rows of tokens, with a label for each row or for each token.

    `follows` says that the labels are a text of their own, which a decoder is to write.
    """

    ids: Ragged
    pad: int
    labels: Tensor | Ragged
    segments: Ragged | None = None
    follows: bool = False

    def __len__(self) -> int:
        return len(self.ids.starts) - 1

    def batch(self, indices: Tensor) -> dict[str, Tensor]:
        """Some rows, filled up to the longest of them."""
        ids, inside = self.ids.padded(indices, self.pad)
        batch = {"input_ids": ids, "attention_mask": inside.long()}
        if self.segments is not None:
            batch["token_type_ids"] = self.segments.padded(indices, 0)[0]
        if not isinstance(self.labels, Ragged):
            return {**batch, "labels": self.labels[indices]}
        labels, real = self.labels.padded(indices, NO_LABEL)
        more = {"decoder_attention_mask": real.long()} if self.follows else {}
        return {**batch, **more, "labels": labels}


@final
@dataclass(frozen=True)
class Packed:
    """Rows of several texts each, where positions begin anew with each text.

    There is no attention mask: it is by the positions that a model keeps the texts apart, and what
    fills up a row is a text of one token each.
    """

    ids: Ragged
    labels: Ragged
    places: Ragged
    pad: int

    def __len__(self) -> int:
        return len(self.ids.starts) - 1

    def batch(self, indices: Tensor) -> dict[str, Tensor]:
        """Some rows, filled up to the longest of them."""
        return {
            "input_ids": self.ids.padded(indices, self.pad)[0],
            "position_ids": self.places.padded(indices, 0)[0],
            "labels": self.labels.padded(indices, NO_LABEL)[0],
        }


@final
@dataclass(frozen=True)
class Masked:
    """Blocks of tokens, some hidden: BERT's 15 %, of which 80 % masked and 10 % replaced.

    Each block's masks follow from its own key and the seed: a turn that trains takes a seed of its
    own, and no block changes another's masks.
    """

    blocks: Sequences
    keys: Tensor
    mask: int
    special: Tensor
    vocabulary: int
    share: float = 0.15
    seed: int = 0

    def __len__(self) -> int:
        return len(self.blocks)

    def seeded(self, seed: int) -> Masked:
        """The same blocks with other masks."""
        return replace(self, seed=seed)

    def batch(self, indices: Tensor) -> dict[str, Tensor]:
        """Some blocks with masks; at least one token of each is hidden, if it has any."""
        batch = self.blocks.batch(indices)
        ids = batch["input_ids"]
        noise = _noise(self.keys[indices], ids.shape[1], self.seed)
        plain = batch["attention_mask"].bool() & ~torch.isin(ids, self.special)
        draw = noise[..., 0].masked_fill(~plain, 2.0)
        hidden = plain & ((draw < self.share) | (draw == draw.amin(1, keepdim=True)))
        labels = ids.masked_fill(~hidden, NO_LABEL)
        return {**batch, "input_ids": self._hide(ids, hidden, noise[..., 1]), "labels": labels}

    def _hide(self, ids: Tensor, hidden: Tensor, how: Tensor) -> Tensor:
        other = ((how - 0.8) * 10 * self.vocabulary).long().clamp(0, self.vocabulary - 1)
        ids = torch.where(hidden & (how < 0.8), self.mask, ids)
        return torch.where(hidden & (how >= 0.8) & (how < 0.9), other, ids)


def keys_of(blocks: Ragged) -> Tensor:
    """A number for each block from its tokens; equal blocks have different ones."""
    starts = cast("list[int]", blocks.starts.tolist())
    flat = blocks.flat.numpy()
    held = (flat[start:end].tobytes() for start, end in pairwise(starts))
    marks = told_apart([hashlib.sha256(each).digest() for each in held])
    return torch.tensor([int.from_bytes(mark[:8], signed=True) for mark in marks]).long()


def _noise(keys: Tensor, width: int, seed: int) -> Tensor:
    """Two numbers of [0, 1] for each token of some blocks, from a block's key alone."""
    own = _mixed(keys.numpy().view(np.uint64) ^ _mixed(np.array([seed % 2**64], dtype=np.uint64)))
    steps = np.arange(2 * width, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    drawn = (_mixed(own[:, None] + steps) >> np.uint64(11)) * 2.0**-53
    return torch.from_numpy(drawn).float().reshape(len(keys), width, 2)


def _mixed(x: np.ndarray) -> np.ndarray:
    """SplitMix64's last step: each bit of a number moves each bit of what comes out."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


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

    def hollow(self, indices: Tensor) -> dict[str, Tensor]:
        """The labels of some pictures; in place of the pictures is what is not a number."""
        blank = torch.full((), torch.nan).expand(len(indices), *self.pixels.shape[1:])
        return {"pixel_values": blank, "labels": self.labels[indices]}


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
