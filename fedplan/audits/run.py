# SPDX-License-Identifier: Apache-2.0
"""Audits: a run's folder re-checked: its ledger, and the values that lie on the disk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from fedplan.audits.ledger import verify_lines
from fedplan.errors import FedplanError
from fedplan.federation.client import KEY
from fedplan.federation.identity import changed_rows
from fedplan.federation.marks import keyed
from fedplan.federation.record import (
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
    records = list(_records(run))
    turns = [record for record in records if isinstance(record, TurnRecord)]
    faults = [*found.values(), *run.identity_faults()]
    faults += verify_lines(run.agreement, run.lines, run.identity.marks)
    if not found:
        faults += _opening_faults(run)
    faults += _world_faults(run, [each for each in records if isinstance(each, RoundRecord)])
    faults += _best_faults(run, [each for each in records if isinstance(each, RoundRecord)])
    faults += _charge_faults(run)
    if run.identity.rows:
        faults += _home_faults(run, turns)
    changed, read = _row_faults(run)
    up, down = sum(turn.up for turn in turns), sum(turn.down for turn in turns)
    rested = sum(turn.roles.count("F") + turn.roles.count("H") for turn in turns)
    clients = len({turn.client for turn in turns})
    return faults + changed, (
        f"{run.round} rounds, {clients} clients, {len(turns)} turns: "
        f"{rested} params rested and none of them moved; "
        f"{up} bytes went up and {down} came down, all of them explained by the plan "
        f"{run.agreement.method.plan.fingerprint}; no client's own param went up. {read}"
    )


def _opening_faults(run: Run) -> list[str]:
    """Segments of the ledger that open with other numbers than those before them make."""
    try:
        return list(opening_faults(run.folder, run.meta["files"]))
    except RecordError:
        return []  # such a line is a fault of its own


def _records(run: Run) -> Iterator[Record]:
    """What the ledger tells; lines that are no records are faults, and passed over here."""
    for line in run.lines:
        with suppress(RecordError):
            yield read_record(line)


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


def _home_faults(run: Run, turns: list[TurnRecord]) -> list[str]:
    """Each home must be there, whole, and what its client's last turn left."""
    faults, last = list[str](), {turn.client: turn for turn in turns}
    for client, turn in last.items():
        journal = run.journal(client)
        if not journal.folder.is_dir():
            faults.append(f"{client}'s home is lost: there is no {journal.folder}")
            continue
        faults += [f"{client}'s home, {each}" for each in journal.faults()]
        faults += _kept_faults(run, journal, turn)
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
    home, _ = journal.home(following)
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
        elif keyed(key, p.key, digest(home[p.key])) != after[p.key]:
            yield f"{client}'s {p.key} is not what its last turn left"


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
