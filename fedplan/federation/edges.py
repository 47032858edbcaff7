# SPDX-License-Identifier: Apache-2.0
"""Edges: partial sums of a round, each of the updates of some clients, and their messages.

An edge accepts updates into a round of its own, as the server does, and reports one sum with the
record of each turn. The server checks records and sum against each other, and merges the sum: that
gives the same bits as if each update had been added there. Of the values it sees the sum alone.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from fedplan.errors import FedplanError, printable
from fedplan.federation.aggregation.mean import MeanAggregator
from fedplan.federation.aggregation.protocol import TensorsAndJson
from fedplan.federation.global_state import ClientSync, GlobalState
from fedplan.federation.ledger.records import ROLE_LETTERS, TurnRecord
from fedplan.federation.messages import (
    Request,
    Update,
    UpdateRejected,
    read_request,
    request_header,
)
from fedplan.federation.rounds import RoundState, require_request, validate_turn
from fedplan.federation.server import Server
from fedplan.language.plan import Role
from fedplan.tensors.message import Message
from fedplan.tensors.named import Tensors
from fedplan.tensors.serialization import (
    JSON,
    SerializationError,
    pack_message,
    unpack_message,
)
from fedplan.tensors.sums import MAX_WEIGHT

TEXT, VALUES = "json", "values/"
"""Name of the tensor with the bytes of JSON, which is too long for a header; prefix of values."""


def open_edge_round(round_state: RoundState, clients: Iterable[str]) -> RoundState:
    """Return an empty round of an edge, with the requests of a round to the edge's clients."""
    return RoundState(
        {name: round_state.cohort[name] for name in clients if name in round_state.cohort},
        round_state.aggregator.empty(),
        start_digests=round_state.start_digests,
        digests=round_state.digests,
    )


def report_sum(edge_round: RoundState, requested: Iterable[str]) -> TensorsAndJson:
    """Return the sum of an edge's round and the records behind it, for `accept_sum`.

    `requested`: the clients that got a request. The tensors are not copied.
    """
    tensors, fields = edge_round.aggregator.state()
    records, asked = edge_round.records, set(requested)
    clients = {
        name: {
            "requested": name in asked,
            "full": request.full,
            "turn": records[name].json() if name in records else None,
            "summed": name in edge_round.aggregated,
            "rejected": edge_round.rejected.get(name, ""),
        }
        for name, request in edge_round.cohort.items()
    }
    return tensors, {**{k: fields[k] for k in ("kind", "sums", "squares")}, "clients": clients}


def accept_sum(
    server: Server, round_state: RoundState, edge: str, tensors: Tensors, fields: Mapping[str, Any]
) -> list[str]:
    """Validate an edge's report and merge its sum into the round; return the requested clients.

    Each record is validated as in `accept_update`, except for what only the values show, and dtype,
    shape, weight and senders of each sum must be those of the records. If anything is wrong,
    nothing is merged, and the reason is noted for each client of the edge.
    """
    members = round_state.cohort.keys() & set(server.aggregation.participation.edges[edge])
    try:
        clients = _read_clients(fields, members)
        records = dict[str, TurnRecord]()
        for name, client in clients.items():
            if client["turn"] is None:
                continue
            request, line = round_state.cohort[name], client["turn"]
            update = Update(name, request.name, request.agreement_digest, {}, 1, line)
            require_request(round_state, update)
            settings = server.agreement, server.global_state, round_state
            records[name] = validate_turn(*settings, update, None)
            if records[name].weight > MAX_WEIGHT:
                raise UpdateRejected(f"the weight of {name} is above {MAX_WEIGHT}")
        summed = [name for name, client in clients.items() if client["summed"]]
        share, params = ROLE_LETTERS[Role.SHARE], server.agreement.params
        turns = dict[str, tuple[set[str], int]]()
        for name in summed:
            letters = zip(params, records[name].roles, strict=True)
            turns[name] = {p.key for p, role in letters if role == share}, records[name].weight
        if not isinstance(round_state.aggregator, MeanAggregator):
            raise UpdateRejected("this round has no partial sums")
        round_state.aggregator.merge_reported(tensors, fields, turns)
    except FedplanError as error:
        reason = f"the sum of {edge} is rejected: {str(error).splitlines()[0][:250]}"
        round_state.rejected |= dict.fromkeys(sorted(members), reason)
        return []
    for name, client in clients.items():
        if client["full"] and not round_state.cohort[name].full:
            server.resend_all(round_state, name)
        if name not in summed:
            reason = "late" if name in records else printable(client["rejected"][:300])
            round_state.rejected.setdefault(name, reason or "no answer")
    round_state.records |= records
    round_state.responded += records
    round_state.aggregated += summed
    round_state.edges[edge] = tuple(sorted(summed))
    return [name for name, client in clients.items() if client["requested"]]


