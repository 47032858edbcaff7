# SPDX-License-Identifier: Apache-2.0
"""Layer maps: which module paths of an architecture are query, mlp, head, and how tensors fuse."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any

from fedplan.models.params import Kind, Rows

Path = tuple[str, ...]
"""The segments of a dotted module path; `*` matches any segment."""
FusedLayout = Callable[[Any, int], dict[Kind, Rows]]
"""From the config of a model and the number of rows of a fused tensor: the rows of each kind."""

QKV = (Kind.QUERY, Kind.KEY, Kind.VALUE)


@dataclass(frozen=True)
class LayerMap:
    """The layer map of an architecture: the kind of each module path. Made by `register_layer_map`.

    Paths are relative and match anywhere in a parameter's name: `self.query` matches
    `bert.encoder.layer.3.attention.self.query.weight`. The longest matching path wins. Fields are
    the arguments of `register_layer_map`, with paths as tuples; `library` is the package of the
    model classes that the map is for, empty for any.
    """

    blocks: Mapping[str, str] = field(default_factory=dict[str, str])
    kinds: Mapping[Path, Kind] = field(default_factory=dict[Path, Kind])
    fused: Mapping[Path, FusedLayout] = field(default_factory=dict[Path, FusedLayout])
    acts_on: Mapping[Path, Kind] = field(default_factory=dict[Path, Kind])
    towers: Mapping[str, str] = field(default_factory=dict[str, str])
    tags: Mapping[Path, str] = field(default_factory=dict[Path, str])
    beside: Mapping[str, str] = field(default_factory=dict[str, str])
    library: str = field(default="", compare=False)


def split_path(text: str) -> Path:
    """The segments of a dotted path."""
    return tuple(text.split("."))


def path_contains(pattern: Path, path: Path) -> bool:
    """Whether a path contains the segments of a pattern in sequence; `*` matches any segment."""
    n = len(pattern)
    return any(_matches(pattern, path[i : i + n]) for i in range(len(path) - n + 1))


def path_ends_with(pattern: Path, path: Path) -> bool:
    """Whether a path ends with the segments of a pattern; `*` matches any segment."""
    return len(path) >= len(pattern) and _matches(pattern, path[len(path) - len(pattern) :])


def _matches(pattern: Path, path: Path) -> bool:
    return all(p in ("*", segment) for p, segment in zip(pattern, path, strict=True))


def thirds(config: Any, rows: int) -> dict[Kind, Rows]:
    """Query, key and value as three equal ranges, one after the other."""
    return qkv_ranges(rows // 3, rows // 3, rows // 3)


def per_head(config: Any, rows: int) -> dict[Kind, Rows]:
    """Query, key and value interleaved by head: GPT-NeoX, BLOOM, the first Falcons."""
    heads = config.num_attention_heads
    step = rows // heads
    return {k: Rows(0, i * step // 3, step // 3, step, heads) for i, k in enumerate(QKV)}


def grouped(config: Any, rows: int) -> dict[Kind, Rows]:
    """Three ranges with fewer key and value heads than query heads: Phi-3."""
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    width = rows // (heads + 2 * kv_heads)
    return qkv_ranges(heads * width, kv_heads * width, kv_heads * width)


def falcon(config: Any, rows: int) -> dict[Kind, Rows]:
    """Query, key and value of Falcon, in one of three layouts by the config."""
    heads = config.num_attention_heads
    if config.new_decoder_architecture:
        step = rows // config.num_kv_heads
        width = step // (heads // config.num_kv_heads + 2)
        ranges = qkv_ranges(step - 2 * width, width, width)
        return {kind: replace(each, count=config.num_kv_heads) for kind, each in ranges.items()}
    if config.multi_query:
        width = rows // (heads + 2)
        return qkv_ranges(rows - 2 * width, width, width)
    return per_head(config, rows)


def key_value(config: Any, rows: int) -> dict[Kind, Rows]:
    """Key and value as two equal ranges: GPT-2's cross-attention."""
    half = rows // 2
    return {Kind.KEY: Rows(0, 0, half, rows), Kind.VALUE: Rows(0, half, half, rows)}


