# SPDX-License-Identifier: Apache-2.0
"""Audits: a run's folder re-checked: its ledger, and the values that lie on the disk."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedplan.audits.ledger import verify_lines
from fedplan.errors import FedplanError
from fedplan.federation.client import KEY
from fedplan.federation.identity import changed_rows
from fedplan.federation.marks import keyed
from fedplan.federation.record import (
    ALL,
    ROLES,
    Record,
    RecordError,
    RoundRecord,
    TurnRecord,
    parted,
    read_record,
)
from fedplan.federation.segments import opening_faults, segment_number
from fedplan.federation.server import SMALL
from fedplan.privacy.mechanisms.secret import read_secret
from fedplan.privacy.statement import Statement
from fedplan.storage.journal import Journal
from fedplan.studies.run import Run, looked_at
from fedplan.studies.shares import shares_of
from fedplan.tensors.named import digest


@dataclass
class _Told:
    """What a ledger has told while it passed, line by line: a long one is never held whole.

    `last` are the last turns of clients, where their homes are `here`.
    """

    here: bool
    turns: int = 0
    up: int = 0
    down: int = 0
    rested: int = 0
    clients: set[str] = field(default_factory=set[str])
    rounds: list[RoundRecord] = field(default_factory=list[RoundRecord])
    last: dict[str, TurnRecord] = field(default_factory=dict[str, TurnRecord])

    def passed(self, lines: Iterable[object]) -> Iterator[object]:
        """The lines; those that are no records are faults, and passed over here."""
        for line in lines:
            with suppress(RecordError):
                self._count(read_record(line))
            yield line

    def _count(self, record: Record) -> None:
        if isinstance(record, RoundRecord):
            self.rounds.append(replace(record, counted=(), rejected={}))
            return
        self.turns, self.up, self.down = (
            self.turns + 1,
            self.up + record.up,
            self.down + record.down,
        )
        self.rested += record.roles.count("F") + record.roles.count("H")
        self.clients.add(record.client)
        if self.here:
            self.last[record.client] = record


def verify_run(folder: Path) -> tuple[list[str], str]:
    """Every fault of a run, in words, and a sentence of what was checked.

    Nothing in the folder is changed. Rows are checked where they can be read. What a run that goes
    on has changed meanwhile is no fault: it is then looked at again.
    """
    return looked_at(folder, _verdict)


def _verdict(run: Run) -> tuple[list[str], str]:
    faults, checked = _verified(run)
    if faults:
        run.require_current()
    return faults, checked


def _verified(run: Run) -> tuple[list[str], str]:
    found = run.file_faults()
    gone = any(segment_number(name) and why.endswith("is lost") for name, why in found.items())
    if gone or any(found.get(name, "") for name in SMALL):
        # Without these there is nothing to hold the rest against.
        return [*found.values()], ""
    told, faults = _Told(bool(run.identity.rows)), [*found.values(), *run.identity_faults()]
    faults += verify_lines(run.agreement, told.passed(run.lines()), run.identity.marks)
    if not found:
        faults += _opening_faults(run)
    faults += _world_faults(run, told.rounds)
    faults += _best_faults(run, told.rounds)
    faults += _charge_faults(run)
    faults += _home_faults(run, told.last)
    changed, read = _row_faults(run)
    return faults + changed, (
        f"{run.round} rounds, {len(told.clients)} clients, {told.turns} turns: "
        f"{told.rested} params rested and none of them moved; "
        f"{told.up:,} bytes went up and {told.down:,} came down, all of them explained by the plan "
        f"{run.agreement.method.plan.fingerprint}; no client's own param went up. "
        f"{_masked_told(told.rounds)}{read}"
    )


def _masked_told(rounds: list[RoundRecord]) -> str:
    """Which sums were masked, of whom, and what of them stayed closed."""
    masked = [each.masked for each in rounds if each.masked is not None]
    if not masked:
        return ""
    given_up = [each for each in masked if ALL in each.closed]
    opened = [each for each in masked if ALL not in each.closed]
    sites = sorted({site for each in opened for site in each.sites})
    closed = {key for each in opened for key in each.closed}
    least = min((len(each.sites) for each in opened), default=0)
    said = f"The server saw {len(opened)} sums under masks and no update: of {least} sites or more"
    said += f" of {', '.join(sites)}" if sites else ""
    said += f"; {len(closed)} params stayed closed in some round" if closed else ""
    return said + (f"; {len(given_up)} rounds were given up. " if given_up else ". ")


def _opening_faults(run: Run) -> list[str]:
    """Segments of the ledger that open with other numbers than those before them make."""
    try:
        return list(opening_faults(run.folder, run.meta["files"]))
    except RecordError:
        return []  # such a line is a fault of its own


def _world_faults(run: Run, rounds: list[RoundRecord]) -> list[str]:
    """The committed world must be what the ledger last said of each of its values."""
    faults = [f"world, {each}" for each in run.world_faults()]
    if any(each.startswith(f"world, generation {run.round}:") for each in faults):
        return faults
    last, versions = dict[str, str](), dict.fromkeys(run.world.values, 0)
    for record in rounds:
        last |= record.moved
        versions |= dict.fromkeys(record.moved, record.round)
    held, number = run.world.values, rounds[-1].round if rounds else 0
    if number != run.round:
        faults.append(f"the world is of round {run.round}, and the ledger of {number}")
    if versions != run.world.versions:
        faults.append("the world's values changed in other rounds than the ledger says")
    return faults + [
        f"the world's {key} is not what the ledger says"
        for key, mark in last.items()
        if key not in held or digest(held[key]) != mark
    ]


def _best_faults(run: Run, rounds: list[RoundRecord]) -> list[str]:
    """The best world that is kept must be what the ledger said of each value by then."""
    if not run.has_best:
        return []
    try:
        best = run.best
    except FedplanError as error:
        return [f"the best world: {error}"]
    told = {
        key: mark for each in rounds if each.round <= best.round for key, mark in each.moved.items()
    }
    return [
        f"the best world's {key} is not what the ledger says of round {best.round}"
        for key, mark in told.items()
        if key not in best.values or digest(best.values[key]) != mark
    ]


def _home_faults(run: Run, last: Mapping[str, TurnRecord]) -> list[str]:
    """Each home must be there, whole, and what its client's last turn left."""
    faults = list[str]()
    for client, turn in last.items():
        journal = run.journal(client)
        if not journal.folder.is_dir():
            faults.append(f"{client}'s home is lost: there is no {journal.folder}")
            continue
        try:
            faults += [f"{client}'s home, {each}" for each in journal.faults()]
            faults += _kept_faults(run, journal, turn)
        except FedplanError as error:  # one home that cannot be read hides no fault of the others
            faults.append(f"{client}'s home: {error}")
    return faults


