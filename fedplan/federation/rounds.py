# SPDX-License-Identifier: Apache-2.0
"""The server's side of a round: requests, validation of updates, and the new global state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor

from fedplan.errors import FedplanError
from fedplan.federation.aggregation import AggregationResult, Aggregator
from fedplan.federation.agreement import Agreement, versions_digest
from fedplan.federation.client_versions import NEVER_SEEN, ClientSync
from fedplan.federation.drift import SquaredNorms
from fedplan.federation.global_state import GlobalState
from fedplan.federation.lora_product_sum import Errors
from fedplan.federation.messages import Request, Update, UpdateRejected
from fedplan.federation.record import DefenceRecord, SecAggRecord, TurnRecord, read_turn
from fedplan.federation.validation import validate_digests, validate_record
from fedplan.language.plan import Role, Roles
from fedplan.language.turn import Turn
from fedplan.methods.phases import PhaseContext
from fedplan.models.params import Block
from fedplan.storage.failpoints import failpoint
from fedplan.tensors.aux_tensors import aux_names, param_key
from fedplan.tensors.named import DigestCache, Tensors, all_finite, nbytes


def announce_phase(agreement: Agreement, global_state: GlobalState) -> GlobalState:
    """Return the global state with the phase of the next round, from the method's phase rule."""
    norms = SquaredNorms(agreement.params, global_state.values)
    context = PhaseContext(global_state.round + 1, global_state.phase, global_state.drift, norms)
    return replace(global_state, phase=agreement.method.phase_rule(context))


@dataclass(frozen=True)
class RequestPayload:
    """Values of a request, shared by all clients that need the same ones.

    `versions`: versions of the values. `versions_digest`: digest of the versions of all values that
    the client must have.
    """

    values: dict[str, Tensor]
    versions: dict[str, int]
    versions_digest: str


class RequestBuilder:
    """Creates the requests of the next round; clients in the same state share a payload."""

    def __init__(self, agreement: Agreement, global_state: GlobalState) -> None:
        self._agreement, self._global_state = agreement, global_state
        self._payloads: dict[tuple[object, ...], RequestPayload] = {}

    def request(self, client: str, traits: Mapping[str, str], *, full: bool = False) -> Request:
        """Return the request to a client with values that it lacks; `full` sends all it needs."""
        agreement, global_state = self._agreement, self._global_state
        number = global_state.round + 1
        turn = Turn(round=number, client=client, phase=global_state.phase, traits=dict(traits))
        client_sync = global_state.client_sync.get(client, NEVER_SEEN)
        payload = self._payload(turn, NEVER_SEEN if full else client_sync)
        return Request(
            name=agreement.request_name(number, client),
            agreement_digest=agreement.fingerprint,
            turn=turn,
            values=payload.values,
            versions=payload.versions,
            versions_digest=payload.versions_digest,
            last_update_round=client_sync.round,
            full=full,
            run=agreement.run,
        )

    def _payload(self, turn: Turn, client_sync: ClientSync) -> RequestPayload:
        """Return the payload of a turn, cached by the client's state and the active steps."""
        # The global state keeps each ClientSync alive, so ids are unique.
        cache_key = (id(client_sync), self._agreement.method.plan.active_steps(turn))
        if cache_key not in self._payloads:
            self._payloads[cache_key] = self._make_payload(turn, client_sync)
        return self._payloads[cache_key]

    def _make_payload(self, turn: Turn, client_sync: ClientSync) -> RequestPayload:
        """Return the payload with all required values that are newer than the client's."""
        values, versions = self._global_state.values, self._global_state.versions
        required = self._agreement.required(turn, client_sync.personal_bits)
        missing = [k for k, v in required.items() if client_sync.versions.get(k, v) < versions[k]]
        return RequestPayload(
            values={key: values[key] for key in missing},
            versions={key: versions[key] for key in missing},
            versions_digest=versions_digest({key: versions[key] for key in required}),
        )


def make_request(
    agreement: Agreement,
    global_state: GlobalState,
    client: str,
    traits: Mapping[str, str],
    *,
    full: bool = False,
) -> Request:
    """Return the request of the next round to a client, with the values that it lacks.

    `full`: send all values that the client needs.
    """
    return RequestBuilder(agreement, global_state).request(client, traits, full=full)


