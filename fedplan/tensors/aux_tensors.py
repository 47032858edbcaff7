# SPDX-License-Identifier: Apache-2.0
"""Names of auxiliary tensors, which travel beside a param (such as its control variate).

An auxiliary tensor is called `param#kind`. The extra parts of an encoded tensor are named alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

SEPARATOR = "#"
"""Between the key of a param and the kind of the auxiliary tensor."""


def aux_name(key: str, kind: str) -> str:
    """Return the name of a param's auxiliary tensor.

    >>> aux_name("head.weight", "control")
    'head.weight#control'
    """
    return f"{key}{SEPARATOR}{kind}"


def aux_names(keys: Iterable[str], kinds: Iterable[str]) -> list[str]:
    """Return the names of all auxiliary tensors of these kinds, kind by kind."""
    return [aux_name(key, kind) for kind in kinds for key in keys]


def param_key(name: str) -> str:
    """Return the param's key from the name of the param, its auxiliary tensor or encoded part.

    >>> param_key("head.weight#control")
    'head.weight'
    """
    return name.partition(SEPARATOR)[0]


def is_aux(name: str) -> bool:
    """Return whether a name is of an auxiliary tensor or encoded part, not of a param."""
    return SEPARATOR in name


def only_aux(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the auxiliary tensors among some tensors."""
    return {name: value for name, value in values.items() if is_aux(name)}


def split_aux(
    values: Mapping[str, Tensor], kinds: tuple[str, ...]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Split a client's tensors into encoded values and auxiliary tensors of these kinds."""
    endings = tuple(SEPARATOR + kind for kind in kinds)
    aux = {name: value for name, value in values.items() if endings and name.endswith(endings)}
    return {name: value for name, value in values.items() if name not in aux}, aux
