# SPDX-License-Identifier: Apache-2.0
"""Fares: what travel costs in a federation, param by param."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fedplan.models.params import Param


def as_it_is(param: Param) -> int:
    """The bytes of a param."""
    return param.nbytes


@dataclass(frozen=True)
class Fare:
    """What travel costs: a shared param on its way up, and the tensors of its size beside it.

    `text` says it in words, if there is something to say. `folded` are the keys of what no client
    shares and the server may change in any round: both ends start with the same.
    """

    up: Callable[[Param], int] = as_it_is
    riders: int = 0
    text: str = ""
    folded: frozenset[str] = frozenset()
