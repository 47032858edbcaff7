# SPDX-License-Identifier: Apache-2.0
"""Exchanges: what travels between the server and one client in a round, each way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fedplan.errors import FedplanError
from fedplan.message import MessageError
from fedplan.params import Block
from fedplan.state import Tensors
from fedplan.turn import Turn


class Refused(FedplanError):
    """A client's answer to a server that asks for what was not agreed."""

    code = "refused"


class Lacking(FedplanError):
    """A client's answer if it does not have what the server believes that it has."""

    code = "lacking"


class Rejected(FedplanError):
    """A server's reason not to count one update. The round goes on with the others."""


@dataclass(frozen=True)
class Down:
    """What the server sends one client: what it asks, and the values that the client lacks.

    `versions` are those of the values. `basis` tells the versions of all that the client must then
    have. `heard` is the last round that the server heard from it. `anew` says that all is sent,
    because the client had lost what it was sent before. `run` is the id of the run.
    """

    request: str
    agreed: str
    turn: Turn
    values: dict[str, Tensor]
    versions: dict[str, int]
    basis: str = ""
    heard: int = 0
    anew: bool = False
    run: str = ""

    @property
    def nbytes(self) -> int:
        return nbytes(self.values)


@dataclass(frozen=True)
class Update:
    """What a client hands back: coded values, its weight, and its line of the ledger."""

    client: str
    request: str
    agreed: str
    values: dict[str, Tensor]
    weight: int
    line: dict[str, Any]

    @property
    def nbytes(self) -> int:
        return nbytes(self.values)


def nbytes(values: Tensors) -> int:
    """The bytes of some values, without any header."""
    return sum(v.numel() * v.element_size() for v in values.values())


def listed(scores: Mapping[Block, float]) -> list[Any]:
    """Scores of blocks as JSON."""
    return [[*block, score] for block, score in scores.items()]


def scored(found: Any) -> dict[Block, float]:
    """Scores from JSON."""
    try:
        return {Block(str(stack), int(number)): float(score) for stack, number, score in found}
    except (TypeError, ValueError) as error:
        raise MessageError(f"these are no scores of blocks: {str(found)[:60]}") from error
