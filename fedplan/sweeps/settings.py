# SPDX-License-Identifier: Apache-2.0
"""Settings of a sweep: the study fields that it varies with their values, and its seeds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from fedplan.studies.schema import ConfigError
from fedplan.studies.toml_values import parse_toml_value

SEED = "seed"
"""The field that differs between runs of one group; it is varied by seeds, not by settings."""
MAX_SEEDS = 10_000
"""The most seeds of a sweep."""


@dataclass(frozen=True)
class Setting:
    """A study field by its dotted name, as "train.lr", and the values that a sweep tries.

    The constructor raises ConfigError for the field "seed", and for missing or repeated values.
    """

    field: str
    values: tuple[Any, ...]

    def __post_init__(self) -> None:
        if self.field == SEED:
            raise ConfigError(
                "seed cannot be a setting: give the number of seeds as --seeds 5, or a list as "
                "--seeds 0,3,7"
            )
        if not self.values:
            raise ConfigError(f"{self.field} has no value: give one or more")
        if repeated := [v for i, v in enumerate(self.values) if v in self.values[:i]]:
            raise ConfigError(f"{self.field} has the value {repeated[0]!r} twice: give it once")


def parse_setting(text: str) -> Setting:
    """Parse a text of `--set`, such as `method.name=fedavg,fedper`; values are TOML or strings.

    Raises ConfigError for a text without field or "=", or with an empty value.
    """
    field, equals, values_text = text.partition("=")
    if not equals or not field.strip():
        raise ConfigError(f"--set is {text!r}: write it as section.field=value,value")
    values = split_values(values_text)
    if not all(values):
        raise ConfigError(f"--set {text}: a value is empty; for an empty string write ''")
    return Setting(field.strip(), tuple(map(parse_toml_value, values)))


def parse_settings(
    settings: Mapping[str, Sequence[Any]] | Iterable[str] | None,
) -> tuple[Setting, ...]:
    """Return the settings of a sweep.

    `settings`: a mapping from dotted fields to values, or texts of `--set`; None gives none. Raises
    ConfigError if a setting is invalid, or if a field is set twice.
    """
    if isinstance(settings, Mapping):
        by_field = cast("Mapping[str, Sequence[Any]]", settings)
        parsed = [Setting(field, tuple(values)) for field, values in by_field.items()]
    else:
        parsed = [parse_setting(text) for text in settings or ()]
    names = [setting.field for setting in parsed]
    if repeated := [name for i, name in enumerate(names) if name in names[:i]]:
        raise ConfigError(f"{repeated[0]} is set twice: give all its values at once, with commas")
    return tuple(parsed)


def parse_seeds(seeds: str | int | Sequence[int], first: int) -> tuple[int, ...]:
    """Return the seeds of a sweep: a number of seeds, counted from `first`, or the seeds of a list.

    Raises ConfigError for no seed, more than MAX_SEEDS, or the same seed twice.

    >>> parse_seeds("3", first=7)
    (7, 8, 9)
    >>> parse_seeds("0,3,7", first=7)
    (0, 3, 7)
    """
    try:
        numbers = [int(each) for each in seeds.split(",")] if isinstance(seeds, str) else seeds
    except ValueError:
        raise ConfigError(
            f"--seeds is {seeds!r}: give the number of seeds, or a list as 0,3,7"
        ) from None
    if isinstance(numbers, int) or (isinstance(seeds, str) and len(numbers) == 1):
        count = numbers if isinstance(numbers, int) else numbers[0]
        numbers = range(first, first + min(count, MAX_SEEDS + 1))
    if not 1 <= len(numbers) <= MAX_SEEDS or len(set(numbers)) < len(numbers):
        raise ConfigError(f"--seeds is {seeds!r}: give 1 to {MAX_SEEDS} seeds, none of them twice")
    return tuple(numbers)


def split_values(text: str) -> list[str]:
    """Split a text at commas outside of quotes and brackets, and strip each piece.

    Raises ConfigError if a quote or bracket is not closed.

    >>> split_values('share(), chain(share(), keep(head))')
    ['share()', 'chain(share(), keep(head))']
    """
    pieces, depth, quote, previous = [""], 0, "", ""
    for char in text:
        if quote:
            quote = "" if char == quote and previous != "\\" else quote
        elif char in "\"'":
            quote = char
        else:
            depth += (char in "([{") - (char in ")]}")
        if char == "," and not depth and not quote:
            pieces.append("")
        else:
            pieces[-1] += char
        previous = char
    if depth or quote:
        raise ConfigError(f"{text}: a quote or a bracket is not closed")
    return [piece.strip() for piece in pieces]