@dataclass
class RoundState:
    """An open round at the server.

    `cohort`: requests by client. `aggregator`: sums the updates.
    `start_digests`: digests of the initial values of all params. `digests`: cache of digests.
    `wasted_bytes`: bytes sent to clients that could not use them.
    `responded`: clients with a valid answer. `aggregated`: clients in the sum.
    `rejected`: reasons by client. `records`: records of valid turns by client.
    `products`, `defence`, `masked`: as in AggregationResult, once the round is closed.
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
    products: Errors | None = None
    defence: DefenceRecord | None = None
    masked: SecAggRecord | None = None

    def set_scores(self, scores: Mapping[Block, float]) -> None:
        """Put joint scores into the requests of all clients."""
        for client, request in self.cohort.items():
            self.cohort[client] = replace(request, turn=replace(request.turn, scores=scores))


@dataclass(frozen=True)
class ValidUpdate:
    """An update that passed all checks: decoded values, auxiliary tensors, and the record."""

    values: dict[str, Tensor]
    aux: dict[str, Tensor]
    record: TurnRecord


def accept_update(
    agreement: Agreement,
    global_state: GlobalState,
    round_state: RoundState,
    update: Update,
    *,
    is_late: bool = False,
) -> None:
    """Validate an update and add it to the round's sum, or note the reason in `rejected`.

    Nothing is added unless the whole update is valid. A late update is validated and recorded as a
    response, but not added.
    """
    client = str(update.client)
    try:
        valid = _validate_update(agreement, global_state, round_state, update)
        if not is_late:
            round_state.aggregator.add(client, valid.values, valid.aux, update.weight)
    except FedplanError as error:
        reason = str(error).splitlines()[0][:300]
        round_state.rejected.setdefault(client, f"late, and {reason}" if is_late else reason)
        return
    round_state.responded.append(client)
    round_state.records[client] = valid.record
    if is_late:
        round_state.rejected[client] = "late"
    else:
        round_state.aggregated.append(client)
    failpoint("round.pulled")


def accept_masked_report(
    agreement: Agreement, global_state: GlobalState, round_state: RoundState, update: Update
) -> bool:
    """Validate and store the record of a client whose values come by secure aggregation.

    Returns False, and notes the reason in `rejected`, if the record is invalid.
    """
    client = str(update.client)
    if client in round_state.records:
        return True  # another attempt of secure aggregation, with the same turn
    try:
        request = _request_of(round_state, update)
        record, roles = _read_record(agreement, round_state, update)
        _require_downloaded_bytes(agreement, global_state, request, record)
        _validate_digests(agreement, global_state, round_state, record, roles, {})
    except FedplanError as error:
        round_state.rejected.setdefault(client, str(error).splitlines()[0][:300])
        return False
    round_state.responded.append(client)
    round_state.records[client] = record
    return True


def _request_of(round_state: RoundState, update: Update) -> Request:
    """Return the request that an update answers; raise UpdateRejected if there is none."""
    request = round_state.cohort.get(update.client)
    if request is None:
        raise UpdateRejected(f"{update.client!r} was not asked in this round")
    if update.client in round_state.records:
        raise UpdateRejected(f"{update.client!r} was counted before")
    if (update.request_name, update.agreement_digest) != (request.name, request.agreement_digest):
        raise UpdateRejected(f"it answers {update.request_name!r}, not {request.name!r}")
    return request


def _validate_update(
    agreement: Agreement, global_state: GlobalState, round_state: RoundState, update: Update
) -> ValidUpdate:
    """Return the decoded update and its record; raise UpdateRejected if anything is invalid."""
    request = _request_of(round_state, update)
    if type(update.weight) is not int or not 0 < update.weight < 2**40:
        raise UpdateRejected(f"weight {update.weight!r} is not a positive whole number")
    max_bytes = 2 * nbytes(global_state.values) + 2**20
    if update.nbytes > max_bytes:
        raise UpdateRejected(f"{update.nbytes} bytes are more than the allowed {max_bytes}")
    values = _decode_values(agreement, global_state, update)
    _require_allowed_tensors(agreement, global_state, request.turn, values, update.aux)
    round_state.aggregator.require(values, update.aux, update.weight)
    record, roles = _read_record(agreement, round_state, update)
    if set(values) != {p.key for p, role in roles.items() if role is Role.SHARE}:
        raise UpdateRejected("its record says that other params are shared than it sent")
    _require_downloaded_bytes(agreement, global_state, request, record)
    _validate_digests(agreement, global_state, round_state, record, roles, values)
    return ValidUpdate(values, update.aux, record)


def _decode_values(
    agreement: Agreement, global_state: GlobalState, update: Update
) -> dict[str, Tensor]:
    """Return an update's decompressed values; raise UpdateRejected for params never exchanged."""
    keys = {param_key(name) for name in update.values}
    if unknown := keys - {p.key for p in agreement.exchanged}:
        raise UpdateRejected(f"{min(unknown)!r} is not among the exchanged params")
    base = {key: global_state.values[key] for key in keys}
    return agreement.method.compression.decode(update.values, base)


