# SPDX-License-Identifier: Apache-2.0
"""Layouts: how one architecture names its blocks and their parts, and how it fuses them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fedplan.models.params import Kind, Rows

Path = tuple[str, ...]
Layout = Callable[[Any, int], dict[Kind, Rows]]
"""From a configuration and the number of fused rows to the rows of each kind."""

QKV = (Kind.QUERY, Kind.KEY, Kind.VALUE)


@dataclass(frozen=True)
class Anatomy:
    """Where an architecture keeps its parts.

    Paths are dotted, relative, and match anywhere below the model: `self.query` is found in
    `bert.encoder.layer.3.attention.self.query.weight`. Of several that match, the longest is heard.
    `beside` are lists of modules with one for each block of a stack that has its blocks elsewhere.
    `of` is the package whose models the row is made for: a class of the same name that comes from
    elsewhere is another architecture. A row that a user teaches is for any.
    """

    blocks: Mapping[str, str] = field(default_factory=dict[str, str])
    kinds: Mapping[Path, Kind] = field(default_factory=dict[Path, Kind])
    fused: Mapping[Path, Layout] = field(default_factory=dict[Path, Layout])
    acts_on: Mapping[Path, Kind] = field(default_factory=dict[Path, Kind])
    towers: Mapping[str, str] = field(default_factory=dict[str, str])
    tags: Mapping[Path, str] = field(default_factory=dict[Path, str])
    beside: Mapping[str, str] = field(default_factory=dict[str, str])
    of: str = field(default="", compare=False)

    def fits(self, kind: type) -> bool:
        """Whether a class comes, or is derived, from the package that the row is made for."""
        return not self.of or any(c.__module__.split(".")[0] == self.of for c in kind.__mro__)


def path(text: str) -> Path:
    """The segments of a dotted path."""
    return tuple(text.split("."))


def occurs(pattern: Path, where: Path) -> bool:
    """Whether the segments of a pattern follow each other somewhere in a path; `*` is any one."""
    n = len(pattern)
    return any(_same(pattern, where[i : i + n]) for i in range(len(where) - n + 1))


def ends(pattern: Path, where: Path) -> bool:
    """Whether a path ends with the segments of a pattern; `*` is any one."""
    return len(where) >= len(pattern) and _same(pattern, where[len(where) - len(pattern) :])


def _same(pattern: Path, where: Path) -> bool:
    return all(want in ("*", have) for want, have in zip(pattern, where, strict=True))


def thirds(config: Any, rows: int) -> dict[Kind, Rows]:
    """Query, key and value as three equal ranges."""
    return ranges(rows // 3, rows // 3, rows // 3)


def per_head(config: Any, rows: int) -> dict[Kind, Rows]:
    """Query, key and value in turn for each head: GPT-NeoX, BLOOM, the first Falcons."""
    step = rows // config.num_attention_heads
    return {
        kind: Rows(0, i * step // 3, step // 3, step, config.num_attention_heads)
        for i, kind in enumerate(QKV)
    }


def grouped(config: Any, rows: int) -> dict[Kind, Rows]:
    """Three ranges, key and value with fewer heads than query: Phi-3."""
    heads, shared = config.num_attention_heads, config.num_key_value_heads
    width = rows // (heads + 2 * shared)
    return ranges(heads * width, shared * width, shared * width)


def falcon(config: Any, rows: int) -> dict[Kind, Rows]:
    """Falcon has had three layouts: grouped heads in turn, one shared head, and heads in turn."""
    heads = config.num_attention_heads
    if config.new_decoder_architecture:
        step = rows // config.num_kv_heads
        width = step // (heads // config.num_kv_heads + 2)
        spans = ((0, step - 2 * width), (step - 2 * width, width), (step - width, width))
        return {
            kind: Rows(0, start, size, step, config.num_kv_heads)
            for kind, (start, size) in zip(QKV, spans, strict=True)
        }
    if config.multi_query:
        width = rows // (heads + 2)
        return ranges(rows - 2 * width, width, width)
    return per_head(config, rows)


def key_value(config: Any, rows: int) -> dict[Kind, Rows]:
    """Key and value only, as two equal ranges: GPT-2's cross-attention."""
    return {
        Kind.KEY: Rows(0, 0, rows // 2, rows),
        Kind.VALUE: Rows(0, rows // 2, rows // 2, rows),
    }


def latent(config: Any, rows: int) -> dict[Kind, Rows]:
    """Key and value in turn for each head, from what both are pressed into: DeepSeek."""
    heads, width = config.num_attention_heads, config.qk_nope_head_dim
    step = rows // heads
    return {
        Kind.KEY: Rows(0, 0, width, step, heads),
        Kind.VALUE: Rows(0, width, step - width, step, heads),
    }


def ranges(query: int, key: int, value: int) -> dict[Kind, Rows]:
    """Three ranges of the given lengths, one after the other."""
    total = query + key + value
    spans = ((0, query), (query, key), (query + key, value))
    return {
        kind: Rows(0, start, size, total) for kind, (start, size) in zip(QKV, spans, strict=True)
    }


LAYOUTS: dict[str, Layout] = {
    layout.__name__: layout for layout in (thirds, per_head, grouped, falcon, key_value, latent)
}
"""The layouts by name, as a study says them."""
