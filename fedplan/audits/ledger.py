# SPDX-License-Identifier: Apache-2.0
"""Verify a ledger against its plan, turn by turn, and show which trained params have moved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from fedplan.errors import FedplanError
from fedplan.federation.aggregation.robust import (
    find_capped_weights,
    group_weights,
    params_by_senders,
)
from fedplan.federation.agreement import Agreement
from fedplan.federation.ledger.history import make_warnings, recent_drifts
from fedplan.federation.ledger.records import (
    ROLE_BY_LETTER,
    Record,
    RoundRecord,
    TurnRecord,
    read_record,
    split_digests,
)
from fedplan.language.predicates import Turn
from fedplan.language.resolution import resolve
from fedplan.models.params import Block
from fedplan.tensors.named import param_key


def verify_ledger(agreement: Agreement, lines: Iterable[object], start: str = "") -> list[str]:
    """Check a ledger's lines, as parsed JSON, against the agreement; return one sentence per fault.

    start: concatenated digests of the initial model's params; "" skips the comparison with them.
    """
    checker = _LedgerChecker(agreement, start)
    return [*(fault for line in lines for fault in checker.check(line)), *checker.end()]


class _LedgerChecker:
    """Verifies one ledger: call `check` with each line in order, then `end`; both yield faults.

    versions: the round in which each global value last changed; client_versions: the versions that
    each client has downloaded; turns: those of the round whose own line is still to come; uploads:
    bytes of one update of each of these turns, by the plan.
    """

    def __init__(self, agreement: Agreement, start: str) -> None:
        self.agreement = agreement
        self.global_digests: dict[str, str] = (
            split_digests(agreement.params, start) if start else {}
        )
        self.client_digests: dict[str, dict[str, str]] = {}
        self.versions: dict[str, int] = {}
        self.client_versions: dict[str, dict[str, int]] = {}
        self.personal_bits: dict[str, int] = {}
        self.scores: tuple[int, Any] = (0, None)
        self.round, self.turns, self.uploads = 0, dict[str, TurnRecord](), dict[str, int]()
        self.drifts = recent_drifts(())

    def check(self, line: object) -> Iterator[str]:
        """Yield the faults of a line, with those of turns before it that the server missed."""
        try:
            record = read_record(line)
            if record.round != (expected := self.round + 1):
                yield f"round {record.round}: it is out of order, round {expected} was expected"
            if isinstance(record, RoundRecord):
                yield from self._check_round(record)
                return
            if record.client in self.turns:
                yield f"round {record.round}, {record.client}: its turn is recorded twice"
            self.turns[record.client] = record
            for missed in record.missed:
                yield from self._check_turn(missed, counted=False)
            yield from self._check_turn(record, counted=True)
        except FedplanError as error:
            yield f"this is not a line of a ledger ({error}): {str(line)[:60]}"

    def end(self) -> Iterator[str]:
        """Yield the fault of turns whose round has no line; call after the last line."""
        if self.turns:
            yield f"round {self.round + 1}: it has turns, but no line for the round"

    def _check_turn(self, record: TurnRecord, *, counted: bool) -> Iterator[str]:
        """Yield a turn's faults; of one that the server missed, some numbers are unknown."""
        where = f"round {record.round}, {record.client}"
        params = self.agreement.params
        if len(record.roles) != len(params):
            yield f"{where}: it has {len(record.roles)} roles for {len(params)} params"
            return
        roles = dict(zip(params, (ROLE_BY_LETTER[x] for x in record.roles), strict=True))
        scores = {Block(stack, number): score for stack, number, score in record.scores or ()}
        turn = Turn(record.round, record.client, record.phase, record.traits, scores or None)
        planned = resolve(self.agreement.method.plan, params, turn)
        before, after = split_digests(params, record.before), split_digests(params, record.after)
        personal = self.client_digests.setdefault(record.client, {})
        for p in params:
            key, role = p.key, roles[p]
            if role is not planned[p]:
                yield f"{where}: {key} was {role.name}, and the plan says {planned[p].name}"
            if not role.is_trained and before[key] != after[key]:
                yield f"{where}: {key} is {role.name} and changed"
            last_digests = personal if role.is_personal else self.global_digests if counted else {}
            if last_digests.get(key) not in (None, before[key]):
                yield f"{where}: {key} did not start from its last value"
            if role.is_personal:
                personal[key] = after[key]
        if not counted:
            return
        if self.scores[0] != record.round:
            # All clients choose blocks by the scores of the round's first turn.
            self.scores = (record.round, record.scores)
        if self.agreement.method.joint_choice and record.scores != self.scores[1]:
            yield f"{where}: it chose blocks by other scores than the other clients"
        sent = self.agreement.sent_params(turn, roles)
        self.uploads[record.client] = sum(map(self.agreement.upload_bytes, sent))
        down, recorded = self._download_bytes(record, turn), record.download_bytes
        if recorded != down:
            yield f"{where}: {recorded} bytes were downloaded, and the plan explains {down}"

    def _download_bytes(self, record: TurnRecord, turn: Turn) -> int:
        """Bytes that a client must download for a turn, by its versions; updates these."""
        client = record.client
        if record.full:
            self.client_versions.pop(client, None)
            self.personal_bits.pop(client, None)
        versions = self.client_versions.setdefault(client, {})
        personal_bits = self.personal_bits.get(client, 0)
        required = self.agreement.required(turn, personal_bits).items()
        current = {key: self.versions.get(key, 0) for key, _ in required}
        missing = {key for key, first in required if versions.get(key, first) < current[key]}
        versions |= {key: current[key] for key in missing}
        self.personal_bits[client] = personal_bits | self.agreement.personal_bits(turn)
        return sum(self.agreement.download_bytes[key] for key in missing)

    def _check_round(self, record: RoundRecord) -> Iterator[str]:
        """Yield the faults of a round's own record, which follows the records of its turns."""
        where, turns, self.turns, self.round = f"round {record.round}", self.turns, {}, record.round
        exchanged = {p.key for p in self.agreement.exchanged}
        for key, value_digest in record.changed.items():
            if param_key(key) not in exchanged:
                yield f"{where}: {key} changed, and no turn may share it"
            self.global_digests[key] = value_digest
            self.versions[key] = record.round
        for client in sorted(set(record.aggregated) - turns.keys()):
            yield f"{where}, {client}: it was aggregated, and its turn is not recorded"
        summed = Counter(client for names in (record.edges or {}).values() for client in names)
        for client in sorted(summed.keys() - set(record.aggregated)):
            yield f"{where}, {client}: an edge summed its update, and it was not aggregated"
        for client in sorted(client for client, edges in summed.items() if edges > 1):
            yield f"{where}, {client}: {summed[client]} edges summed its update"
        secagg, masked = self.agreement.secagg, record.secagg
        for client in sorted(turns.keys() - set(record.aggregated)):
            dropped = secagg.active and client in record.rejected
            if record.rejected.get(client) != "late" and not dropped:
                yield f"{where}, {client}: its turn is recorded, and it was not aggregated"
        uploads, self.uploads = self.uploads, {}
        discarded = masked.discarded if masked is not None else {}
        for client in sorted(discarded.keys() - turns.keys()):
            yield f"{where}, {client}: its input arrived, and its turn is not recorded"
        for client, upload in uploads.items():
            # A client that dropped out before its masked input has uploaded nothing.
            arrived = 1 if masked is None else client in record.aggregated
            explained = (arrived + discarded.get(client, 0)) * upload
            if (uploaded := turns[client].upload_bytes) != explained:
                text = f"{uploaded} bytes were uploaded"
                yield f"{where}, {client}: {text}, and the plan explains {explained}"
        if sum(turn.upload_bytes for turn in turns.values()) != record.upload_bytes:
            total = f"{record.upload_bytes} bytes were uploaded in all"
            yield f"{where}: {total}, and its turns say another number"
        if any(turn.phase != record.phase for turn in turns.values()):
            yield f"{where}: its turns are of another phase"
        yield from self._check_defence(record, turns)
        if (masked is not None) != secagg.active:
            yield f"{where}: it records secure aggregation against the agreement, or lacks it"
        if masked is not None:
            if masked.clients != record.aggregated:
                yield f"{where}: its secure sum is of other clients than were aggregated"
            if secagg.threshold not in (0, masked.threshold):
                threshold = f"threshold {masked.threshold}"
                yield f"{where}: its secure sum had {threshold}, not the agreed one"
            for key in sorted(masked.not_unmasked.keys() & record.changed.keys()):
                yield f"{where}: {key} was withheld, and has changed"
        if record.warnings != make_warnings(record, turns.values(), self.drifts):
            yield f"{where}: its warnings do not follow from its numbers"
        self.drifts.append(record.drift)

    def _check_defence(self, record: RoundRecord, turns: Mapping[str, TurnRecord]) -> Iterator[str]:
        """Yield the faults of a round's record of the defence against malicious updates."""
        where, agreement, applied = f"round {record.round}", self.agreement, record.defence
        if (applied is not None) != agreement.defence.active:
            yield f"{where}: it records a defence that was not agreed, or lacks the agreed one"
        if applied is None:
            return
        counted = [turns[client] for client in record.aggregated if client in turns]
        weights = {turn.client: turn.weight for turn in counted}
        sent = {
            turn.client: [
                p.key for p, x in zip(agreement.params, turn.roles, strict=False) if x == "S"
            ]
            for turn in counted
        }
        caps = group_weights(
            agreement.defence, weights, params_by_senders(sent), absent=agreement.method.absent
        )
        if applied.capped != find_capped_weights(agreement.defence, weights, caps.values()):
            yield f"{where}: other weights were capped than the defence says"
        for client in sorted(
            {*applied.clipped, *applied.excluded, *applied.distance} - set(record.aggregated)
        ):
            yield f"{where}, {client}: the defence names it, and it was not aggregated"
        for client, (norm, clipped_norm) in applied.clipped.items():
            if not (agreement.defence.max_norm_ratio and clipped_norm < norm):
                yield f"{where}, {client}: its change was clipped, and there was no reason to"


