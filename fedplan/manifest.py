# SPDX-License-Identifier: Apache-2.0
"""Manifests: the params of a model written down, to read a plan against them anywhere."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from fedplan.errors import UnknownModel
from fedplan.params import ITEMSIZE, Kind, Param, Params, Rows

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
            "shape": _whole(said["shape"]),
            "rows": Rows(**said["rows"]) if "rows" in said else None,
            "tags": frozenset(_strings(said.get("tags", []))),
            "on": frozenset(Kind(k) for k in said.get("on", [])),
            "tied": tuple(_strings(said.get("tied", []))),
            "perhaps": frozenset(_strings(said.get("perhaps", []))),
        }
        param = Param(**said)
        if param.dtype not in ITEMSIZE or not isinstance(param.name, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"dtype {param.dtype!r}, name {param.name!r}")
        return param
    except (TypeError, ValueError, KeyError) as error:
        raise UnknownModel(f"{where} is not a param: {error!r}") from error


def _whole(values: Any) -> tuple[int, ...]:
    if not all(type(v) is int and v >= 0 for v in values):
        raise ValueError(f"shape {values!r}")
    return tuple(values)


def _strings(values: Any) -> tuple[str, ...]:
    if not all(type(v) is str for v in values):
        raise ValueError(f"strings {values!r}")
    return tuple(values)