def _kept_faults(run: Run, journal: Journal, turn: TurnRecord) -> Iterator[str]:
    """A home may be a turn ahead, of a round that was not committed or that did not count it."""
    agreement, client = run.agreement, turn.client
    following = agreement.request(run.round + 1, client)
    done = journal.last(following)
    if done != agreement.request(turn.round, client):
        if done not in run.requests(client, after=turn.round):
            yield f"{client}'s home is not that of its turn in round {turn.round}"
        return
    home, notes = journal.home(following)
    after, trainable = parted(agreement.params, turn.after), set(agreement.trainable)
    letters = zip(agreement.params, turn.roles, strict=False)
    own = [p for p, letter in letters if ROLES[letter].own and p in trainable]
    file = journal.folder / KEY
    if not own:
        return  # who keeps nothing has no key
    if not file.exists():
        yield f"{client} has lost the key of its digests, {file}"
        return
    key = read_secret(file)
    for p in own:
        if p.key not in home:
            yield f"{client}'s {p.key} is lost from its home"
        elif keyed(key, p.key, _told_mark(notes, p.key, digest(home[p.key]))) != after[p.key]:
            yield f"{client}'s {p.key} is not what its last turn left"


def _told_mark(notes: Mapping[str, Any], key: str, mark: str) -> str:
    """The digest of a client's own value as its turn told it: with a round, where it noted one."""
    noted = str(notes.get("marks", {}).get(key, ""))
    return noted if noted.startswith(f"{mark} ") else mark


def _charge_faults(run: Run) -> list[str]:
    """Charges that were changed, or are not those of the guarantee."""
    try:
        if run.agreement.guarantee is not None:
            Statement.of(run.agreement.guarantee, run.study.train.rounds, run.folder)
    except FedplanError as error:
        return [str(error)]
    return []


def _row_faults(run: Run) -> tuple[list[str], str]:
    """Clients whose rows are no longer those of the run, and whether that could be seen."""
    if not run.identity.rows:
        return [], ""
    try:
        shares = shares_of(run.study, None)
    except (FedplanError, OSError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        return [], f"The rows were not checked: {reason[:200]}"
    changed = changed_rows(run.identity.rows, shares.marks)
    return [f"the rows of {name} are not those of the run" for name in changed], (
        "The rows are those that it began with."
    )
