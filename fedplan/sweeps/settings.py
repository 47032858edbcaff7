# SPDX-License-Identifier: Apache-2.0
"""Settings: the fields that a sweep varies, each with the values that it tries."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from fedplan.studies.plain import value_of
from fedplan.studies.schema import ConfigError

SEED = "seed"
"""The field that tells runs of one group apart: it is not varied as the others are."""
MOST = 10_000
"""Seeds of a sweep: more were surely not meant."""


@dataclass(frozen=True)
class Setting:
    """A field of a study by its dotted name, and the values that it takes one after the other."""

    field: str
    values: tuple[Any, ...]

    def __post_init__(self) -> None:
        if self.field == SEED:
            raise ConfigError("seed is set: say how many seeds by --seeds 5, or which by 0,3,7")
        if not self.values:
            raise ConfigError(f"{self.field} has no value: say at least one")
        if again := [v for i, v in enumerate(self.values) if v in self.values[:i]]:
            raise ConfigError(f"{self.field} has {again[0]!r} twice: say each value once")


def read_setting(text: str) -> Setting:
    """A setting as `--set` says it: `method.name=fedavg,fedper`."""
    where, sign, said = text.partition("=")
    if not sign or not where.strip():
        raise ConfigError(f"--set is section.field=value,value, not {text!r}")
    values = split(said)
    if not all(values):
        raise ConfigError(f"--set {text}: a value is empty; for an empty text write ''")
    return Setting(where.strip(), tuple(map(value_of, values)))


def settings_of(said: Mapping[str, Sequence[Any]] | Iterable[str] | None) -> tuple[Setting, ...]:
    """Settings as a person types them, or from Python: fields with lists of values."""
    if isinstance(said, Mapping):
        fields = cast("Mapping[str, Sequence[Any]]", said)
        found = [Setting(field, tuple(values)) for field, values in fields.items()]
    else:
        found = [read_setting(text) for text in said or ()]
    names = [each.field for each in found]
    if again := [name for i, name in enumerate(names) if name in names[:i]]:
        raise ConfigError(f"{again[0]} is set twice: say all of its values at once, with commas")
    return tuple(found)


def seeds_of(said: str | int | Sequence[int], first: int) -> tuple[int, ...]:
    """So many seeds, from the study's own on; or those that are listed.

    >>> seeds_of("3", first=7)
    (7, 8, 9)
    >>> seeds_of("0,3,7", first=7)
    (0, 3, 7)
    """
    try:
        listed = [int(each) for each in said.split(",")] if isinstance(said, str) else said
    except ValueError:
        raise ConfigError(f"--seeds is {said!r}: say how many, or which as 0,3,7") from None
    if isinstance(listed, int) or (isinstance(said, str) and len(listed) == 1):
        count = listed if isinstance(listed, int) else listed[0]
        listed = range(first, first + min(count, MOST + 1))
    if not 1 <= len(listed) <= MOST or len(set(listed)) < len(listed):
        raise ConfigError(f"--seeds is {said!r}: say one or more, each once, {MOST} at most")
    return tuple(listed)


def split(text: str) -> list[str]:
    """A text at its commas, but for those within quotes or brackets.

    >>> split('share(), chain(share(), keep(head))')
    ['share()', 'chain(share(), keep(head))']
    """
    pieces, depth, quote, before = [""], 0, "", ""
    for letter in text:
        if quote:
            quote = "" if letter == quote and before != "\\" else quote
        elif letter in "\"'":
            quote = letter
        else:
            depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and not depth and not quote:
            pieces.append("")
        else:
            pieces[-1] += letter
        before = letter
    if depth or quote:
        raise ConfigError(f"{text}: a quote or a bracket is not closed")
    return [piece.strip() for piece in pieces]
