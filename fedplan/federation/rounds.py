# SPDX-License-Identifier: Apache-2.0
"""The server's side of a round: requests, validation of updates, and the new global state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fedplan.errors import FedplanError
from fedplan.federation.aggregation.drift import SquaredNorms
from fedplan.federation.aggregation.lora_products import Errors
from fedplan.federation.aggregation.protocol import AggregationResult, Aggregator
from fedplan.federation.agreement import Agreement, versions_digest
from fedplan.federation.global_state import NEVER_SEEN, ClientSync, GlobalState
from fedplan.federation.ledger.records import (
    DefenceRecord,
    SecAggRecord,
    TurnRecord,
    read_turn,
    split_digests,
)
from fedplan.federation.messages import Request, Update, UpdateRejected
from fedplan.federation.validation import validate_record
from fedplan.language.plan import Role
from fedplan.language.predicates import Turn
from fedplan.methods.phases import PhaseContext
from fedplan.methods.server_optimizer import Dynamic
from fedplan.storage.files import failpoint
from fedplan.tensors.named import DigestCache, Tensors, all_finite, aux_names, nbytes, param_key


def announce_phase(agreement: Agreement, global_state: GlobalState) -> GlobalState:
    """Return the global state with the phase of the next round, from the method's phase rule."""
    norms = SquaredNorms(agreement.params, global_state.values)
    context = PhaseContext(global_state.round + 1, global_state.phase, global_state.drift, norms)
    return replace(global_state, phase=agreement.method.phase_rule(context))


class RequestBuilder:
    """Makes the requests of the next round after `global_state`, under one agreement.

    Call `request` for each client. Requests to clients with the same state share a payload; the
    tensors are not copied from the global state.
    """

    def __init__(self, agreement: Agreement, global_state: GlobalState) -> None:
        self._agreement, self._global_state = agreement, global_state
        self._payloads: dict[tuple[object, ...], dict[str, Any]] = {}

    def request(self, client: str, traits: Mapping[str, str], *, full: bool = False) -> Request:
        """Return the request to a client with these traits, with the global values that it lacks.

        A client lacks a value that has changed since the client received the value. `full`: send
        all values that the client needs, as to a client that lost its state.
        """
        agreement, global_state = self._agreement, self._global_state
        number, versions = global_state.round + 1, global_state.versions
        turn = Turn(round=number, client=client, phase=global_state.phase, traits=dict(traits))
        client_sync = global_state.client_sync.get(client, NEVER_SEEN)
        before = NEVER_SEEN if full else client_sync
        # The global state keeps each ClientSync alive, so ids are unique.
        cache_key = (id(before), agreement.method.plan.active_steps(turn))
        if cache_key not in self._payloads:
            required = agreement.required(turn, before.personal_bits)
            lacking = [k for k, v in required.items() if before.versions.get(k, v) < versions[k]]
            self._payloads[cache_key] = {
                "values": {key: global_state.values[key] for key in lacking},
                "versions": {key: versions[key] for key in lacking},
                "versions_digest": versions_digest({key: versions[key] for key in required}),
            }
        return Request(
            name=agreement.request_name(number, client),
            agreement_digest=agreement.fingerprint,
            turn=turn,
            **self._payloads[cache_key],
            last_update_round=client_sync.round,
            full=full,
            run=agreement.run,
        )


def make_request(
    agreement: Agreement,
    global_state: GlobalState,
    client: str,
    traits: Mapping[str, str],
    *,
    full: bool = False,
) -> Request:
    """Return the request to one client in the round after `global_state`.

    See `RequestBuilder.request` for the traits and `full`.
    """
    return RequestBuilder(agreement, global_state).request(client, traits, full=full)


