# SPDX-License-Identifier: Apache-2.0
"""Ledgers: a run's ledger re-checked against its plan: nothing frozen moved, nothing left."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from fedplan.errors import FedplanError
from fedplan.federation.agreement import Agreement
from fedplan.federation.record import ROLES, Record, RoundRecord, TurnRecord, parted, read_record
from fedplan.federation.robust import by_senders, caps_of, cut
from fedplan.federation.warnings import drifts_of, warnings_of
from fedplan.language.resolution import resolve
from fedplan.language.turn import Turn
from fedplan.models.params import Block, Params
from fedplan.tensors.riders import param_of


def verify_lines(agreement: Agreement, lines: Iterable[object], start: str = "") -> list[str]:
    """Every fault of a ledger, in words; an empty list is a clean one.

    `start` are the digests of all that the model starts with, one after the other.
    """
    checker = _Checker(agreement, start)
    return [*(fault for line in lines for fault in checker.check(line)), *checker.end()]


class _Checker:
    """Follows the world's and each client's values through a ledger, by their digests."""

    def __init__(self, agreement: Agreement, start: str) -> None:
        self.agreement = agreement
        self.world: dict[str, str] = parted(agreement.params, start) if start else {}
        self.homes: dict[str, dict[str, str]] = {}
        self.versions: dict[str, int] = {}
        self.known: dict[str, dict[str, int]] = {}
        self.settled: dict[str, int] = {}
        self.scores: tuple[int, Any] = (0, None)
        self.round, self.turns = 0, dict[str, TurnRecord]()
        self.drifts = drifts_of(())

    def check(self, line: object) -> Iterator[str]:
        """The faults of one line."""
        try:
            record = read_record(line)
            yield from self._record(record)
        except FedplanError as error:
            yield f"this is not a line of a ledger ({error}): {str(line)[:60]}"

    def end(self) -> Iterator[str]:
        """The faults of what is there after the last line."""
        if self.turns:
            yield f"round {self.round + 1}: it has turns, and no line of its own"

    def _record(self, record: Record) -> Iterator[str]:
        if record.round != self.round + 1:
            yield f"round {record.round}: it stands where a line of round {self.round + 1} should"
        if isinstance(record, RoundRecord):
            yield from self._round(record)
        else:
            yield from self._turn(record)

    def _turn(self, line: TurnRecord) -> Iterator[str]:
        if line.client in self.turns:
            yield f"round {line.round}, {line.client}: its turn is told twice"
        self.turns[line.client] = line
        for missed in line.missed:
            yield from self._one(missed, heard=False)
        yield from self._one(line, heard=True)

    def _one(self, line: TurnRecord, *, heard: bool) -> Iterator[str]:
        """A turn; of one that the server did not hear, it cannot know what came down."""
        where = f"round {line.round}, {line.client}"
        params = self.agreement.params
        if len(line.roles) != len(params):
            yield f"{where}: it has {len(line.roles)} roles for {len(params)} params"
            return
        roles = dict(zip(params, (ROLES[x] for x in line.roles), strict=True))
        scores = {Block(stack, number): score for stack, number, score in line.scores or ()}
        turn = Turn(line.round, line.client, line.phase, line.traits, scores or None)
        said = resolve(self.agreement.method.plan, params, turn)
        before, after = parted(params, line.before), parted(params, line.after)
        home = self.homes.setdefault(line.client, {})
        for p in params:
            key, role = p.key, roles[p]
            if role is not said[p]:
                yield f"{where}: {key} was {role.name}, and the plan says {said[p].name}"
            if not role.trained and before[key] != after[key]:
                yield f"{where}: {key} is {role.name} and moved"
            expected = home.get(key) if role.own else self.world.get(key) if heard else None
            if expected not in (None, before[key]):
                yield f"{where}: {key} did not start from what it last was"
            if role.own:
                home[key] = after[key]
        if heard and self.agreement.method.together and line.scores != self._agreed(line):
            yield f"{where}: chose by other scores than the rest"
        if heard:
            yield from self._bytes(where, line, self.agreement.sent(turn, roles), turn)

    def _agreed(self, line: TurnRecord) -> Any:
        """The scores that the first line of a round chose by."""
        if self.scores[0] != line.round:
            self.scores = (line.round, line.scores)
        return self.scores[1]

    def _bytes(self, where: str, line: TurnRecord, shared: Params, turn: Turn) -> Iterator[str]:
        up = sum(self.agreement.up(p) for p in shared)
        if line.up != up:
            yield f"{where}: {line.up} bytes went up, and the plan explains {up}"
        client = line.client
        if line.anew:
            self.known.pop(client, None)
            self.settled.pop(client, None)
        known, settled = self.known.setdefault(client, {}), self.settled.get(client, 0)
        wanted = self.agreement.wanted(turn, settled)
        lacking = {k for k, first in wanted.items() if known.get(k, first) < self._version(k)}
        known |= {key: self._version(key) for key in lacking}
        self.settled[client] = settled | self.agreement.owned(turn)
        down = sum(self.agreement.sizes[key] for key in lacking)
        if line.down != down:
            yield f"{where}: {line.down} bytes came down, and the plan explains {down}"

    def _version(self, key: str) -> int:
        return self.versions.get(key, 0)

    def _round(self, line: RoundRecord) -> Iterator[str]:
        where, turns, self.turns, self.round = f"round {line.round}", self.turns, {}, line.round
        movable = {p.key for p in self.agreement.movable}
        for key, mark in line.moved.items():
            if param_of(key) not in movable:
                yield f"{where}: {key} moved, and no turn may share it"
            self.world[key] = mark
            self.versions[key] = line.round
        for client in sorted(set(line.counted) - turns.keys()):
            yield f"{where}, {client}: it was counted, and its turn is not told"
        for client in sorted(turns.keys() - set(line.counted)):
            gone = self.agreement.masking.active and client in line.rejected
            if line.rejected.get(client) != "late" and not gone:
                yield f"{where}, {client}: its turn is told, and it was not counted"
        if sum(turn.up for turn in turns.values()) != line.up:
            yield f"{where}: {line.up} bytes went up in all, and its turns say another number"
        if any(turn.phase != line.phase for turn in turns.values()):
            yield f"{where}: its turns are of another phase"
        yield from self._defended(where, line, turns)
        yield from self._masked(where, line)
        if line.warnings != warnings_of(line, turns.values(), self.drifts):
            yield f"{where}: its warnings are not those that follow from its numbers"
        self.drifts.append(line.drift)

    def _defended(
        self, where: str, line: RoundRecord, turns: Mapping[str, TurnRecord]
    ) -> Iterator[str]:
        """What a defence did: weights are worked out again, of values only who and how far."""
        defence, done = self.agreement.defence, line.defence
        if (done is not None) != defence.active:
            yield f"{where}: it tells of a defence that was not agreed, or does not tell of one"
        if done is None:
            return
        if done.capped != self._capped([turns[c] for c in line.counted if c in turns]):
            yield f"{where}: other weights were capped than the defence says"
        for client in sorted({*done.clipped, *done.left, *done.far} - set(line.counted)):
            yield f"{where}, {client}: the defence tells of it, and it was not counted"
        for client, (came, left) in done.clipped.items():
            if not (defence.change_bound and left < came):
                yield f"{where}, {client}: its change was shortened, and there was no reason to"

    def _masked(self, where: str, line: RoundRecord) -> Iterator[str]:
        """A masked sum: of those who were counted, and nothing has moved that stayed closed."""
        masking, told = self.agreement.masking, line.masked
        if (told is not None) != masking.active:
            yield f"{where}: it tells of a masked sum that was not agreed, or does not tell of one"
        if told is None:
            return
        if told.sites != line.counted:
            yield f"{where}: its masked sum is of others than were counted"
        if masking.threshold not in (0, told.threshold):
            yield f"{where}: its masked sum took {told.threshold} to open, and another was agreed"
        for key in sorted(told.closed.keys() & line.moved.keys()):
            yield f"{where}: {key} stayed closed, and has moved"

    def _capped(self, turns: list[TurnRecord]) -> dict[str, tuple[int, int]]:
        """Whose weights the defence cuts, of those who were counted."""
        agreed, params = self.agreement, self.agreement.params
        said = {turn.client: turn.weight for turn in turns}
        sent = {
            turn.client: [p.key for p, x in zip(params, turn.roles, strict=False) if x == "S"]
            for turn in turns
        }
        caps = caps_of(agreed.defence, said, by_senders(sent), absent=agreed.method.absent)
        return cut(agreed.defence, said, caps.values())
