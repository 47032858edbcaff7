# SPDX-License-Identifier: Apache-2.0
"""Plain values of TOML and JSON files: parsing, checks, and flattening to dotted names."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from math import isfinite
from typing import Any, cast

MAX_DEPTH = 32
"""Maximum nesting depth of values."""

_STRING = re.compile(r'"(?:[^"\\\n]|\\.)*"' + r"|'[^'\n]*'")
_KEY_SEPARATOR = re.compile(r"[,=\[\]{}\n]")


def unserializable_reason(value: Any, depth: int = 0) -> str:
    """Return why a value cannot be written to a TOML or JSON file and read unchanged; "" if it can.

    Rejects values nested deeper than MAX_DEPTH, types other than str, int, float, bool, None, dict
    and list, NaN and infinity, and strings that are not valid UTF-8. `depth`: nesting depth of
    `value`.
    """
    if depth > MAX_DEPTH:
        return f"nested more than {MAX_DEPTH} deep"
    if isinstance(value, dict | list):
        children = cast("Any", value.values() if isinstance(value, dict) else value)
        return next(
            (reason for child in children if (reason := unserializable_reason(child, depth + 1))),
            "",
        )
    if value is not None and type(value) not in (str, int, float, bool):
        return f"{str(value)[:60]} is a {type(value).__name__}: write it as a string or a number"
    if type(value) is float and not isfinite(value):
        return f"{value} is not a finite number"
    if type(value) is str and any("\ud800" <= character <= "\udfff" for character in value):
        return f"{value[:60]!r} cannot be written as UTF-8"
    return ""


def parse_toml(text: str) -> dict[str, Any]:
    """Parse a TOML text to nested dicts.

    Raises ValueError for invalid TOML, for values nested too deep, or a key with too many dots.
    """
    # tomllib needs quadratic time for a long dotted key, so these are rejected first.
    without_strings = _STRING.sub("", text)
    if any(piece.count(".") > 2 * MAX_DEPTH for piece in _KEY_SEPARATOR.split(without_strings)):
        raise ValueError(f"a key has more than {2 * MAX_DEPTH} dots")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def parse_toml_value(text: str) -> Any:
    """Parse one TOML value; a text that is not valid TOML is returned as a string."""
    try:
        return parse_toml(f"value = {text}")["value"]
    except (ValueError, KeyError):
        return text


def flatten_fields(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested dicts as one dict with dotted names, each name starting with `prefix`.

    >>> flatten_fields({"train": {"lr": 0.1}, "seed": 1})
    {'train.lr': 0.1, 'seed': 1}
    """
    fields = dict[str, Any]()
    for name, value in values.items():
        fields |= (
            flatten_fields(value, f"{prefix}{name}.")
            if type(value) is dict
            else {prefix + name: value}
        )
    return fields