def _read_record(
    agreement: Agreement, round_state: RoundState, update: Update
) -> tuple[TurnRecord, Roles]:
    """Return an update's record and its roles; raise an error if it contradicts the request."""
    record = read_turn(update.ledger_line)
    return record, validate_record(agreement, round_state.cohort[update.client], update, record)


def _require_downloaded_bytes(
    agreement: Agreement, global_state: GlobalState, request: Request, record: TurnRecord
) -> None:
    """Raise UpdateRejected if a record has another number of downloaded bytes than was sent."""
    # The answer may be to the request before a full one was sent, or to the full one.
    if record.full != request.full:
        traits = request.turn.traits
        request = make_request(agreement, global_state, record.client, traits, full=record.full)
    sent = sum(agreement.download_bytes[key] for key in request.versions)
    if record.down != sent:
        raise UpdateRejected(f"its record says that it received {record.down} bytes, not {sent}")


def _validate_digests(
    agreement: Agreement,
    global_state: GlobalState,
    round_state: RoundState,
    record: TurnRecord,
    roles: Roles,
    values: Tensors,
) -> None:
    """Raise UpdateRejected if a record's digests contradict the global state or the update."""

    def sent_digest(key: str) -> str | None:
        value = global_state.values.get(key)
        if value is None:
            return round_state.start_digests.get(key)
        return round_state.digests.short_digest(value)

    validate_digests(agreement, record, roles, values, sent_digest, round_state.digests)


def _require_allowed_tensors(
    agreement: Agreement, global_state: GlobalState, turn: Turn, values: Tensors, aux: Tensors
) -> None:
    """Raise UpdateRejected if tensors are missing, not allowed, or of another shape or dtype."""
    permitted, certain = agreement.permitted(turn), agreement.certain(turn)
    allowed = {p.key for p in agreement.params if permitted[p] is Role.SHARE}
    required = {p.key for p in agreement.params if certain[p] is Role.SHARE}
    if extra := values.keys() - allowed:
        raise UpdateRejected(f"{min(extra)!r} is not among the params that this client may share")
    if missing := required - values.keys():
        raise UpdateRejected(f"{min(missing)!r} is missing")
    if set(aux) != set(aux_names(values, agreement.method.aux)):
        raise UpdateRejected("the auxiliary tensors are not those of the shared params")
    for key, value in {**values, **aux}.items():
        expected = global_state.values[key]
        if value.shape != expected.shape or value.dtype != expected.dtype:
            raise UpdateRejected(
                f"{key!r} is {value.dtype} {tuple(value.shape)}, "
                f"not {expected.dtype} {tuple(expected.shape)}"
            )


def close_round(
    agreement: Agreement,
    global_state: GlobalState,
    round_state: RoundState,
    result: AggregationResult,
    *,
    later: set[str],
) -> GlobalState:
    """Return the global state after a round: the server optimizer's step on the aggregated means.

    `later`: keys that some later round may change; optimizer state is kept only for these. Raises
    FedplanError if the server optimizer returns an invalid value.
    """
    number, optimize = global_state.round + 1, agreement.method.server_optimizer
    values, versions = dict(global_state.values), dict(global_state.versions)
    memory = {key: state for key, state in global_state.memory.items() if key in later}
    for key, mean in result.means.items():
        value, state = optimize(values[key], mean, global_state.memory.get(key, {}))
        _require_valid_step(key, values[key], value, state)
        values[key] = value
        versions[key] = number
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


def _require_valid_step(key: str, old: Tensor, new: Tensor, memory: Mapping[str, Tensor]) -> None:
    """Raise FedplanError if a server optimizer's value or state names are invalid."""
    if (new.shape, new.dtype) != (old.shape, old.dtype) or not all_finite(new):
        raise FedplanError(
            f"the server optimizer made {new.dtype} {tuple(new.shape)} of {key}, which is "
            f"{old.dtype} {tuple(old.shape)}, or its values are not finite"
        )
    if invalid := [name for name in memory if not name.isidentifier()]:
        raise FedplanError(
            f"the server optimizer names a state tensor {invalid[0]!r}: use an identifier"
        )


def _update_client_sync(
    agreement: Agreement, global_state: GlobalState, round_state: RoundState
) -> dict[str, ClientSync]:
    """Return the records of all clients after a round.

    Clients of one state that received the same values and have the same roles share a record again,
    so the number of records does not grow with the number of clients.
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
