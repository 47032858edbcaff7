# SPDX-License-Identifier: Apache-2.0
"""The registry of layer maps: which module paths of an architecture are query, mlp, head ..."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace

from fedplan.models.layouts import FusedLayout, LayerMap, split_path
from fedplan.models.params import Kind

LAYER_MAPS: dict[str, LayerMap] = {}
"""Layer maps by `config.model_type`, class name, or class name with its module."""


@contextmanager
def restore_layer_maps() -> Generator[None]:
    """Context manager that undoes, on exit, all changes of LAYER_MAPS made in the body."""
    before = dict(LAYER_MAPS)
    try:
        yield
    finally:
        LAYER_MAPS.clear()
        LAYER_MAPS.update(before)


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
    as in `torch.nn.modules.transformer.Transformer`. The other arguments (like, blocks, fused,
    towers, cross, acts_on, tags, beside, kinds) and errors are as in `make_layer_map`.

    >>> layers = register_layer_map("my_vit", like="vit", query="attn.to_q", key="attn.to_k")
    """
    LAYER_MAPS[name] = make_layer_map(
        like=like,
        blocks=blocks,
        fused=fused,
        towers=towers,
        cross=cross,
        acts_on=acts_on,
        tags=tags,
        beside=beside,
        **kinds,
    )
    return LAYER_MAPS[name]


def make_layer_map(
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
    """Build a layer map from dotted module paths, without registering the map.

    Paths match anywhere in a parameter's name (see LayerMap). `like` names a registered map to
    extend: new entries are added or replace entries of the same path, new `blocks` replace all
    blocks. `blocks` maps each stack (encoder, decoder, text, vision) to the path of the list of
    blocks; each further keyword is a `Kind` with the paths of modules, as in `query="attn.q"`;
    both take several paths, separated by spaces. `fused` maps the path of a tensor that holds
    several kinds to a FusedLayout, `acts_on` the path of a norm to the kind that the norm acts on,
    `towers` the name of a submodule to a stack, `tags` a path to a further word; `cross` lists the
    paths of cross-attention. `beside` maps a stack to a list outside the stack that has one module
    per block. Raises ValueError for an unknown kind, and KeyError for an unknown `like`.
    """
    tags_by_path = dict.fromkeys(cross.split(), "cross") | dict(tags or {})
    layer_map = LayerMap(
        blocks=dict(blocks or {}),
        kinds={split_path(p): Kind(kind) for kind, paths in kinds.items() for p in paths.split()},
        fused={split_path(p): layout for p, layout in (fused or {}).items()},
        acts_on={split_path(p): Kind(kind) for p, kind in (acts_on or {}).items()},
        towers=dict(towers or {}),
        tags={split_path(p): tag for p, tag in tags_by_path.items()},
        beside=dict(beside or {}),
    )
    if not like:
        return layer_map
    old = LAYER_MAPS[like]
    names = [f.name for f in fields(LayerMap) if f.name != "library"]
    merged = {name: getattr(old, name) | getattr(layer_map, name) for name in names}
    merged["blocks"] = layer_map.blocks or old.blocks
    return replace(layer_map, **merged)


@contextmanager
def temporary_layer_map(name: str, layer_map: LayerMap) -> Generator[None]:
    """Context manager that registers a layer map under `name` (a model type or class name).

    The map then applies to models of any library. On exit the earlier map of that name, if any, is
    restored, also after an error.
    """
    earlier = LAYER_MAPS.get(name)
    LAYER_MAPS[name] = replace(layer_map, library="")
    try:
        yield
    finally:
        if earlier is None:
            del LAYER_MAPS[name]
        else:
            LAYER_MAPS[name] = earlier


def find_layer_map(module: object) -> LayerMap | None:
    """The registered layer map of a module itself, not of children or parents; or None.

    Looked up by `config.model_type`, then by class name with module, then by bare class name; a map
    with a `library` applies only to classes that come or derive from that library.
    """
    cls, config = type(module), getattr(module, "config", None)
    model_type = getattr(config, "model_type", None)
    keys = (model_type, f"{cls.__module__}.{cls.__qualname__}", cls.__name__)
    layer_maps = (LAYER_MAPS[key] for key in keys if key in LAYER_MAPS)
    return next((each for each in layer_maps if each.applies_to(cls)), None)
