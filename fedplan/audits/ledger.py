# SPDX-License-Identifier: Apache-2.0
"""Verify a ledger against its plan: roles, digests, bytes, weights and warnings of every turn."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from fedplan.errors import FedplanError
from fedplan.federation.agreement import Agreement
from fedplan.federation.record import (
    ROLE_BY_LETTER,
    Record,
    RoundRecord,
    TurnRecord,
    read_record,
    split_digests,
)
from fedplan.federation.robust import find_capped_weights, group_weights, params_by_senders
from fedplan.federation.round_warnings import make_warnings, recent_drifts
from fedplan.language.resolution import resolve
from fedplan.language.turn import Turn
from fedplan.models.params import Block, Params
from fedplan.tensors.aux_tensors import param_key


def verify_ledger(agreement: Agreement, lines: Iterable[object], start: str = "") -> list[str]:
    """All faults of a ledger, in words; empty if it follows from the agreement.

    lines: the ledger's lines as parsed JSON.
    start: concatenated digests of the initial model's params; "" if unknown.
    """
    checker = _LedgerChecker(agreement, start)
    return [*(fault for line in lines for fault in checker.check(line)), *checker.end()]


class _LedgerChecker:
    """Follows the digests and versions of all values through a ledger, line by line.

    global_digests: of the global model's values; client_digests: of each client's personal values.
    versions: the round in which each global value last changed; client_versions: the version of
    each value that a client has downloaded; personal_bits: the params that each client keeps.
    turns: turns of the round whose own line is still to come.
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
        self.round, self.turns = 0, dict[str, TurnRecord]()
        self.drifts = recent_drifts(())

    def check(self, line: object) -> Iterator[str]:
        """Faults of one line. Updates the state."""
        try:
            record = read_record(line)
            yield from self._check_record(record)
        except FedplanError as error:
            yield f"this is not a line of a ledger ({error}): {str(line)[:60]}"

    def end(self) -> Iterator[str]:
        """Faults at the end of the ledger."""
        if self.turns:
            yield f"round {self.round + 1}: it has turns, but no line for the round"

    def _check_record(self, record: Record) -> Iterator[str]:
        """Faults of a record: of its round's number, and of a round or turn."""
        if record.round != self.round + 1:
            expected = self.round + 1
            yield f"round {record.round}: it is out of order, round {expected} was expected"
        if isinstance(record, RoundRecord):
            yield from self._check_round(record)
        else:
            yield from self._check_turn(record)

    def _check_turn(self, line: TurnRecord) -> Iterator[str]:
        """Faults of a turn, and of the earlier turns of the client that it reports as missed."""
        if line.client in self.turns:
            yield f"round {line.round}, {line.client}: its turn is recorded twice"
        self.turns[line.client] = line
        for missed in line.missed:
            yield from self._check_one_turn(missed, counted=False)
        yield from self._check_one_turn(line, counted=True)

    def _check_one_turn(self, line: TurnRecord, *, counted: bool) -> Iterator[str]:
        """Faults of one turn: roles by the plan, frozen params unchanged, digests continued, bytes.

        Of a turn that was missed, not `counted`, the download is not known and not checked.
        """
        where = f"round {line.round}, {line.client}"
        params = self.agreement.params
        if len(line.roles) != len(params):
            yield f"{where}: it has {len(line.roles)} roles for {len(params)} params"
            return
        roles = dict(zip(params, (ROLE_BY_LETTER[x] for x in line.roles), strict=True))
        scores = {Block(stack, number): score for stack, number, score in line.scores or ()}
        turn = Turn(line.round, line.client, line.phase, line.traits, scores or None)
        planned = resolve(self.agreement.method.plan, params, turn)
        before, after = split_digests(params, line.before), split_digests(params, line.after)
        personal = self.client_digests.setdefault(line.client, {})
        for p in params:
            key, role = p.key, roles[p]
            if role is not planned[p]:
                yield f"{where}: {key} was {role.name}, and the plan says {planned[p].name}"
            if not role.is_trained and before[key] != after[key]:
                yield f"{where}: {key} is {role.name} and changed"
            expected = (
                personal.get(key)
                if role.is_personal
                else self.global_digests.get(key)
                if counted
                else None
            )
            if expected not in (None, before[key]):
                yield f"{where}: {key} did not start from its last value"
            if role.is_personal:
                personal[key] = after[key]
        if (
            counted
            and self.agreement.method.joint_choice
            and line.scores != self._joint_scores(line)
        ):
            yield f"{where}: it chose blocks by other scores than the other clients"
        if counted:
            yield from self._check_bytes(where, line, self.agreement.sent_params(turn, roles), turn)

    def _joint_scores(self, line: TurnRecord) -> Any:
        """Scores of the first turn of a round, by which all clients choose blocks."""
        if self.scores[0] != line.round:
            self.scores = (line.round, line.scores)
        return self.scores[1]

    def _check_bytes(
        self, where: str, line: TurnRecord, shared: Params, turn: Turn
    ) -> Iterator[str]:
        """Faults of the uploaded and downloaded bytes of a turn. Updates the client's versions."""
        up = sum(self.agreement.upload_bytes(p) for p in shared)
        if line.up != up:
            yield f"{where}: {line.up} bytes were uploaded, and the plan explains {up}"
        client = line.client
        if line.full:
            self.client_versions.pop(client, None)
            self.personal_bits.pop(client, None)
        versions, personal = (
            self.client_versions.setdefault(client, {}),
            self.personal_bits.get(client, 0),
        )
        required = self.agreement.required(turn, personal)
        missing = {k for k, first in required.items() if versions.get(k, first) < self._version(k)}
        versions |= {key: self._version(key) for key in missing}
        self.personal_bits[client] = personal | self.agreement.personal_bits(turn)
        down = sum(self.agreement.download_bytes[key] for key in missing)
        if line.down != down:
            yield f"{where}: {line.down} bytes were downloaded, and the plan explains {down}"

    def _version(self, key: str) -> int:
        return self.versions.get(key, 0)

    def _check_round(self, line: RoundRecord) -> Iterator[str]:
        """Faults of a round's own line, by its turns. Updates global digests and versions."""
        where, turns, self.turns, self.round = f"round {line.round}", self.turns, {}, line.round
        exchanged = {p.key for p in self.agreement.exchanged}
        for key, value_digest in line.moved.items():
            if param_key(key) not in exchanged:
                yield f"{where}: {key} changed, and no turn may share it"
            self.global_digests[key] = value_digest
            self.versions[key] = line.round
        for client in sorted(set(line.counted) - turns.keys()):
            yield f"{where}, {client}: it was aggregated, and its turn is not recorded"
        for client in sorted(turns.keys() - set(line.counted)):
            dropped = self.agreement.secagg.active and client in line.rejected
            if line.rejected.get(client) != "late" and not dropped:
                yield f"{where}, {client}: its turn is recorded, and it was not aggregated"
        if sum(turn.up for turn in turns.values()) != line.up:
            yield f"{where}: {line.up} bytes were uploaded in all, and its turns say another number"
        if any(turn.phase != line.phase for turn in turns.values()):
            yield f"{where}: its turns are of another phase"
        yield from self._check_defence(where, line, turns)
        yield from self._check_masked_sum(where, line)
        if line.warnings != make_warnings(line, turns.values(), self.drifts):
            yield f"{where}: its warnings do not follow from its numbers"
        self.drifts.append(line.drift)

    def _check_defence(
        self, where: str, line: RoundRecord, turns: Mapping[str, TurnRecord]
    ) -> Iterator[str]:
        """Faults of a defence's record: capped weights are recomputed, clipping is plausible."""
        defence, record = self.agreement.defence, line.defence
        if (record is not None) != defence.active:
            yield f"{where}: it records a defence that was not agreed, or lacks the agreed one"
        if record is None:
            return
        if record.capped != self._capped_weights([turns[c] for c in line.counted if c in turns]):
            yield f"{where}: other weights were capped than the defence says"
        for client in sorted({*record.clipped, *record.left, *record.far} - set(line.counted)):
            yield f"{where}, {client}: the defence names it, and it was not aggregated"
        for client, (norm, clipped_norm) in record.clipped.items():
            if not (defence.max_norm_ratio and clipped_norm < norm):
                yield f"{where}, {client}: its change was clipped, and there was no reason to"

    def _check_masked_sum(self, where: str, line: RoundRecord) -> Iterator[str]:
        """Faults of a secure aggregation record: its clients, threshold and withheld values."""
        secagg, record = self.agreement.secagg, line.masked
        if (record is not None) != secagg.active:
            yield f"{where}: it records a masked sum that was not agreed, or lacks the agreed one"
        if record is None:
            return
        if record.sites != line.counted:
            yield f"{where}: its masked sum is of other clients than were aggregated"
        if secagg.threshold not in (0, record.threshold):
            yield f"{where}: its masked sum had threshold {record.threshold}, not the agreed one"
        for key in sorted(record.closed.keys() & line.moved.keys()):
            yield f"{where}: {key} was withheld, and has changed"

    def _capped_weights(self, turns: list[TurnRecord]) -> dict[str, tuple[int, int]]:
        """Weights that the defence caps, by client: the original and the capped one."""
        agreement, params = self.agreement, self.agreement.params
        weights = {turn.client: turn.weight for turn in turns}
        sent = {
            turn.client: [p.key for p, x in zip(params, turn.roles, strict=False) if x == "S"]
            for turn in turns
        }
        caps = group_weights(
            agreement.defence, weights, params_by_senders(sent), absent=agreement.method.absent
        )
        return find_capped_weights(agreement.defence, weights, caps.values())
