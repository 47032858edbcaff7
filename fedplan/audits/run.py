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
    RecordError,
    RoundRecord,
    TurnRecord,
    parted,
    read_record,
)
from fedplan.federation.server import SMALL
from fedplan.federation.world import LEDGER, WORLD
from fedplan.privacy.mechanisms.secret import secret_of
from fedplan.privacy.statement import Statement
from fedplan.storage.journal import Journal, home_of
from fedplan.storage.store import Store
from fedplan.studies.run import Archive, file_faults, identity_faults, read_archive
from fedplan.studies.shares import shares_of
from fedplan.tensors.named import digest

LOOKS = 5
"""How often a run that goes on is looked at, until no round was closed meanwhile."""


def verify_run(folder: Path) -> tuple[list[str], str]:
    """Every fault of a run, in words, and a sentence of what was checked.

    Nothing in the folder is changed. Rows are checked where they can be read. What a run that goes
    on has changed meanwhile is no fault: it is then looked at again.
    """
    world, faults, checked = Store(folder / WORLD, reading=True), list[str](), ""
    for _ in range(LOOKS):
        before = world.numbers()
        faults, checked = _looked_at(folder)
        if not faults or world.numbers() == before:
            break
    return faults, checked


def _looked_at(folder: Path) -> tuple[list[str], str]:
    found = file_faults(folder)
    if found.keys() & {*SMALL} or not (folder / LEDGER).is_file():
        # Without these there is nothing to hold the rest against.
        return [*found.values()], ""
    archive = read_archive(folder)
    agreement, turns = archive.agreement, list(_turns(archive))
    faults = [*found.values(), *identity_faults(archive)]
    faults += verify_lines(agreement, archive.lines, archive.identity.marks)
    faults += _world_faults(archive)
    faults += _charge_faults(archive)
    if archive.identity.rows:
        faults += _home_faults(archive, turns)
    changed, read = _row_faults(archive)
    up, down = sum(turn.up for turn in turns), sum(turn.down for turn in turns)
    rested = sum(turn.roles.count("F") + turn.roles.count("H") for turn in turns)
    clients = len({turn.client for turn in turns})
    return faults + changed, (
        f"{archive.world.round} rounds, {clients} clients, {len(turns)} turns: "
        f"{rested} params rested and none of them moved; "
        f"{up} bytes went up and {down} came down, all of them explained by the plan "
        f"{agreement.method.plan.fingerprint}; no client's own param went up. {read}"
    )


def _turns(archive: Archive) -> Iterator[TurnRecord]:
    for line in archive.lines:
        with suppress(RecordError):
            record = read_record(line)
            if isinstance(record, TurnRecord):
                yield record


def _world_faults(archive: Archive) -> list[str]:
    """The committed world must be what the ledger last said of each of its values."""
    faults = [f"world, {each}" for each in Store(archive.folder / WORLD, reading=True).faults()]
    last, versions, number = dict[str, str](), dict.fromkeys(archive.world.values, 0), 0
    for line in archive.lines:
        with suppress(RecordError):
            record = read_record(line)
            if isinstance(record, RoundRecord):
                number = record.round
                last |= record.moved
                versions |= dict.fromkeys(record.moved, number)
    held = archive.world.values
    if number != archive.world.round:
        faults.append(f"the world is of round {archive.world.round}, and the ledger of {number}")
    if versions != archive.world.versions:
        faults.append("the world's values changed in other rounds than the ledger says")
    return faults + [
        f"the world's {key} is not what the ledger says"
        for key, mark in last.items()
        if key not in held or digest(held[key]) != mark
    ]


def _home_faults(archive: Archive, turns: list[TurnRecord]) -> list[str]:
    """Each home must be there, whole, and what its client's last turn left."""
    faults, last = list[str](), {turn.client: turn for turn in turns}
    for client, turn in last.items():
        place = home_of(archive.folder, client)
        if not place.is_dir():
            faults.append(f"{client}'s home is lost: there is no {place}")
            continue
        journal = Journal(place, reading=True)
        faults += [f"{client}'s home, {each}" for each in journal.faults()]
        faults += _kept_faults(archive, journal, turn)
    return faults


def _kept_faults(archive: Archive, journal: Journal, turn: TurnRecord) -> Iterator[str]:
    """A home may be a turn ahead, of a round that was not committed or that did not count it."""
    agreement, client, rounds = archive.agreement, turn.client, archive.world.round
    following = agreement.request(rounds + 1, client)
    told, done = agreement.request(turn.round, client), journal.last(following)
    if done != told:
        unheard = (agreement.request(n, client) for n in range(turn.round + 1, rounds + 1))
        if done not in unheard:
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
    key = secret_of(file)
    for p in own:
        if p.key not in home:
            yield f"{client}'s {p.key} is lost from its home"
        elif keyed(key, p.key, digest(home[p.key])) != after[p.key]:
            yield f"{client}'s {p.key} is not what its last turn left"


def _charge_faults(archive: Archive) -> list[str]:
    """Charges that were changed, or are not those of the guarantee."""
    try:
        if archive.agreement.guarantee is not None:
            Statement.of(archive.agreement.guarantee, archive.study.train.rounds, archive.folder)
    except FedplanError as error:
        return [str(error)]
    return []


def _row_faults(archive: Archive) -> tuple[list[str], str]:
    """Clients whose rows are no longer those of the run, and whether that could be seen."""
    if not archive.identity.rows:
        return [], ""
    try:
        shares = shares_of(archive.study, None)
    except (FedplanError, OSError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        return [], f"The rows were not checked: {reason[:200]}"
    changed = changed_rows(archive.identity.rows, shares.marks)
    return [f"the rows of {name} are not those of the run" for name in changed], (
        "The rows are those that it began with."
    )
