# SPDX-License-Identifier: Apache-2.0
"""Params: the named tensors of a model, or named rows of one, each with its kind and place."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, NamedTuple, cast

if TYPE_CHECKING:
    from torch import Tensor

ITEMSIZE = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
    "complex64": 8,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
}
"""Bytes of one number, by the name of its dtype."""
TRAINED = frozenset({"float64", "float32", "bfloat16", "float16"})
"""The dtypes in which a param can be trained; others are for weights that stay as they are."""


class Kind(StrEnum):
    """What a parameter does in a Transformer."""

    QUERY = "query"
    KEY = "key"
    VALUE = "value"
    OUT = "out"
    POSITION = "position"
    MLP = "mlp"
    ROUTER = "router"
    EXPERT = "expert"
    NORM = "norm"
    SCALE = "scale"
    EMBED = "embed"
    HEAD = "head"
    PROMPT = "prompt"
    ADAPTER = "adapter"
    UNKNOWN = "unknown"


PLACES = frozenset({"body", "encoder", "decoder", "text", "vision", "fusion"})
"""The words that say where a param stands."""


class Block(NamedTuple):
    """One block of a model: block 3 of an encoder is not block 3 of the decoder."""

    stack: str
    number: int


@dataclass(frozen=True, slots=True)
class Rows:
    """Some rows of a tensor: in each of `count` groups of `step` rows, `size` rows from `start`.

    One group is a contiguous range; one group per head is the interleaved layout of GPT-NeoX.
    Because the pattern is regular, the rows are always a view: nothing is copied to reach them.
    """

    dim: int
    start: int
    size: int
    step: int
    count: int = 1

    def view(self, tensor: Tensor) -> Tensor:
        """These rows of a tensor, sharing its memory."""
        groups = cast("Tensor", tensor.unflatten(self.dim, (self.count, self.step)))
        return groups.narrow(self.dim + 1, self.start, self.size)

    def over(self, rows: Tensor) -> Tensor:
        """These rows of what a layer gives, whose first dimension counts its outputs."""
        return replace(self, dim=0).view(rows)

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the view of a tensor of shape `whole`."""
        return (*whole[: self.dim], self.count, self.size, *whole[self.dim + 1 :])


@dataclass(frozen=True)
class Param:
    """A named tensor, or named rows of one, with its kind, block and stack.

    `on` holds the kinds that an adapter or a norm acts on; `tied` the other names of the tensor;
    `depth` the number of blocks of its stack; `tags` further words, such as bias or lora_a;
    `perhaps` the words of which nobody knows whether they are true of it.
    """

    name: str
    kind: Kind
    shape: tuple[int, ...]
    dtype: str = "float32"
    block: int | None = None
    stack: str = ""
    depth: int = 0
    rows: Rows | None = None
    tags: frozenset[str] = frozenset()
    on: frozenset[Kind] = frozenset()
    tied: tuple[str, ...] = ()
    perhaps: frozenset[str] = frozenset()

    def __hash__(self) -> int:
        # Params are looked up by the thousand in a turn, and of twelve fields a hash is slow.
        return hash(self.key)

    @cached_property
    def key(self) -> str:
        """The name that no other param of the model has: rows carry their kind."""
        words = sorted(self.on) if self.kind is Kind.ADAPTER else [self.kind]
        return f"{self.name}[{'+'.join(words)}]" if self.rows else self.name

    @cached_property
    def at(self) -> Block | None:
        """The block it stands in, if any."""
        return None if self.block is None else Block(self.stack, self.block)

    @cached_property
    def numel(self) -> int:
        """How many numbers it holds."""
        return prod(self.shape)

    @cached_property
    def nbytes(self) -> int:
        """How many bytes its values take in its own dtype."""
        return self.numel * ITEMSIZE[self.dtype]

    @cached_property
    def words(self) -> frozenset[str]:
        """The words of the plan language that are true of it."""
        words = {"everything", str(self.kind), *self.tags} - {str(Kind.UNKNOWN)}
        if self.stack:
            words.add(self.stack)
        if self.block is not None:
            words.add("body")
        if self._decides_attention():
            words.add("kernel")
        return frozenset(words)

    @cached_property
    def doubts(self) -> frozenset[str]:
        """The words in doubt: what acts on something unknown may be of the kernel."""
        return self.perhaps | {"kernel"} if Kind.UNKNOWN in self.on else self.perhaps

    def _decides_attention(self) -> bool:
        kernel = {Kind.QUERY, Kind.KEY, Kind.POSITION}
        return self.kind in kernel or not kernel.isdisjoint(self.on)

    def view(self, tensor: Tensor) -> Tensor:
        """Its own values within the model's tensor of its name, sharing memory."""
        return self.rows.view(tensor) if self.rows else tensor


Params = tuple[Param, ...]
"""All params of a model, in its own order."""
