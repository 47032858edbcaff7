# SPDX-License-Identifier: Apache-2.0
"""Manifests: the params of a model written down, to read a plan against them anywhere."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from fedplan.errors import UnknownModel
from fedplan.models.params import ITEMSIZE, Kind, Param, Params, Rows

_EMPTY = {f.name: f.default for f in fields(Param)}


def written(params: Params) -> str:
    """The params as JSON, one a line."""
    return "[\n" + ",\n".join(json.dumps(_as_json(p)) for p in params) + "\n]\n"


def read(file: Path) -> Params:
    """The params of a manifest; anything else is an error that names the file and the entry."""
    try:
        entries = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UnknownModel(f"{file} is not a manifest: {error}") from error
    if not isinstance(entries, list):
        raise UnknownModel(f"{file} is not a manifest: it holds no list of params")
    found: list[Any] = entries  # pyright: ignore[reportUnknownVariableType]
    params = tuple(_from_json(entry, f"{file}, entry {i}") for i, entry in enumerate(found))
    keys = [p.key for p in params]
    if len(set(keys)) < len(keys):
        raise UnknownModel(f"{file} is not a manifest: a param stands in it twice")
    if not sum(p.numel for p in params):
        raise UnknownModel(f"{file} is not a manifest: there is no number in its params")
    return params


def _as_json(param: Param) -> dict[str, Any]:
    """What differs from a param's defaults."""
    said = {f.name: getattr(param, f.name) for f in fields(Param)}
    said |= {"tags": sorted(param.tags), "on": sorted(param.on), "shape": list(param.shape)}
    said["rows"] = asdict(param.rows) if param.rows else None
    said |= {"tied": list(param.tied), "perhaps": sorted(param.perhaps)}
    return {k: v for k, v in said.items() if v not in (_EMPTY[k], []) or k == "shape"}


def _from_json(entry: Any, where: str) -> Param:
    try:
        said = dict(entry)
        said |= {
            "kind": Kind(said["kind"]),
            "shape": tuple(_whole(size, "shape") for size in said["shape"]),
            "rows": _rows(said["rows"]) if said.get("rows") is not None else None,
            "tags": frozenset(_words(said.get("tags", []))),
            "on": frozenset(Kind(k) for k in said.get("on", [])),
            "tied": _words(said.get("tied", [])),
            "perhaps": frozenset(_words(said.get("perhaps", []))),
        }
        return _sound(Param(**said))
    except (AttributeError, TypeError, ValueError, KeyError, IndexError) as error:
        raise UnknownModel(f"{where} is not a param: {error!r}") from error


def _sound(param: Param) -> Param:
    """The param, if its fields are what they are called, and fit together."""
    _words([param.name, param.stack, param.dtype])
    block, depth = param.block, _whole(param.depth, "depth")
    if not param.name or not param.name.isprintable():
        raise ValueError(f"name {param.name!r}")
    if param.dtype not in ITEMSIZE:
        raise ValueError(f"dtype {param.dtype!r}")
    if block is not None and _whole(block, "block") >= depth:
        raise ValueError(f"block {block} of {depth}")
    if len(param.shape) > 16 or param.nbytes >= 2**62:
        raise ValueError(f"shape {param.shape}")
    rows = param.rows
    if rows and param.shape[rows.dim : rows.dim + 2] != (rows.count, rows.size):
        raise ValueError(f"rows {rows} of shape {param.shape}")
    return param


def _rows(said: Any) -> Rows:
    found = Rows(**{name: _whole(value, name) for name, value in said.items()})
    if found.start + found.size > found.step:
        raise ValueError(f"rows {found}")
    return found


def _whole(value: Any, name: str) -> int:
    if type(value) is not int or not 0 <= value < 2**62:
        raise ValueError(f"{name} {str(value)[:40]}")
    return value


def _words(values: Any) -> tuple[str, ...]:
    if not all(type(v) is str for v in values):
        raise ValueError(f"strings {str(values)[:40]}")
    return tuple(values)
