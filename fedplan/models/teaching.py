# SPDX-License-Identifier: Apache-2.0
"""Teaching: the rows of the architectures that are known, and how to add one."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace

from fedplan.models.layouts import Anatomy, Layout, path
from fedplan.models.params import Kind

KNOWN: dict[str, Anatomy] = {}


@contextmanager
def untaught() -> Generator[None]:
    """Forget afterwards what is taught meanwhile."""
    before = dict(KNOWN)
    try:
        yield
    finally:
        KNOWN.clear()
        KNOWN.update(before)


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

    A class name may be given with its module, as in `torch.nn.modules.transformer.Transformer`.
    `blocks` says per stack where its list of blocks is; each further word is a kind. Either takes
    paths separated by spaces: several, or several spellings of one. `like` starts from another row.

    >>> row = teach("my_vit", like="vit", query="attn.to_q", key="attn.to_k", value="attn.to_v")
    """
    KNOWN[name] = row_said(
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
    return KNOWN[name]


def row_said(
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
    """The row that the words of `teach` say."""
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
    return _over(KNOWN[like], row) if like else row


@contextmanager
def trying(name: str, row: Anatomy) -> Generator[None]:
    """An architecture known by a row, for as long as it is tried; whoever the row was made for."""
    was = KNOWN.get(name)
    KNOWN[name] = replace(row, of="")
    try:
        yield
    finally:
        if was is None:
            del KNOWN[name]
        else:
            KNOWN[name] = was


def known_row(module: object) -> Anatomy | None:
    """The row of a module: by its configuration's type, its class, or its class's bare name."""
    kind, config = type(module), getattr(module, "config", None)
    exact = f"{kind.__module__}.{kind.__qualname__}"
    keys = (getattr(config, "model_type", None), exact, kind.__name__)
    rows = (KNOWN[key] for key in keys if key in KNOWN)
    return next((row for row in rows if row.fits(kind)), None)


def _over(old: Anatomy, new: Anatomy) -> Anatomy:
    """A row laid over another: what the new one says is added, or heard instead."""
    maps = [f.name for f in fields(Anatomy) if f.name != "of"]
    said = {name: getattr(old, name) | getattr(new, name) for name in maps}
    said["blocks"] = new.blocks or old.blocks
    return replace(new, **said)
