# SPDX-License-Identifier: Apache-2.0
"""Messages: what a server and a client say to each other in a round, as values and as bytes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fedplan.errors import FedplanError
from fedplan.federation.identity import is_id
from fedplan.language.turn import Turn
from fedplan.models.params import Block
from fedplan.tensors.message import Message
from fedplan.tensors.named import nbytes
from fedplan.tensors.riders import split_riders
from fedplan.tensors.serialization import JSON, SerializationError, packed, unpacked


class Refused(FedplanError):
    """A client's answer to a server that asks for what was not agreed."""

    code = "refused"


class Lacking(FedplanError):
    """A client's answer if it does not have what the server believes that it has."""

    code = "lacking"


class Rejected(FedplanError):
    """A server's reason not to count one update. The round goes on with the others."""


@dataclass(frozen=True)
class Request:
    """What the server sends one client: what it asks, and the values that the client lacks.

    `versions` are those of the values. `basis` tells the versions of all that the client must then
    have. `heard` is the last round that the server heard from it. `anew` says that all is sent,
    because the client had lost what it was sent before. `run` is the id of the run. Where sums are
    masked, `base` are the digests of all that the round starts from, and `attempt` says how often
    its sum was begun.
    """

    name: str
    agreed: str
    turn: Turn
    values: dict[str, Tensor]
    versions: dict[str, int]
    basis: str = ""
    heard: int = 0
    anew: bool = False
    run: str = ""
    base: dict[str, str] = field(default_factory=dict[str, str])
    attempt: int = 1

    @property
    def nbytes(self) -> int:
        return nbytes(self.values)


@dataclass(frozen=True)
class Update:
    """What a client hands back: coded values, riders, its weight, and its line of the ledger."""

    client: str
    request: str
    agreed: str
    values: dict[str, Tensor]
    weight: int
    line: dict[str, Any]
    riders: dict[str, Tensor] = field(default_factory=dict[str, Tensor])

    @property
    def nbytes(self) -> int:
        return nbytes(self.values) + nbytes(self.riders)


def listed(scores: Mapping[Block, float]) -> list[Any]:
    """Scores of blocks as JSON."""
    return [[*block, score] for block, score in scores.items()]


def asked_of(turn: Turn) -> str:
    """The digest of what a server says of a round beside its values.

    It is the phase, and the scores that all choose by: what a site trains follows from both.
    """
    scores = sorted(listed(turn.scores)) if turn.scores is not None else None
    return hashlib.sha256(json.dumps([turn.phase, scores]).encode()).hexdigest()


def scored(found: Any) -> dict[Block, float]:
    """Scores from JSON."""
    try:
        return {Block(str(stack), int(number)): float(score) for stack, number, score in found}
    except (TypeError, ValueError) as error:
        raise SerializationError(f"these are no scores of blocks: {str(found)[:60]}") from error


def request_header(request: Request) -> dict[str, JSON]:
    """What a request says, without its values."""
    turn = request.turn
    return {
        "request": request.name,
        "agreed": request.agreed,
        "round": turn.round,
        "client": turn.client,
        "phase": turn.phase,
        "traits": dict(turn.traits),
        "scores": listed(turn.scores) if turn.scores is not None else None,
        "versions": dict(request.versions),
        "basis": request.basis,
        "heard": request.heard,
        "anew": request.anew,
        "run": request.run,
        **({"base": dict(request.base), "attempt": request.attempt} if request.base else {}),
    }


def request_message(request: Request) -> Message:
    """A request as a message."""
    return packed(request.values, request_header(request))


def request_of(message: Message) -> Request:
    """A request from its message."""
    values, said = unpacked(message)
    turn = Turn(
        round=_read(said, "round", int),
        client=_read(said, "client", str),
        phase=_read(said, "phase", str),
        traits=_words(said, "traits", str),
        scores=scored(said["scores"]) if said.get("scores") is not None else None,
    )
    return Request(
        name=_read(said, "request", str),
        agreed=_read(said, "agreed", str),
        turn=turn,
        values=values,
        versions=_words(said, "versions", int),
        basis=_read(said, "basis", str),
        heard=_read(said, "heard", int),
        anew=_read(said, "anew", bool),
        run=_read(said, "run", str),
        **({"base": _words(said, "base", str)} if "base" in said else {}),
        **({"attempt": _read(said, "attempt", int)} if "base" in said else {}),
    )


def run_of(message: Message) -> str:
    """The id of the run that a request is of."""
    found = unpacked(Message(message.header))[1].get("run")
    if not is_id(found):
        raise SerializationError(f"the request is of no run, but of {str(found)[:40]!r}")
    return str(found)


def update_message(update: Update, advert: Mapping[str, JSON] | None = None) -> Message:
    """An answer as a message; where sums are masked, with the site's keys and no values."""
    said: dict[str, JSON] = {
        "client": update.client,
        "request": update.request,
        "agreed": update.agreed,
        "weight": update.weight,
        "line": update.line,
        **({"advert": dict(advert)} if advert is not None else {}),
    }
    return packed({**update.values, **update.riders}, said)


def update_of(
    message: Message, *, riders: tuple[str, ...] = (), limit: int | None = None
) -> Update:
    """An answer from its message; beside its values may be riders of these kinds."""
    tensors, said = unpacked(message, limit=limit)
    values, beside = split_riders(tensors, riders)
    return Update(
        client=_read(said, "client", str),
        request=_read(said, "request", str),
        agreed=_read(said, "agreed", str),
        values=values,
        weight=_read(said, "weight", int),
        line=_read(said, "line", dict),
        riders=beside,
    )


def _words(said: Mapping[str, Any], name: str, kind: type) -> dict[str, Any]:
    found = _read(said, name, dict)
    if any(type(value) is not kind for value in found.values()):
        raise SerializationError(f"the message's {name} are not all of {kind.__name__}")
    return found


def _read(said: Mapping[str, Any], name: str, kind: type) -> Any:
    found = said.get(name)
    if type(found) is not kind:
        raise SerializationError(
            f"the message's {name} is {str(found)[:40]!r}, not of {kind.__name__}"
        )
    return found
