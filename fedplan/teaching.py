# SPDX-License-Identifier: Apache-2.0
"""Teaching: the rows of the architectures that are known, and how to add one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace

from fedplan.anatomy import Anatomy, Layout, path
from fedplan.params import Kind

KNOWN: dict[str, Anatomy] = {}


def teach(
    name: str,
    *,
    like: str = "",
    blocks: Mapping[str, str] | None = None,
    fused: Mapping[str, Layout] | None = None,
    towers: Mapping[str, str] | None = None,
    cross: str = "",
    acts_on: Mapping[str, str] | None = None,
    tags: Mapping[str, str] | None = None,
    beside: Mapping[str, str] | None = None,
    **kinds: str,
) -> Anatomy:
    """Teach fedplan an architecture: a `config.model_type`, or the class name of a plain module.

    `blocks` says per stack where its list of blocks is; each further word is a kind. Either takes
    paths separated by spaces: several, or several spellings of one. `like` starts from another row.

    >>> row = teach("my_vit", like="vit", query="attn.to_q", key="attn.to_k", value="attn.to_v")
    """
    words = dict.fromkeys(cross.split(), "cross") | dict(tags or {})
    row = Anatomy(
        blocks=dict(blocks or {}),
        kinds={path(p): Kind(kind) for kind, paths in kinds.items() for p in paths.split()},
        fused={path(p): layout for p, layout in (fused or {}).items()},
        acts_on={path(p): Kind(kind) for p, kind in (acts_on or {}).items()},
        towers=dict(towers or {}),
        tags={path(p): tag for p, tag in words.items()},
        beside=dict(beside or {}),
    )
    KNOWN[name] = _over(KNOWN[like], row) if like else row
    return KNOWN[name]


def _over(old: Anatomy, new: Anatomy) -> Anatomy:
    """A row laid over another: what the new one says is added, or heard instead."""
    said = {f.name: getattr(old, f.name) | getattr(new, f.name) for f in fields(Anatomy)}
    said["blocks"] = new.blocks or old.blocks
    return replace(old, **said)
