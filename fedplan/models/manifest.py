# SPDX-License-Identifier: Apache-2.0
"""Manifests: JSON files with the params of a model, to check plans without the model."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from fedplan.errors import UnknownModel
from fedplan.models.params import ITEMSIZE, Kind, Param, Params, Rows

_DEFAULTS = {f.name: f.default for f in fields(Param)}


def manifest_json(params: Params) -> str:
    """The params as a JSON list, one per line; fields with default values are left out."""
    return "[\n" + ",\n".join(json.dumps(_as_json(p)) for p in params) + "\n]\n"


def read_manifest(file: Path) -> Params:
    """The params in a manifest file.

    Raises UnknownModel, with the file and the entry, if the file cannot be read, has an invalid or
    repeated param, or only empty ones.
    """
    try:
        entries = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UnknownModel(f"{file} is not a manifest: {error}") from error
    if not isinstance(entries, list):
        raise UnknownModel(f"{file} is not a manifest: it is not a list of params")
    items: list[Any] = entries  # pyright: ignore[reportUnknownVariableType]
    params = tuple(_from_json(item, f"{file}, entry {i}") for i, item in enumerate(items))
    keys = [p.key for p in params]
    if len(set(keys)) < len(keys):
        raise UnknownModel(f"{file} is not a manifest: it has a param twice")
    if not sum(p.numel for p in params):
        raise UnknownModel(f"{file} is not a manifest: its params have no elements")
    return params


def _as_json(param: Param) -> dict[str, Any]:
    """The fields of a param that differ from their defaults, and its shape, as JSON values."""
    values = {f.name: getattr(param, f.name) for f in fields(Param)}
    values |= {"tags": sorted(param.tags), "on": sorted(param.on), "shape": list(param.shape)}
    values["rows"] = asdict(param.rows) if param.rows else None
    values |= {"tied": list(param.tied), "perhaps": sorted(param.perhaps)}
    return {k: v for k, v in values.items() if v not in (_DEFAULTS[k], []) or k == "shape"}


def _from_json(entry: Any, location: str) -> Param:
    """The param of a JSON entry; raises UnknownModel, with `location`, if it is invalid."""
    try:
        values = dict(entry)
        values |= {
            "kind": Kind(values["kind"]),
            "shape": tuple(_require_size(size, "shape") for size in values["shape"]),
            "rows": _rows(values["rows"]) if values.get("rows") is not None else None,
            "tags": frozenset(_require_strings(values.get("tags", []))),
            "on": frozenset(Kind(k) for k in values.get("on", [])),
            "tied": _require_strings(values.get("tied", [])),
            "perhaps": frozenset(_require_strings(values.get("perhaps", []))),
        }
        return _require_consistent(Param(**values))
    except (AttributeError, TypeError, ValueError, KeyError, IndexError) as error:
        raise UnknownModel(f"{location} is not a param: {error!r}") from error


def _require_consistent(param: Param) -> Param:
    """The param itself; raises ValueError if a field has a wrong type or value."""
    _require_strings([param.name, param.stack, param.dtype])
    block, depth = param.block, _require_size(param.depth, "depth")
    if not param.name or not param.name.isprintable():
        raise ValueError(f"name {param.name!r}")
    if param.dtype not in ITEMSIZE:
        raise ValueError(f"dtype {param.dtype!r}")
    if block is not None and _require_size(block, "block") >= depth:
        raise ValueError(f"block {block} of {depth}")
    if len(param.shape) > 16 or param.nbytes >= 2**62:
        raise ValueError(f"shape {param.shape}")
    rows = param.rows
    if rows and param.shape[rows.dim : rows.dim + 2] != (rows.count, rows.size):
        raise ValueError(f"rows {rows} of shape {param.shape}")
    return param


def _rows(entry: Any) -> Rows:
    """The Rows of a JSON entry; raises ValueError or TypeError if they are invalid."""
    rows = Rows(**{name: _require_size(value, name) for name, value in entry.items()})
    if rows.start + rows.size > rows.step:
        raise ValueError(f"rows {rows}")
    return rows


def _require_size(value: Any, name: str) -> int:
    if type(value) is not int or not 0 <= value < 2**62:
        raise ValueError(f"{name} {str(value)[:40]}")
    return value


def _require_strings(values: Any) -> tuple[str, ...]:
    if not all(type(v) is str for v in values):
        raise ValueError(f"strings {str(values)[:40]}")
    return tuple(values)
