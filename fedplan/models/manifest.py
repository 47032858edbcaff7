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
    lines = list[str]()
    for param in params:
        values = {f.name: getattr(param, f.name) for f in fields(Param)}
        values |= {"tags": sorted(param.tags), "on": sorted(param.on), "shape": list(param.shape)}
        values["rows"] = asdict(param.rows) if param.rows else None
        values |= {"tied": list(param.tied), "uncertain": sorted(param.uncertain)}
        kept = {k: v for k, v in values.items() if v not in (_DEFAULTS[k], []) or k == "shape"}
        lines.append(json.dumps(kept))
    return "[\n" + ",\n".join(lines) + "\n]\n"


def read_manifest(file: Path) -> Params:
    """Read the params of a manifest file, as written by `manifest_json`.

    Raises UnknownModel, with the file and the number of the param, if the file cannot be read, is
    no JSON list, or has an invalid or repeated param, or only params without elements.
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


def _from_json(entry: Any, location: str) -> Param:
    """Make a param from a JSON object, the `entry` of a manifest.

    Raises UnknownModel, starting with `location`, if a field is missing, unknown or of a wrong type
    or value, or if fields contradict each other.
    """
    try:
        values = dict(entry)
        rows = values.get("rows")
        values |= {
            "kind": Kind(values["kind"]),
            "shape": tuple(_require_size(size, "shape") for size in values["shape"]),
            "rows": None
            if rows is None
            else Rows(**{name: _require_size(value, name) for name, value in rows.items()}),
            "tags": frozenset(_require_strings(values.get("tags", []))),
            "on": frozenset(Kind(k) for k in values.get("on", [])),
            "tied": _require_strings(values.get("tied", [])),
            "uncertain": frozenset(_require_strings(values.get("uncertain", []))),
        }
        param = Param(**values)
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
        part = param.rows
        if part and part.start + part.size > part.step:
            raise ValueError(f"rows {part}")
        if part and param.shape[part.dim : part.dim + 2] != (part.count, part.size):
            raise ValueError(f"rows {part} of shape {param.shape}")
        return param
    except (AttributeError, TypeError, ValueError, KeyError, IndexError) as error:
        raise UnknownModel(f"{location} is not a param: {error!r}") from error


def _require_size(value: Any, name: str) -> int:
    if type(value) is not int or not 0 <= value < 2**62:
        raise ValueError(f"{name} {str(value)[:40]}")
    return value


def _require_strings(values: Any) -> tuple[str, ...]:
    if not all(type(v) is str for v in values):
        raise ValueError(f"strings {str(values)[:40]}")
    return tuple(values)
