# SPDX-License-Identifier: Apache-2.0
"""Params: the tensors of a model, or rows of fused tensors, each with its kind and block."""

from __future__ import annotations

from dataclasses import dataclass
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
"""Bytes per element, by dtype name."""
TRAINABLE_DTYPES = frozenset({"float64", "float32", "bfloat16", "float16"})
"""The dtypes that can be trained; params of other dtypes must stay frozen."""


class Kind(StrEnum):
    """The function of a param in a Transformer."""

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


PLACE_WORDS = frozenset({"body", "encoder", "decoder", "text", "vision", "fusion"})
"""The words of the plan language for positions."""


class Block(NamedTuple):
    """Identifies a block: its stack, such as encoder or vision, and its index in the stack."""

    stack: str
    number: int


@dataclass(frozen=True, slots=True)
class Rows:
    """Which rows of a fused tensor belong to one kind; `view(tensor)` selects them without a copy.

    Dimension `dim` is divided into `count` groups of `step` rows; of each group the `size` rows
    from `start` on are selected. One group per head is the interleaved layout of GPT-NeoX.
    """

    dim: int
    start: int
    size: int
    step: int
    count: int = 1

    def view(self, tensor: Tensor) -> Tensor:
        """A view of these rows of a tensor, of shape (..., count, size, ...)."""
        groups = cast("Tensor", tensor.unflatten(self.dim, (self.count, self.step)))
        return groups.narrow(self.dim + 1, self.start, self.size)

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of `view(tensor)` for a tensor of shape `whole`."""
        return (*whole[: self.dim], self.count, self.size, *whole[self.dim + 1 :])


@dataclass(frozen=True)
class Param:
    """A parameter of a model, or rows of a fused one, with kind and position; holds no values.

    `name`: the name in `named_parameters`. `rows`: the part of a fused tensor; None is the whole
    tensor. `shape`, `dtype` (as "float32"): of the tensor, or of `rows`. `block`: the index of the
    block in `stack` (encoder, vision ...), None outside blocks; `depth`: the number of blocks of
    the stack. `tags`: further words of the plan language, as bias or lora_a. `on`: the kinds that
    an adapter or norm acts on. `tied`: other names of the same tensor. `uncertain`: words that may
    or may not apply, because no layer map covers the param. Use `key` to identify a param.
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
    uncertain: frozenset[str] = frozenset()

    def __hash__(self) -> int:
        # A turn looks up thousands of params, and hashing all twelve fields is slow.
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(self.key)

    @cached_property
    def key(self) -> str:
        """Unique key within the model: the name, with the kind in brackets for rows of a tensor."""
        words = sorted(self.on) if self.kind is Kind.ADAPTER else [self.kind]
        return f"{self.name}[{'+'.join(words)}]" if self.rows else self.name

    @cached_property
    def block_id(self) -> Block | None:
        """The block that contains the param, or None."""
        return None if self.block is None else Block(self.stack, self.block)

    @cached_property
    def label(self) -> str:
        """The kind for a reader, after "common" or "own" if it is one of these, as "own prompt"."""
        return " ".join([*sorted(self.tags & {"common", "own"}), self.kind])

    @cached_property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of its values in its dtype."""
        return self.numel * ITEMSIZE[self.dtype]

    @cached_property
    def words(self) -> frozenset[str]:
        """The words of the plan language that apply to the param."""
        words = {"everything", str(self.kind), *self.tags} - {str(Kind.UNKNOWN)}
        if self.stack:
            words.add(self.stack)
        if self.block is not None:
            words.add("body")
        kernel = {Kind.QUERY, Kind.KEY, Kind.POSITION}
        if self.kind in kernel or not kernel.isdisjoint(self.on):
            words.add("kernel")
        return frozenset(words)

    @cached_property
    def uncertain_words(self) -> frozenset[str]:
        """Words that may apply; adapters and norms that act on an unknown may be kernel."""
        return self.uncertain | {"kernel"} if Kind.UNKNOWN in self.on else self.uncertain

    def view(self, tensor: Tensor) -> Tensor:
        """A view of the param's values in `tensor`, the model's tensor of its name."""
        return self.rows.view(tensor) if self.rows else tensor


Params = tuple[Param, ...]
"""All params of a model, in the order of `named_parameters`."""
