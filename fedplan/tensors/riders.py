# SPDX-License-Identifier: Apache-2.0
"""Riders: tensors that travel beside a param, such as its control; and the names that tell them.

This is the only place that knows how such a name is made. A codec's pieces are named alike: what
comes before the sign is the param.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

SIGN = "#"


def rider(key: str, kind: str) -> str:
    """The name of what rides beside a param.

    >>> rider("head.weight", "control")
    'head.weight#control'
    """
    return f"{key}{SIGN}{kind}"


def riders_of(keys: Iterable[str], kinds: Iterable[str]) -> list[str]:
    """The names of all that rides beside some params."""
    return [rider(key, kind) for kind in kinds for key in keys]


def param_of(name: str) -> str:
    """The param that a rider, or a piece of a coded tensor, belongs to.

    >>> param_of("head.weight#control")
    'head.weight'
    """
    return name.partition(SIGN)[0]


def is_rider(name: str) -> bool:
    """Whether a name is of something beside a param."""
    return SIGN in name


def beside(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Of some values, those that are beside params."""
    return {name: value for name, value in values.items() if is_rider(name)}


def split_riders(
    values: Mapping[str, Tensor], kinds: tuple[str, ...]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What a client sent, as coded values and riders of these kinds."""
    ends = tuple(SIGN + kind for kind in kinds)
    riders = {name: value for name, value in values.items() if ends and name.endswith(ends)}
    return {name: value for name, value in values.items() if name not in riders}, riders