def latent(config: Any, rows: int) -> dict[Kind, Rows]:
    """Key and value interleaved by head, projected from one latent vector: DeepSeek.

    The `rows` rows are divided equally among the heads; of each head the first
    `config.qk_nope_head_dim` rows are key, the others value.
    """
    heads, width = config.num_attention_heads, config.qk_nope_head_dim
    value = Rows(0, width, rows // heads - width, rows // heads, heads)
    return {Kind.KEY: Rows(0, 0, width, rows // heads, heads), Kind.VALUE: value}


def qkv_ranges(query: int, key: int, value: int) -> dict[Kind, Rows]:
    """Query, key and value as consecutive ranges of these lengths."""
    total = query + key + value
    spans = zip(QKV, (0, query, query + key), (query, key, value), strict=True)
    return {kind: Rows(0, start, size, total) for kind, start, size in spans}


LAYOUTS: dict[str, FusedLayout] = {
    layout.__name__: layout for layout in (thirds, per_head, grouped, falcon, key_value, latent)
}
"""The layouts by name, as used in a study's model.layer_map."""


LAYER_MAPS: dict[str, LayerMap] = {}
"""Layer maps by `config.model_type`, class name, or class name with its module."""


def register_layer_map(
    name: str,
    *,
    like: str = "",
    blocks: Mapping[str, str] | None = None,
    fused: Mapping[str, FusedLayout] | None = None,
    towers: Mapping[str, str] | None = None,
    cross: str = "",
    acts_on: Mapping[str, str] | None = None,
    tags: Mapping[str, str] | None = None,
    beside: Mapping[str, str] | None = None,
    **kinds: str,
) -> LayerMap:
    """Register and return the layer map of an architecture; a map of the same name is replaced.

    `name` is a `config.model_type`, or the class name of a plain module, alone or with its module,
    as in `torch.nn.modules.transformer.Transformer`. Paths are dotted and match anywhere in a
    parameter's name (see LayerMap). `like` names a registered map to extend: new entries are added
    or replace entries of the same path, new `blocks` replace all blocks. `blocks` maps each stack
    (encoder, decoder, text, vision) to the path of the list of blocks; each further keyword is a
    `Kind` with the paths of modules, as in `query="attn.q"`; both take several paths, separated by
    spaces. `fused` maps the path of a tensor that holds several kinds to a FusedLayout, `acts_on`
    the path of a norm to the kind that the norm acts on, `towers` the name of a submodule to a
    stack, `tags` a path to a further word; `cross` lists the paths of cross-attention. `beside`
    maps a stack to a list outside the stack that has one module per block. Raises ValueError for an
    unknown kind, and KeyError for an unknown `like`.

    >>> layers = register_layer_map("my_vit", like="vit", query="attn.to_q", key="attn.to_k")
    """
    tags_by_path = dict.fromkeys(cross.split(), "cross") | dict(tags or {})
    new = LayerMap(
        blocks=dict(blocks or {}),
        kinds={split_path(p): Kind(kind) for kind, paths in kinds.items() for p in paths.split()},
        fused={split_path(p): layout for p, layout in (fused or {}).items()},
        acts_on={split_path(p): Kind(kind) for p, kind in (acts_on or {}).items()},
        towers=dict(towers or {}),
        tags={split_path(p): tag for p, tag in tags_by_path.items()},
        beside=dict(beside or {}),
    )
    if like:
        old, names = LAYER_MAPS[like], [f.name for f in fields(LayerMap) if f.name != "library"]
        merged: dict[str, Any] = {n: getattr(old, n) | getattr(new, n) for n in names}
        merged["blocks"] = new.blocks or old.blocks
        new = LayerMap(**merged)
    LAYER_MAPS[name] = new
    return new


@contextmanager
def restore_layer_maps() -> Generator[None]:
    """Context manager that undoes, on exit, all changes of LAYER_MAPS made in the body."""
    before = dict(LAYER_MAPS)
    try:
        yield
    finally:
        LAYER_MAPS.clear()
        LAYER_MAPS.update(before)


def find_layer_map(module: object) -> LayerMap | None:
    """The registered layer map of a module itself, not of children or parents; or None.

    Looked up by `config.model_type`, then by class name with module, then by bare class name; a map
    with a `library` applies only to classes of that library.
    """
    cls, config = type(module), getattr(module, "config", None)
    model_type: Any = getattr(config, "model_type", None)
    for key in (model_type, f"{cls.__module__}.{cls.__qualname__}", cls.__name__):
        if layer_map := LAYER_MAPS.get(key):
            libraries = {base.__module__.split(".")[0] for base in cls.__mro__}
            if not layer_map.library or layer_map.library in libraries:
                return layer_map
    return None
