# SPDX-License-Identifier: Apache-2.0
"""Verify a run's folder: its ledger, stored values, privacy charges and examples."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedplan.audits.ledger import verify_ledger
from fedplan.errors import FedplanError
from fedplan.federation.client import KEY
from fedplan.federation.digests import keyed_digest
from fedplan.federation.identity import changed_examples
from fedplan.federation.ledger_segments import segment_header_faults, segment_number
from fedplan.federation.record import (
    ROLE_BY_LETTER,
    WHOLE_SUM,
    Record,
    RecordError,
    RoundRecord,
    TurnRecord,
    read_record,
    split_digests,
)
from fedplan.federation.server import WRITE_ONCE_FILES
from fedplan.privacy.mechanisms.secret import read_secret
from fedplan.privacy.statement import Statement
from fedplan.storage.journal import Journal
from fedplan.studies.federated_data import load_federated_data
from fedplan.studies.run import Run, read_consistently
from fedplan.tensors.named import digest


@dataclass
class _LedgerSummary:
    """Totals of a ledger, counted line by line: a long ledger is never in memory as a whole.

    has_clients: whether the run's folder has the clients' states, so that `last_turns` is kept.
    up, down: bytes uploaded and downloaded; frozen: params that were frozen, over all turns.
    rounds: all round records, without their clients.
    """

    has_clients: bool
    turns: int = 0
    up: int = 0
    down: int = 0
    frozen: int = 0
    clients: set[str] = field(default_factory=set[str])
    rounds: list[RoundRecord] = field(default_factory=list[RoundRecord])
    last_turns: dict[str, TurnRecord] = field(default_factory=dict[str, TurnRecord])

    def count_lines(self, lines: Iterable[object]) -> Iterator[object]:
        """Yield the lines unchanged, and count them; lines that are no records are skipped."""
        for line in lines:
            with suppress(RecordError):
                self._count(read_record(line))
            yield line

    def _count(self, record: Record) -> None:
        """Add one record to the totals."""
        if isinstance(record, RoundRecord):
            self.rounds.append(replace(record, counted=(), rejected={}))
            return
        self.turns += 1
        self.up += record.up
        self.down += record.down
        self.frozen += record.roles.count("F") + record.roles.count("H")
        self.clients.add(record.client)
        if self.has_clients:
            self.last_turns[record.client] = record


def verify_run(folder: Path) -> tuple[list[str], str]:
    """Verify a run's folder; return its faults, in words, and a summary of what was checked.

    The summary is "" if files are missing without which nothing can be checked. The folder is not
    changed. Examples are checked if they can be loaded. A run that goes on meanwhile is read again.
    """
    return read_consistently(folder, _verify_current)


def _verify_current(run: Run) -> tuple[list[str], str]:
    """Faults and summary of a run; with faults, require that it has not changed meanwhile."""
    faults, checked = _verify(run)
    if faults:
        run.require_current()
    return faults, checked


def _verify(run: Run) -> tuple[list[str], str]:
    """Faults and summary of a run as it was read."""
    file_faults = run.file_faults()
    lost = any(
        segment_number(name) and fault.endswith("is lost") for name, fault in file_faults.items()
    )
    if lost or any(file_faults.get(name, "") for name in WRITE_ONCE_FILES):
        # Without these files nothing else can be checked.
        return [*file_faults.values()], ""
    summary, faults = (
        _LedgerSummary(bool(run.identity.rows)),
        [*file_faults.values(), *run.identity_faults()],
    )
    faults += verify_ledger(
        run.agreement, summary.count_lines(run.ledger_lines()), run.identity.marks
    )
    if not file_faults:
        faults += _segment_faults(run)
    faults += _global_state_faults(run, summary.rounds)
    faults += _best_faults(run, summary.rounds)
    faults += _charge_faults(run)
    faults += _client_state_faults(run, summary.last_turns)
    changed, examples_checked = _example_faults(run)
    return faults + changed, (
        f"{run.round} rounds, {len(summary.clients)} clients, {summary.turns} turns: "
        f"frozen params were checked {summary.frozen:,} times and none changed; "
        f"{summary.up:,} bytes were uploaded and {summary.down:,} downloaded, all explained by the "
        f"plan {run.agreement.method.plan.fingerprint}; no personal param was uploaded. "
        f"{_describe_masked_sums(summary.rounds)}{examples_checked}"
    )


def _describe_masked_sums(rounds: list[RoundRecord]) -> str:
    """Sentence on the sums of secure aggregation; "" without any."""
    masked = [record.masked for record in rounds if record.masked is not None]
    if not masked:
        return ""
    unmasked = [record for record in masked if WHOLE_SUM not in record.closed]
    failed = len(masked) - len(unmasked)
    clients = sorted({client for record in unmasked for client in record.sites})
    withheld = {key for record in unmasked for key in record.closed}
    least = min((len(record.sites) for record in unmasked), default=0)
    text = f"The server saw {len(unmasked)} securely aggregated sums and no update: of {least} "
    text += f"clients or more of {', '.join(clients)}" if clients else "clients or more"
    text += f"; {len(withheld)} params were withheld in some round" if withheld else ""
    return text + (f"; {failed} rounds were given up. " if failed else ". ")


def _segment_faults(run: Run) -> list[str]:
    """Faults of ledger segments whose header does not match the segments before."""
    try:
        return list(segment_header_faults(run.folder, run.meta["files"]))
    except RecordError:
        return []  # reported as a fault of that line


def _global_state_faults(run: Run, rounds: list[RoundRecord]) -> list[str]:
    """Faults of the committed global model: each value must have its last digest in the ledger."""
    faults = [f"global model, {fault}" for fault in run.global_state_faults()]
    if any(fault.startswith(f"global model, checkpoint {run.round}:") for fault in faults):
        return faults
    last, versions = dict[str, str](), dict.fromkeys(run.global_state.values, 0)
    for record in rounds:
        last |= record.moved
        versions |= dict.fromkeys(record.moved, record.round)
    values, number = run.global_state.values, rounds[-1].round if rounds else 0
    if number != run.round:
        faults.append(f"the global model is of round {run.round}, and the ledger of {number}")
    if versions != run.global_state.versions:
        faults.append("the global model's values changed in other rounds than the ledger says")
    return faults + [
        f"the global model's {key} is not what the ledger says"
        for key, expected in last.items()
        if key not in values or digest(values[key]) != expected
    ]


def _best_faults(run: Run, rounds: list[RoundRecord]) -> list[str]:
    """Faults of the stored best global model: each value must have its digest of that round."""
    if not run.has_best:
        return []
    try:
        best = run.best_state
    except FedplanError as error:
        return [f"the best global model: {error}"]
    last = dict[str, str]()
    for record in rounds:
        if record.round <= best.round:
            last |= record.moved
    return [
        f"the best global model's {key} is not what the ledger says of round {best.round}"
        for key, expected in last.items()
        if key not in best.values or digest(best.values[key]) != expected
    ]


def _client_state_faults(run: Run, last_turns: Mapping[str, TurnRecord]) -> list[str]:
    """Faults of the clients' stored states: missing, damaged, or not those of their last turn.

    last_turns: the last recorded turn of each client.
    """
    faults = list[str]()
    for client, turn in last_turns.items():
        journal = run.journal(client)
        if not journal.folder.is_dir():
            faults.append(f"{client}'s state is lost: there is no {journal.folder}")
            continue
        try:
            faults += [f"{client}'s state, {damage}" for damage in journal.find_damage()]
            faults += _personal_value_faults(run, journal, turn)
        except FedplanError as error:  # the other clients are checked all the same
            faults.append(f"{client}'s state: {error}")
    return faults


def _personal_value_faults(run: Run, journal: Journal, turn: TurnRecord) -> Iterator[str]:
    """Faults of a client's personal values, by the digests of its last turn.

    A state may be a turn ahead, of a round that was not committed or did not aggregate it.
    """
    agreement, client = run.agreement, turn.client
    following = agreement.request_name(run.round + 1, client)
    last = journal.last_request(following)
    if last != agreement.request_name(turn.round, client):
        if last not in run.request_names(client, after=turn.round):
            yield f"{client}'s state is not that of its turn in round {turn.round}"
        return
    state, notes = journal.client_state(following)
    after, trainable = split_digests(agreement.params, turn.after), set(agreement.trainable)
    letters = zip(agreement.params, turn.roles, strict=False)
    personal = [p for p, letter in letters if ROLE_BY_LETTER[letter].is_personal and p in trainable]
    file = journal.folder / KEY
    if not personal:
        return  # without personal values there is no key
    if not file.exists():
        yield f"{client} has lost the key of its digests, {file}"
        return
    key = read_secret(file)
    for p in personal:
        if p.key not in state:
            yield f"{client}'s {p.key} is lost from its state"
            continue
        recorded = _recorded_digest(notes, p.key, digest(state[p.key]))
        if keyed_digest(key, p.key, recorded) != after[p.key]:
            yield f"{client}'s {p.key} is not the value that its last turn left"


def _recorded_digest(notes: Mapping[str, Any], key: str, value_digest: str) -> str:
    """Digest of a personal value as its turn recorded it: with a round, if the notes have one."""
    noted = str(notes.get("marks", {}).get(key, ""))
    return noted if noted.startswith(f"{value_digest} ") else value_digest


def _charge_faults(run: Run) -> list[str]:
    """Faults of the privacy charges: changed ones, and ones that the guarantee does not explain."""
    try:
        if run.agreement.guarantee is not None:
            Statement.of(run.agreement.guarantee, run.study.train.rounds, run.folder)
    except FedplanError as error:
        return [str(error)]
    return []


def _example_faults(run: Run) -> tuple[list[str], str]:
    """Faults of clients whose examples have changed, and a sentence on whether that was checked."""
    if not run.identity.rows:
        return [], ""
    try:
        data = load_federated_data(run.study, None)
    except (FedplanError, OSError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        return [], f"The examples were not checked: {reason[:200]}"
    changed = changed_examples(run.identity.rows, data.digests)
    return [f"the examples of {name} are not those of the run" for name in changed], (
        "The examples are unchanged since the start of the run."
    )