def _read_clients(fields: Mapping[str, Any], members: Collection[str]) -> dict[str, dict[str, Any]]:
    """Return what a report states of each client; UpdateRejected if it is not as `report_sum`."""
    clients: Any = fields.get("clients")
    if not isinstance(clients, dict) or clients.keys() != set(members):
        raise UpdateRejected("it is not of the clients that were requested")
    types = {"requested": bool, "full": bool, "summed": bool, "rejected": str}
    for name, client in cast("dict[str, Any]", clients).items():
        valid = isinstance(client, dict) and client.keys() == {*types, "turn"}
        if not valid or any(type(client[key]) is not kind for key, kind in types.items()):
            raise UpdateRejected(f"it does not state what {name} did")
        if client["summed"] and client["turn"] is None:
            raise UpdateRejected(f"it has no record of {name}, which it summed")
        if client["turn"] is not None and not client["requested"]:
            raise UpdateRejected(f"it has a record of {name}, which it did not ask")
    return cast("dict[str, dict[str, Any]]", clients)


def edge_request_message(
    server: Server, round_state: RoundState, clients: Iterable[str], fields: Mapping[str, JSON]
) -> Message:
    """Return the message with the requests to an edge's clients, and all exchanged global values.

    `fields`: further fields of the header.
    """
    state, requests = server.global_state, [round_state.cohort[name] for name in clients]
    tensors = {f"{VALUES}{key}": value for key, value in state.values.items()}
    body = {"versions": state.versions, "requests": list(map(request_header, requests))}
    return _pack(tensors, body, {**fields, "round": state.round + 1, "phase": state.phase})


def read_edge_request(
    message: Message, global_state: GlobalState
) -> tuple[GlobalState, dict[str, Request]]:
    """Return the global state before the round, from a message, and the requests by client.

    `global_state`: of the same agreement. Raises SerializationError for an invalid message.
    """
    tensors, body, fields = _unpack(message)
    values = {key.removeprefix(VALUES): value for key, value in tensors.items()}
    versions, requests = body.get("versions"), dict[str, Request]()
    number, phase = fields.get("round"), fields.get("phase")
    valid = isinstance(versions, dict) and values.keys() == versions.keys()
    if not valid or values.keys() != global_state.values.keys() or type(number) is not int:
        raise SerializationError("the message has not the global values of the study")
    for header in body.get("requests", []):
        request = read_request(pack_message({}, header))
        values_of = {key: values[key] for key in request.versions if key in values}
        requests[request.turn.client] = replace(request, values=values_of)
    sync = {n: ClientSync(r.last_update_round, {}, 0) for n, r in requests.items()}
    return replace(
        global_state,
        values=values,
        versions=versions,
        round=number - 1,
        phase=str(phase),
        client_sync=sync,
    ), requests


def sum_message(tensors: Tensors, fields: Mapping[str, Any]) -> Message:
    """Return the result of `report_sum` as a message."""
    return _pack(tensors, fields, {})


def read_sum(message: Message, limit: int) -> TensorsAndJson:
    """Return the report of a `sum_message`; SerializationError if invalid or too large."""
    tensors, body, _ = _unpack(message, limit)
    return tensors, body


def sum_limit(server: Server) -> int:
    """Return the most bytes of a reply of the server's round: two words for each number."""
    numbers = sum(value.numel() for value in server.global_state.values.values())
    numbers += sum(layer.numel for layer in server.agreement.layers)
    return 16 * numbers + 2**26


def _pack(tensors: Tensors, body: Mapping[str, Any], fields: Mapping[str, JSON]) -> Message:
    text = bytearray(json.dumps(body).encode())
    return pack_message({**tensors, TEXT: torch.frombuffer(text, dtype=torch.uint8)}, fields)


def _unpack(
    message: Message, limit: int | None = None
) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, Any]]:
    tensors, fields = unpack_message(message, limit=limit)
    try:
        body = json.loads(tensors.pop(TEXT).numpy().tobytes())
    except (KeyError, ValueError, TypeError, RecursionError) as error:
        raise SerializationError(f"the message has no JSON: {error!r}") from error
    if not isinstance(body, dict):
        raise SerializationError("the JSON of the message is no object")
    return tensors, cast("dict[str, Any]", body), fields
