# SPDX-License-Identifier: Apache-2.0
"""Requests of the server and updates of clients, as dataclasses and messages, and versions."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from torch import Tensor

from fedplan.errors import FedplanError, printable
from fedplan.federation.identity import is_run_id
from fedplan.language.predicates import Turn
from fedplan.models.params import Block
from fedplan.tensors.message import Message
from fedplan.tensors.named import nbytes, split_aux
from fedplan.tensors.serialization import JSON, SerializationError, pack_message, unpack_message


class RequestRefused(FedplanError):
    """A client's answer to a request that the agreement does not allow."""

    code = "refused"


class ClientStateMissing(FedplanError):
    """A client's answer if it lost values that the server sent before; send a full request."""

    code = "missing-values"


class OutdatedClientState(FedplanError):
    """A client's stored state is older than its last reply: files are lost or damaged."""

    code = "outdated-state"
    exit_code = 1


class UpdateRejected(FedplanError):
    """The server's reason not to aggregate one update; the round goes on with the others."""


@dataclass(frozen=True)
class Request:
    """The server's request to train one turn, with the global values that the client lacks.

    `name`: unique name of the request. `agreement_digest`: digest of the agreement (the settings
    that server and clients fixed before round 1). `turn`: round, client, phase, traits and joint
    scores. `values`: global values by key. `versions`: version of each sent value.
    `versions_digest`: digest of the versions of all values that the client must have afterwards.
    `last_update_round`: last round with an update of this client; 0 if none. `full`: all values are
    sent, because the client lost its state. `run`: id of the run. Under secure aggregation,
    `base_digests` has the digest of each global value, and `attempt` counts restarts of the
    protocol in this round, from 1.
    """

    name: str
    agreement_digest: str
    turn: Turn
    values: dict[str, Tensor]
    versions: dict[str, int]
    versions_digest: str = ""
    last_update_round: int = 0
    full: bool = False
    run: str = ""
    base_digests: dict[str, str] = field(default_factory=dict[str, str])
    attempt: int = 1

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        return nbytes(self.values)


@dataclass(frozen=True)
class Update:
    """A client's reply to a request: its trained values and the record of its turn.

    `request_name`, `agreement_digest`: as in the request. `values`: encoded (compressed) values by
    name; empty under secure aggregation. `weight`: number of examples, or 1. `ledger_line`: the
    TurnRecord as JSON. `aux`: auxiliary tensors by name.
    """

    client: str
    request_name: str
    agreement_digest: str
    values: dict[str, Tensor]
    weight: int
    ledger_line: dict[str, Any]
    aux: dict[str, Tensor] = field(default_factory=dict[str, Tensor])

    @property
    def nbytes(self) -> int:
        """Bytes of values and auxiliary tensors."""
        return nbytes(self.values) + nbytes(self.aux)


def block_scores_to_json(scores: Mapping[Block, float]) -> list[Any]:
    """Return scores as a list of [stack, number, score]."""
    return [[*block, score] for block, score in scores.items()]


def turn_digest(turn: Turn) -> str:
    """Return the SHA-256 of the turn's phase and joint scores, which decide the trained params."""
    scores = sorted(block_scores_to_json(turn.scores)) if turn.scores is not None else None
    return hashlib.sha256(json.dumps([turn.phase, scores]).encode()).hexdigest()


def block_scores_from_json(rows: Any) -> dict[Block, float]:
    """Return scores from a list of [stack, number, score]; raise SerializationError if invalid."""
    try:
        return {Block(str(stack), int(number)): float(score) for stack, number, score in rows}
    except (TypeError, ValueError) as error:
        raise SerializationError(f"these are not scores of blocks: {str(rows)[:60]}") from error


def request_header(request: Request) -> dict[str, JSON]:
    """Return all fields of a request except the values, as JSON."""
    turn = request.turn
    header: dict[str, JSON] = {
        "request": request.name,
        "agreement": request.agreement_digest,
        "round": turn.round,
        "client": turn.client,
        "phase": turn.phase,
        "traits": dict(turn.traits),
        "scores": block_scores_to_json(turn.scores) if turn.scores is not None else None,
        "versions": dict(request.versions),
        "versions_digest": request.versions_digest,
        "last_update_round": request.last_update_round,
        "full": request.full,
        "run": request.run,
    }
    if request.base_digests:
        header |= {"base_digests": dict(request.base_digests), "attempt": request.attempt}
    return header


def request_message(request: Request) -> Message:
    """Return a request as a message."""
    return pack_message(request.values, request_header(request))


