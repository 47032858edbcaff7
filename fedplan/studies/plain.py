# SPDX-License-Identifier: Apache-2.0
"""Plain values: what can be written down as TOML or JSON, and read again as the same."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from math import isfinite
from typing import Any, cast

DEEPEST = 32
"""How deep values may be nested."""

_STRING = re.compile(r'"(?:[^"\\\n]|\\.)*"' + r"|'[^'\n]*'")
_BETWEEN = re.compile(r"[,=\[\]{}\n]")


def odd(value: Any, depth: int = 0) -> str:
    """Why a value is not the same once it is written down and read again; nothing if it is."""
    if depth > DEEPEST:
        return f"nested more than {DEEPEST} deep"
    if isinstance(value, dict | list):
        each = cast("Any", value.values() if isinstance(value, dict) else value)
        return next((fault for inner in each if (fault := odd(inner, depth + 1))), "")
    if value is not None and type(value) not in (str, int, float, bool):
        return f"{str(value)[:60]} is of {type(value).__name__}: write it as text or as a number"
    if type(value) is float and not isfinite(value):
        return f"{value} is no number that one can reckon with"
    if type(value) is str and any("\ud800" <= letter <= "\udfff" for letter in value):
        return f"{value[:60]!r} cannot be written as UTF-8"
    return ""


def read_toml(text: str) -> dict[str, Any]:
    """The values of a TOML text; a ValueError if it is none, or is nested too deep to be one."""
    # A dotted name of so many words takes tomllib the square of their number to read.
    bare = _STRING.sub("", text)
    if any(piece.count(".") > 2 * DEEPEST for piece in _BETWEEN.split(bare)):
        raise ValueError(f"a name in it has more than {2 * DEEPEST} dots")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def value_of(text: str) -> Any:
    """A value as TOML reads it; a bare word is text."""
    try:
        return read_toml(f"value = {text}")["value"]
    except (ValueError, KeyError):
        return text


def flat(said: Mapping[str, Any], under: str = "") -> dict[str, Any]:
    """Nested values by their dotted names."""
    found = dict[str, Any]()
    for name, value in said.items():
        found |= flat(value, f"{under}{name}.") if type(value) is dict else {under + name: value}
    return found