@dataclass
class RoundState:
    """An open round at the server, filled by `accept_update` and read by `close_round`.

    `cohort`: the request to each client of the round. `aggregator`: sums the updates.
    `start_digests`: 16-digit digests of the initial values of all params, by key.
    `digests`: cache of tensor digests. `wasted_bytes`: bytes sent to clients that had lost their
    state. `responded`: clients with a valid update, in order of arrival. `aggregated`: clients
    with an update in the sum. `rejected`: by client, why the update is not in the sum.
    `records`: by client, the validated record of the turn.
    `edges`: by edge, the clients of the sums that were merged.
    `products`, `defence`, `secagg`: as in AggregationResult; None until the round is closed.
    """

    cohort: dict[str, Request]
    aggregator: Aggregator
    start_digests: Mapping[str, str] = field(default_factory=dict[str, str])
    digests: DigestCache = field(default_factory=DigestCache)
    wasted_bytes: int = 0
    aggregated: list[str] = field(default_factory=list[str])
    responded: list[str] = field(default_factory=list[str])
    rejected: dict[str, str] = field(default_factory=dict[str, str])
    records: dict[str, TurnRecord] = field(default_factory=dict[str, TurnRecord])
    edges: dict[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    products: Errors | None = None
    defence: DefenceRecord | None = None
    secagg: SecAggRecord | None = None


def accept_update(
    agreement: Agreement,
    global_state: GlobalState,
    round_state: RoundState,
    update: Update,
    *,
    is_late: bool = False,
) -> None:
    """Validate one client's update and add the update to the sum; changes `round_state` only.

    An invalid update raises nothing: the reason is noted in `round_state.rejected`, and nothing is
    added. A valid update that `is_late` is recorded as a response, but not added. Validates against
    the request, the agreement and the global state before the round. Each decoded param must be
    allowed by the agreement's plan, and none that the plan certainly shares may be missing; the
    auxiliary tensors must be those of exactly these params, with the global shapes and dtypes.
    """
    client = str(update.client)
    try:
        request = require_request(round_state, update)
        if type(update.weight) is not int or not 0 < update.weight < 2**40:
            raise UpdateRejected(f"weight {update.weight!r} is not a positive whole number")
        max_bytes = 2 * nbytes(global_state.values) + 2**20
        if update.nbytes > max_bytes:
            raise UpdateRejected(f"{update.nbytes} bytes are more than the allowed {max_bytes}")
        keys = {param_key(name) for name in update.values}
        if unknown := keys - {p.key for p in agreement.exchanged}:
            raise UpdateRejected(f"{min(unknown)!r} is not among the exchanged params")
        base = {key: global_state.values[key] for key in keys}
        values = agreement.method.compression.decode(update.values, base)
        permitted, certain = agreement.permitted(request.turn), agreement.certain(request.turn)
        allowed = {p.key for p in agreement.params if permitted[p] is Role.SHARE}
        required = {p.key for p in agreement.params if certain[p] is Role.SHARE}
        if extra := values.keys() - allowed:
            raise UpdateRejected(
                f"{min(extra)!r} is not among the params that this client may share"
            )
        if missing := required - values.keys():
            raise UpdateRejected(f"{min(missing)!r} is missing")
        if set(update.aux) != set(aux_names(values, agreement.method.aux)):
            raise UpdateRejected("the auxiliary tensors are not those of the shared params")
        for key, value in {**values, **update.aux}.items():
            expected = global_state.values[key]
            if value.shape != expected.shape or value.dtype != expected.dtype:
                raise UpdateRejected(
                    f"{key!r} is {value.dtype} {tuple(value.shape)}, "
                    f"not {expected.dtype} {tuple(expected.shape)}"
                )
        round_state.aggregator.require(values, update.aux, update.weight)
        record = validate_turn(agreement, global_state, round_state, update, values)
        if not is_late:
            round_state.aggregator.add(client, values, update.aux, update.weight)
    except FedplanError as error:
        reason = str(error).splitlines()[0][:300]
        round_state.rejected.setdefault(client, f"late, and {reason}" if is_late else reason)
        return
    round_state.responded.append(client)
    round_state.records[client] = record
    if is_late:
        round_state.rejected[client] = "late"
        if agreement.secagg.active:  # between machines no masked input is asked of it
            round_state.records[client] = replace(record, upload_bytes=0)
    else:
        round_state.aggregated.append(client)
    failpoint("round.pulled")


def accept_masked_report(
    agreement: Agreement, global_state: GlobalState, round_state: RoundState, update: Update
) -> bool:
    """Validate and store the record in an update without values, under secure aggregation.

    Returns True if the round has a valid record of the client, also from an earlier attempt. If the
    record is invalid, returns False and notes the reason in `round_state.rejected`. Validates
    against the request, the agreement and the global state before the round.
    """
    client = str(update.client)
    if client in round_state.records:
        return True  # another attempt of secure aggregation, with the same turn
    try:
        require_request(round_state, update)
        record = validate_turn(agreement, global_state, round_state, update, None)
    except FedplanError as error:
        round_state.rejected.setdefault(client, str(error).splitlines()[0][:300])
        return False
    round_state.responded.append(client)
    round_state.records[client] = record
    return True


def require_request(round_state: RoundState, update: Update) -> Request:
    """Return the round's request to the client of an update.

    Raises UpdateRejected if there was no request to the client, if the round has a record of the
    client already, or if the update names another request or agreement.
    """
    request = round_state.cohort.get(update.client)
    if request is None:
        raise UpdateRejected(f"{update.client!r} got no request in this round")
    if update.client in round_state.records:
        raise UpdateRejected(f"{update.client!r} has an update in this round already")
    if (update.request_name, update.agreement_digest) != (request.name, request.agreement_digest):
        raise UpdateRejected(f"it answers {update.request_name!r}, not {request.name!r}")
    return request


def validate_turn(
    agreement: Agreement,
    global_state: GlobalState,
    round_state: RoundState,
    update: Update,
    values: Tensors | None,
) -> TurnRecord:
    """Return the validated record of an update's turn, from `update.ledger_line`.

    `values`: the update's decoded values; None if masked, or summed by an edge. Raises
    RecordError for a malformed line. Raises UpdateRejected if the record contradicts the request,
    the plan, the shared params, the bytes sent to the client, or a digest of the global state or of
    `values`. Before training, each param must have the digest of the value that the client
    received, except params with a personal role. After training, the shared params must have the
    digests of `values`; this is only compared without compression, scaling and masks.
    """
    request, record = round_state.cohort[update.client], read_turn(update.ledger_line)
    roles = validate_record(agreement, request, update, record, without_values=values is None)
    shared = {p.key for p, role in roles.items() if role is Role.SHARE}
    if values is not None and set(values) != shared:
        raise UpdateRejected("its record says that other params are shared than it sent")
    # The update may be for the request before a full one was sent, or for the full one.
    if record.full != request.full:
        traits = request.turn.traits
        request = make_request(agreement, global_state, record.client, traits, full=record.full)
    sent = sum(agreement.download_bytes[key] for key in request.versions)
    if record.download_bytes != sent:
        raise UpdateRejected(
            f"its record says that it received {record.download_bytes} bytes, not {sent}"
        )

    before = split_digests(agreement.params, record.before)
    after = split_digests(agreement.params, record.after)
    scaled = agreement.guarantee is not None and agreement.guarantee.max_weight
    uncompressed = agreement.method.compression.text == "plain()"
    exact: Tensors = {}
    if values is not None and uncompressed and not (scaled or agreement.secagg.active):
        exact = values
    short_digest = round_state.digests.short_digest
    for param, role in roles.items():
        key = param.key
        value = global_state.values.get(key)
        start = round_state.start_digests.get(key)
        received = start if value is None else short_digest(value)
        if not role.is_personal and received not in (None, before[key]):
            raise UpdateRejected(f"its record says that {key} started from a value not sent to it")
        if key in exact and short_digest(exact[key]) != after[key]:
            raise UpdateRejected(f"its record has another digest of {key} than its update")
    return record


def close_round(
    agreement: Agreement,
    global_state: GlobalState,
    round_state: RoundState,
    result: AggregationResult,
    *,
    later: set[str],
) -> GlobalState:
    """Return the global state after a round; changes no argument.

    Applies the step of the agreement's server optimizer to each mean in `result`, adds the
    auxiliary changes of `result`, and notes which values the responding clients of `round_state`
    have now. `later`: keys that some later round may change; optimizer state is kept only for
    these. Raises FedplanError if the optimizer changes shape or dtype, returns a value that is not
    finite, or names a state tensor by something else than an identifier.
    """
    number, optimize = global_state.round + 1, agreement.method.server_optimizer
    values, versions = dict(global_state.values), dict(global_state.versions)
    memory = {key: state for key, state in global_state.memory.items() if key in later}
    for key, mean in result.means.items():
        old = values[key]
        if isinstance(optimize, Dynamic):
            optimize = optimize.at(result.fractions[key])
        new, state = optimize(old, mean, global_state.memory.get(key, {}))
        if (new.shape, new.dtype) != (old.shape, old.dtype) or not all_finite(new):
            raise FedplanError(
                f"the server optimizer made {new.dtype} {tuple(new.shape)} of {key}, which is "
                f"{old.dtype} {tuple(old.shape)}, or its values are not finite"
            )
        if invalid := [name for name in state if not name.isidentifier()]:
            raise FedplanError(
                f"the server optimizer names a state tensor {invalid[0]!r}: use an identifier"
            )
        values[key], versions[key] = new, number
        if state and key in later:
            memory[key] = state
    for key, change in result.aux.items():
        values[key], versions[key] = values[key] + change, number
    return replace(
        global_state,
        values=values,
        versions=versions,
        round=number,
        client_sync=_update_client_sync(agreement, global_state, round_state),
        memory=memory,
        drift=result.drift,
        clipping_norm=result.clipping_norm,
    )


def _update_client_sync(
    agreement: Agreement, global_state: GlobalState, round_state: RoundState
) -> dict[str, ClientSync]:
    """Return by client the versions and personal params that the client has after a round.

    Covers all clients of `global_state`; the clients in `round_state.responded` are updated by
    their request and by the agreement's roles. Clients that then have the same state share one
    ClientSync object, so the number of objects does not grow with the number of clients.
    """
    client_sync, number = dict(global_state.client_sync), global_state.round + 1
    by_inputs = dict[tuple[object, ...], ClientSync]()
    by_content = dict[tuple[object, ...], ClientSync]()
    for client in round_state.responded:
        request = round_state.cohort[client]
        full = request.full or round_state.records[client].full
        before = NEVER_SEEN if full else client_sync.get(client, NEVER_SEEN)
        steps = agreement.method.plan.active_steps(request.turn)
        # Ids are unique: the old state and the cohort keep these objects alive meanwhile.
        inputs = (id(before), id(request.versions), steps)
        if inputs not in by_inputs:
            versions = {**before.versions, **request.versions}
            bits = before.personal_bits | agreement.personal_bits(request.turn)
            content = (frozenset(versions.items()), bits)
            updated = ClientSync(number, versions, bits)
            by_inputs[inputs] = by_content.setdefault(content, updated)
        client_sync[client] = by_inputs[inputs]
    return client_sync
