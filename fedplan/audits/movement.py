# SPDX-License-Identifier: Apache-2.0
"""Which of the params that a run trained have moved, by the digests in its ledger."""

from __future__ import annotations

from dataclasses import dataclass, field

from fedplan.federation.agreement import Agreement
from fedplan.federation.ledger.records import Record, RoundRecord, TurnRecord, split_digests

TRAINED, SHARED, KEPT = "SK", "S", "K"
"""Letters of the roles that a turn trains, in `TurnRecord.roles`."""


@dataclass
class Movement:
    """The params that were trained in some turn, and those of them that moved; `add` each record.

    A param moved if a turn that trained it left another value than it started from. A shared param
    counts with the value that the client sent, after compression. Under secure aggregation turns do
    not show this: there a shared param moved if its global value did, and under distributed noise
    a personal param counts as moved.

    `start`: concatenated digests of the initial model's params, as in the identity of a run.
    `trained`, `moved`: keys of params. `shared`: keys of params that some turn shared.
    `global_moved`: keys of params whose global value has left its initial value.
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
            self._add_round(record)

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

    def _add_round(self, record: RoundRecord) -> None:
        changed = {k for k, digest in record.changed.items() if self._initial.get(k) != digest}
        self.global_moved |= changed & self._initial.keys()

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