def read_request(message: Message) -> Request:
    """Return the request of a message that `request_message` made.

    The values are views of the message's bytes. Raises SerializationError if the message is
    invalid, or if a field is missing or of a wrong type.
    """
    values, header = unpack_message(message)
    scores = header.get("scores")
    turn = Turn(
        round=_field(header, "round", int),
        client=_field(header, "client", str),
        phase=_field(header, "phase", str),
        traits=_dict_field(header, "traits", str),
        scores=block_scores_from_json(scores) if scores is not None else None,
    )
    return Request(
        name=_field(header, "request", str),
        agreement_digest=_field(header, "agreement", str),
        turn=turn,
        values=values,
        versions=_dict_field(header, "versions", int),
        versions_digest=_field(header, "versions_digest", str),
        last_update_round=_field(header, "last_update_round", int),
        full=_field(header, "full", bool),
        run=_field(header, "run", str),
        base_digests=_dict_field(header, "base_digests", str) if "base_digests" in header else {},
        attempt=_field(header, "attempt", int) if "base_digests" in header else 1,
    )


def read_run_id(message: Message) -> str:
    """Return the run id of a request's message; raise SerializationError if there is none."""
    run_id = unpack_message(Message(message.header))[1].get("run")
    if not is_run_id(run_id):
        raise SerializationError(f"the request's run is {str(run_id)[:40]!r}, not a run id")
    return str(run_id)


def update_message(update: Update, advert: Mapping[str, JSON] | None = None) -> Message:
    """Return an update as a message, with the client's key advert under secure aggregation.

    Raises SerializationError for tensors or JSON that a message cannot contain.
    """
    header: dict[str, JSON] = {
        "client": update.client,
        "request": update.request_name,
        "agreement": update.agreement_digest,
        "weight": update.weight,
        "ledger_line": update.ledger_line,
        **({"advert": dict(advert)} if advert is not None else {}),
    }
    return pack_message({**update.values, **update.aux}, header)


def read_update(
    message: Message, *, aux_kinds: tuple[str, ...] = (), limit: int | None = None
) -> Update:
    """Return the update of a message that `update_message` made, without the key advert.

    `aux_kinds`: kinds of auxiliary tensors of the method; all other tensors are values. The tensors
    are views of the message's bytes. Raises SerializationError if the message exceeds `limit`
    bytes, is invalid, or lacks a field.
    """
    tensors, header = unpack_message(message, limit=limit)
    values, aux = split_aux(tensors, aux_kinds)
    return Update(
        client=_field(header, "client", str),
        request_name=_field(header, "request", str),
        agreement_digest=_field(header, "agreement", str),
        values=values,
        weight=_field(header, "weight", int),
        ledger_line=_field(header, "ledger_line", dict),
        aux=aux,
    )


def _dict_field(header: Mapping[str, Any], name: str, kind: type) -> dict[str, Any]:
    """Return the dict in field `name`; raise SerializationError unless all values are of `kind`."""
    value = _field(header, name, dict)
    if any(type(each) is not kind for each in value.values()):
        raise SerializationError(f"the message's {name} are not all of {kind.__name__}")
    return value


def _field(header: Mapping[str, Any], name: str, kind: type) -> Any:
    """Return the header's field `name`; raise SerializationError unless the type is just `kind`."""
    value = header.get(name)
    if type(value) is not kind:
        raise SerializationError(
            f"the message's {name} is {str(value)[:40]!r}, not of {kind.__name__}"
        )
    return value


PROTOCOL_VERSION = "3"
"""Version of the messages between server and sites; raised on an incompatible change."""
PACKAGES = ("fedplan", "torch", "transformers", "flwr")
"""Packages whose versions server and sites compare."""


@cache
def local_versions() -> Mapping[str, str]:
    """Return protocol version (key "protocol") and package versions of this process.

    A package that is not installed has the version "".
    """
    versions = {"protocol": PROTOCOL_VERSION}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = ""
    return versions


def protocol_mismatch(versions: Mapping[str, str]) -> str:
    """Return a message if the other end's protocol version differs from this process's; else "".

    `versions`: `local_versions` of the other end; empty in a simulation, which is compatible.
    """
    if versions and versions.get("protocol") != PROTOCOL_VERSION:
        theirs = printable(versions.get("protocol", "?")[:20])
        return f"messages of version {theirs}, and here they are {PROTOCOL_VERSION}"
    return ""


def package_differences(versions: Mapping[str, str]) -> str:
    """Return a text that lists packages with another version at the other end; "" if none.

    `versions`: `local_versions` of the other end. A difference is no error: the site may take part,
    but may train to slightly different bits.
    """
    local = local_versions()
    names = [name for name in PACKAGES if versions.get(name, local[name]) != local[name]]
    return ", ".join(
        f"{name} {printable(versions[name][:20])}, and here {local[name]}" for name in names
    )