TRAINED, SHARED, KEPT = "SK", "S", "K"
"""Letters of the roles that a turn trains, in `TurnRecord.roles`."""


@dataclass
class Movement:
    """The params that were trained in some turn, and those of them that moved; `add` each record.

    A param moved if a turn that trained it left another value than it started from. A shared param
    counts with the value that the client sent, after compression. Under secure aggregation turns do
    not show this: there a shared param moved if its global value did, and under distributed noise a
    personal param counts as moved. `start`: concatenated digests of the initial model's params.
    """

    agreement: Agreement
    start: str
    trained: set[str] = field(default_factory=set[str])
    moved: set[str] = field(default_factory=set[str])
    shared: set[str] = field(default_factory=set[str])
    global_moved: set[str] = field(default_factory=set[str])

    def __post_init__(self) -> None:
        params = self.agreement.params
        self._initial = split_digests(params, self.start)
        self._unknown = dict(enumerate(p.key for p in params))  # not known to have moved

    def add(self, record: Record) -> None:
        """Take in a turn or a round of the ledger."""
        if isinstance(record, TurnRecord):
            for missed in record.missed:
                self._add_turn(missed)
            self._add_turn(record)
        else:
            first = self._initial
            changed = {key for key, digest in record.changed.items() if first.get(key) != digest}
            self.global_moved |= changed & first.keys()

    def _add_turn(self, turn: TurnRecord) -> None:
        if len(turn.roles) != len(self.agreement.params):
            return  # a fault of this line
        masked, noised = self.agreement.secagg.active, self.agreement.distributed_dp
        for index, key in list(self._unknown.items()):
            role, place = turn.roles[index], slice(16 * index, 16 * index + 16)
            if role not in TRAINED:
                continue
            self.trained.add(key)
            self.shared |= {key} if role == SHARED else set()
            visible = not (masked and role == SHARED)
            if visible and (noised or turn.before[place] != turn.after[place]):
                self.moved.add(key)
                if role == KEPT or key in self.global_moved:
                    del self._unknown[index]

    @property
    def unmoved(self) -> list[str]:
        """Keys of the trained params that never moved, in the order of the model."""
        moved = self.moved | (self.global_moved if self.agreement.secagg.active else set[str]())
        return [p.key for p in self.agreement.params if p.key in self.trained - moved]

    @property
    def not_aggregated(self) -> list[str]:
        """Keys of shared params that clients moved, and whose global value never changed."""
        lost = (self.shared & self.moved) - self.global_moved
        return [p.key for p in self.agreement.params if p.key in lost]
