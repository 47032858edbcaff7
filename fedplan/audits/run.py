# SPDX-License-Identifier: Apache-2.0
"""Verify a run's folder: its ledger, stored values, privacy charges and examples."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from fedplan.audits.ledger import Movement, verify_ledger
from fedplan.errors import FedplanError
from fedplan.federation.client import KEY
from fedplan.federation.evaluation import EvalConfig
from fedplan.federation.global_state import BEST
from fedplan.federation.identity import changed_examples
from fedplan.federation.ledger.digests import keyed_digest
from fedplan.federation.ledger.records import (
    ROLE_BY_LETTER,
    WHOLE_SUM,
    RecordError,
    RoundRecord,
    TurnRecord,
    read_record,
    split_digests,
)
from fedplan.federation.ledger.segments import segment_header_faults, segment_number
from fedplan.federation.server import WRITE_ONCE_FILES
from fedplan.privacy.mechanisms.noise import read_secret
from fedplan.privacy.statement import Statement
from fedplan.storage.journal import Journal
from fedplan.studies.federated_data import load_federated_data
from fedplan.studies.record import DATA_FILE, environment_faults
from fedplan.studies.run import RunReader, read_consistently
from fedplan.tensors.named import Tensors, digest

FAILED = "The run failed the checks that the faults name"
"""Start of the text on a run with faults."""
MAX_NAMES = 3
"""The most params that the summary names."""


@dataclass
class _LedgerSummary:
    """Totals of a ledger, filled while `count_lines` is iterated; the lines are not kept.

    Without `has_clients` (states of clients in the run's folder) `last_turns` stays empty. `frozen`
    counts the params that were not trained, over all turns; `rounds` have no clients.
    """

    has_clients: bool
    movement: Movement
    turns: int = 0
    up: int = 0
    down: int = 0
    frozen: int = 0
    clients: set[str] = field(default_factory=set[str])
    rounds: list[RoundRecord] = field(default_factory=list[RoundRecord])
    last_turns: dict[str, TurnRecord] = field(default_factory=dict[str, TurnRecord])

    def count_lines(self, lines: Iterable[object]) -> Iterator[object]:
        for line in lines:
            with suppress(RecordError):
                record = read_record(line)
                self.movement.add(record)
                if isinstance(record, RoundRecord):
                    self.rounds.append(replace(record, aggregated=(), rejected={}))
                else:
                    self.turns += 1
                    self.up += record.upload_bytes
                    self.down += record.download_bytes
                    self.frozen += record.roles.count("F") + record.roles.count("H")
                    self.clients.add(record.client)
                    if self.has_clients:
                        self.last_turns[record.client] = record
            yield line


@dataclass(frozen=True)
class RunAudit:
    """The faults that the checks of a run have shown, and a text on all checks.

    `unmoved`: keys of params that were trained and never moved. That is a reason to doubt the run,
    and no fault: a layer that the loss does not use has a gradient of zero.
    """

    faults: tuple[str, ...]
    summary: str
    unmoved: tuple[str, ...] = ()


def verify_run(folder: Path) -> tuple[list[str], str]:
    """Check a run's folder; return (faults as sentences, a text), as of `audit_run`."""
    if not isinstance(folder, Path | str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise FedplanError(f"the folder is {folder!r}: give the folder of a run, as run.folder")
    audit = audit_run(folder)
    return list(audit.faults), audit.summary


def audit_run(folder: Path) -> RunAudit:
    """Check a run's folder; change nothing.

    Checks the ledger against the plan, stored models and client states against the ledger, privacy
    charges against the guarantee, and examples, if loadable, against their digests. Raises
    ConfigError before the first round.
    """
    return read_consistently(folder, _audit)


def _audit(run: RunReader) -> RunAudit:
    file_faults = run.file_faults()
    faults = [*file_faults.values()]
    lost = any(segment_number(name) and f.endswith("is lost") for name, f in file_faults.items())
    if lost or any(file_faults.get(name, "") for name in WRITE_ONCE_FILES):
        run.require_current()
        text = f"{FAILED}, and without these files nothing else can be checked."
        return RunAudit(tuple(faults), text)
    movement = Movement(run.agreement, run.identity.digests)
    summary = _LedgerSummary(bool(run.identity.examples), movement)
    faults += run.identity_faults()
    lines = summary.count_lines(run.ledger_lines())
    faults += verify_ledger(run.agreement, lines, run.identity.digests)
    if not file_faults:
        with suppress(RecordError):  # reported as a fault of that line
            faults += list(segment_header_faults(run.folder, run.meta["files"]))
    faults += _global_state_faults(run, summary.rounds)
    faults += _best_faults(run, summary.rounds)
    charge_faults, charges_checked = _charge_faults(run)
    faults += charge_faults
    faults += _client_state_faults(run, summary.last_turns)
    changed, examples_checked = _example_faults(run)
    faults += changed
    if DATA_FILE in run.meta["files"]:  # else the run is of an older version
        faults += environment_faults(run.folder)
    if faults:
        run.require_current()
        text = f"{FAILED}; all other checks passed."
        return RunAudit(tuple(faults), text, tuple(movement.unmoved))
    frozen = "the plan froze nothing; "
    if summary.frozen:
        frozen = f"frozen params were checked {summary.frozen:,} times and none changed; "
    lost = sum(record.download_bytes for record in summary.rounds) - summary.down
    wasted = f", and {lost:,} downloaded by clients that were not aggregated" if lost > 0 else ""
    text = (
        f"{run.round} rounds, {len(summary.clients)} clients, {summary.turns} turns: "
        f"{frozen}{_describe_movement(movement)}; "
        f"{summary.up:,} bytes were uploaded and {summary.down:,} downloaded, all "
        f"explained by the plan {run.agreement.method.plan.fingerprint}{wasted}; no personal param "
        "was uploaded. "
        f"{_describe_masked_sums(summary.rounds)}{charges_checked}{examples_checked}"
    )
    return RunAudit((), text, tuple(movement.unmoved))


def _describe_movement(movement: Movement) -> str:
    """Clause on the trained params: that all moved, or which did not."""
    trained, unmoved = len(movement.trained), movement.unmoved
    if not trained:
        return "nothing was trained"
    if not unmoved:
        return f"all {trained} trained params moved"
    names = ", ".join(unmoved[:MAX_NAMES])
    more = f" and {len(unmoved) - MAX_NAMES} more" if len(unmoved) > MAX_NAMES else ""
    return f"of {trained} trained params {len(unmoved)} never moved ({names}{more})"


def _describe_masked_sums(rounds: list[RoundRecord]) -> str:
    """Sentence, with a space behind it, on the securely aggregated sums; "" without any."""
    masked = [record.secagg for record in rounds if record.secagg is not None]
    if not masked:
        return ""
    unmasked = [record for record in masked if WHOLE_SUM not in record.not_unmasked]
    failed = len(masked) - len(unmasked)
    clients = sorted({client for record in unmasked for client in record.clients})
    withheld = {key for record in unmasked for key in record.not_unmasked}
    least = min((len(record.clients) for record in unmasked), default=0)
    text = f"The server saw {len(unmasked)} securely aggregated sums and no update: of {least} "
    text += f"clients or more of {', '.join(clients)}" if clients else "clients or more"
    text += f"; {len(withheld)} params were withheld in some round" if withheld else ""
    return text + (f"; {failed} rounds were given up. " if failed else ". ")


def _global_state_faults(run: RunReader, rounds: list[RoundRecord]) -> list[str]:
    faults = [f"global model, {fault}" for fault in run.global_state_faults()]
    if any(fault.startswith(f"global model, checkpoint {run.round}:") for fault in faults):
        return faults
    last, versions = dict[str, str](), dict.fromkeys(run.global_state.values, 0)
    for record in rounds:
        last |= record.changed
        versions |= dict.fromkeys(record.changed, record.round)
    values, number = run.global_state.values, rounds[-1].round if rounds else 0
    if number != run.round:
        faults.append(f"the global model is of round {run.round}, and the ledger of {number}")
    if versions != run.global_state.versions:
        faults.append("the global model's values changed in other rounds than the ledger says")
    changed = _changed_values(values, last)
    return faults + [f"the global model's {key} is not what the ledger says" for key in changed]


def _best_faults(run: RunReader, rounds: list[RoundRecord]) -> list[str]:
    """Faults of the run's stored best global model, as sentences; [] if none is to be stored."""
    expected, keep_best = 0, run.study.evaluate.keep_best
    if keep_best:
        higher = bool(run.higher_is_better(run.primary))
        config = EvalConfig(keep_best=keep_best, primary=run.primary, higher_is_better=higher)
        try:
            expected = config.best_round(run.metrics)
        except FedplanError:  # a damaged ledger or metrics file, which other checks name
            return []
    if not expected and not run.has_best:
        return []
    try:
        best = run.best_state
    except FedplanError as error:
        return [f"the best global model: {error}"]
    if best.round != expected:
        return [
            f"{BEST} holds round {best.round}, and round {expected} is the best: continue the run "
            "with --resume, or restore it"
        ]
    last = dict[str, str]()
    for record in rounds:
        if record.round <= best.round:
            last |= record.changed
    fault = f"is not what the ledger says of round {best.round}"
    return [f"the best global model's {key} {fault}" for key in _changed_values(best.values, last)]


def _changed_values(values: Tensors, digests: Mapping[str, str]) -> list[str]:
    """Keys of `digests` for which `values` has no tensor, or a tensor of another digest."""
    return [
        k for k, expected in digests.items() if k not in values or digest(values[k]) != expected
    ]


def _charge_faults(run: RunReader) -> tuple[list[str], str]:
    """Faults of the privacy charges in the run's folder, and a sentence, "" without any."""
    guarantee = run.agreement.guarantee
    if guarantee is None:
        return [], ""
    try:
        statement = Statement.of(guarantee, run.study.train.rounds, run.folder)
    except FedplanError as error:
        return [str(error)], ""
    if not statement.charges:
        return [], ""
    return [], (
        "All privacy charges are those that the study promises: epsilon "
        f"{statement.epsilon_spent:.4f} of {guarantee.epsilon:g} is spent. "
    )


def _client_state_faults(run: RunReader, last_turns: Mapping[str, TurnRecord]) -> list[str]:
    """Faults of the clients' states in the run's folder: lost, damaged, or not of the last turn."""
    faults = list[str]()
    for client, turn in last_turns.items():
        journal = run.journal(client)
        if not journal.folder.is_dir():
            lost = f"{client}'s state is lost: there is no {journal.folder}"
            faults += [] if journal.optional else [lost]
            continue
        try:
            faults += [f"{client}'s state, {damage}" for damage in journal.find_damage()]
            faults += [] if journal.optional else _personal_value_faults(run, journal, turn)
        except FedplanError as error:  # the other clients are checked all the same
            faults.append(f"{client}'s state: {error}")
    return faults


def _personal_value_faults(run: RunReader, journal: Journal, turn: TurnRecord) -> Iterator[str]:
    """Yield faults of a client's personal values, unless its state is ahead of the ledger."""
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
    key_file = journal.folder / KEY
    if not personal:
        return  # without personal values there is no key
    if not key_file.exists():
        yield f"{client} has lost the key of its digests, {key_file}"
        return
    key = read_secret(key_file)
    for p in personal:
        if p.key not in state:
            yield f"{client}'s {p.key} is lost from its state"
            continue
        value_digest, noted = digest(state[p.key]), str(notes.get("digests", {}).get(p.key, ""))
        # The turn recorded the digest with a round behind it, if the notes have one.
        recorded = noted if noted.startswith(f"{value_digest} ") else value_digest
        if keyed_digest(key, p.key, recorded) != after[p.key]:
            yield f"{client}'s {p.key} is not the value that its last turn left"


def _example_faults(run: RunReader) -> tuple[list[str], str]:
    """Return a fault for each client with changed examples, and a sentence.

    The sentence says that the examples are unchanged (true only without faults), or why they were
    not checked; "" if the run has no digests.
    """
    if not run.identity.examples:
        return [], ""
    try:
        data = load_federated_data(run.study, None)
    except (FedplanError, OSError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        return [], f"The examples were not checked: {reason[:200]}"
    changed = changed_examples(run.identity.examples, data.digests)
    faults = [f"the examples of {name} are not those of the run" for name in changed]
    return faults, "The examples are unchanged since the start of the run."
