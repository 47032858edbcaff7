# SPDX-License-Identifier: Apache-2.0
"""The server's side of a run: rounds, ledger and checkpoints in the run's folder."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from fedplan import seeds
from fedplan.errors import FedplanError, StoreError
from fedplan.federation.aggregation.factory import make_aggregation
from fedplan.federation.aggregation.protocol import Aggregator
from fedplan.federation.agreement import Agreement, Roster, class_turns, last_changing_rounds
from fedplan.federation.global_state import BEST, METRICS, GlobalState, global_values
from fedplan.federation.identity import (
    GLOBAL_FOLDER,
    RUN_FILE,
    STUDY,
    RunIdentity,
    load_or_create_identity,
    read_identity,
)
from fedplan.federation.ledger.events import CommittedRound
from fedplan.federation.ledger.history import History, Metrics, make_warnings, round_row
from fedplan.federation.ledger.records import RoundRecord, TurnRecord, join_digests, read_round
from fedplan.federation.ledger.segments import (
    next_segment,
    open_ledger,
    read_history,
    read_segment,
    segment_number,
)
from fedplan.federation.messages import Update
from fedplan.federation.participation import Participation
from fedplan.federation.rounds import (
    RequestBuilder,
    RoundState,
    accept_update,
    announce_phase,
    close_round,
    make_request,
)
from fedplan.models.params import Block
from fedplan.privacy.guard import CHARGES_FILE, SECRET_FILE
from fedplan.storage.append_log import CommittedLog, read_json_lines
from fedplan.storage.files import failpoint, file_size_and_digest
from fedplan.storage.store import Store
from fedplan.tensors.named import DigestCache, digests
from fedplan.training.probes import data_independent_input

log = logging.getLogger("fedplan")

WRITE_ONCE_FILES = (STUDY, "manifest.json", "task.json", RUN_FILE)
"""Files of a run's folder that are written before the first round; only the study may change."""

EVALUATION = "evaluation.json"
"""File of a run's folder on its last round."""

Scores = Mapping[Block, float] | None
"""Scores of blocks for a joint choice, if there is one."""


class Server:
    """The server's side of a run in a folder, independent of the transport.

    Opening a folder with a run resumes the run; else a new run is created there. For each round,
    call `begin_round`, `take` for each update, `close_round` and `commit`; committed rounds survive
    a crash at any time. The folder is locked while the server object lives.

    `agreement`: settings that server and clients fixed before round 1. `start`: initial values of
    all params that may change; a value is dropped once the global state has a newer one. `rounds`:
    rounds of the run. `roster`: all clients with their traits. `participation`: samples the clients
    of a round; all if None. `start_digests`: digests of all params' initial values; computed from
    `start` if None. `examples_digests`: digests of the clients' examples, in a simulation. Raises
    FedplanError if the folder has another run, is locked, or lacks a file of the run.
    """

    def __init__(
        self,
        agreement: Agreement,
        start: Mapping[str, Tensor],
        folder: Path,
        *,
        rounds: int,
        roster: Roster,
        participation: Participation | None = None,
        start_digests: Mapping[str, str] | None = None,
        examples_digests: Mapping[str, str] | None = None,
    ) -> None:
        self.start, self.folder, self.rounds = dict(start), folder, rounds
        self.roster: dict[str, Mapping[str, str]] = dict(roster)
        self.digests = DigestCache()
        self.start_digests = dict(digests(start) if start_digests is None else start_digests)
        self.store = Store(folder / GLOBAL_FOLDER)
        self.store.lock()
        checkpoint = self.store.read_newest()
        if checkpoint and not (
            (folder / RUN_FILE).exists() and read_identity(folder).id == checkpoint.meta["run"]
        ):
            raise FedplanError(
                f"{folder / RUN_FILE} is not of the same run as {folder / GLOBAL_FOLDER}: "
                "restore a copy of it"
            )
        examples = dict(examples_digests or {})
        joined = join_digests(agreement.params, self.start_digests)
        expected = RunIdentity(agreement.run, agreement.study, agreement.start, examples, joined)
        self.identity = load_or_create_identity(folder, expected)
        self.agreement = agreement = replace(agreement, run=self.identity.id)
        meta = checkpoint.meta if checkpoint else {}
        files: dict[str, Any] = meta.get("files", {})
        self._files: dict[str, list[int | str]] = dict(files)
        # Another noise secret would draw other noise for values that were already released.
        for name in (name for name in files if Path(name).name == SECRET_FILE):
            self.require_unchanged(name)
        self.global_state = (
            GlobalState.from_tensors(checkpoint.tensors, meta)
            if checkpoint
            else GlobalState.initial(agreement, start)
        )
        self.aggregation = make_aggregation(
            agreement, folder / "privacy", participation or Participation(), meta
        )
        self._file_digests = dict[Path, tuple[tuple[int, int, int], list[int | str]]]()
        self._drop_outdated_start()
        self._checks_best = True
        if max(Store(folder / BEST, keep=1).numbers(), default=0) > self.global_state.round:
            shutil.rmtree(folder / BEST)  # of a round whose state is damaged, and that is run again
            self._checks_best = False
        if checkpoint is None:
            self.record_files([RUN_FILE])
        self.ledger = open_ledger(folder, files, self.global_state.round)
        length, sha256 = files.get(METRICS, (0, ""))
        self.metrics = CommittedLog(folder / METRICS, length=length, sha256=sha256)

    def record_files(self, names: Iterable[str]) -> None:
        """Record the digests of files of the folder that were just written, for `verify`.

        They are in all later checkpoints, and in the newest one, if there is one.
        """
        entries = {name: file_size_and_digest(self.folder / name) for name in names}
        if entries.items() <= self._files.items():
            return
        self._files |= entries
        self._replace_files(entries)

    def remove_evaluation(self) -> None:
        """Remove the file on the last round, and its record, from a run that goes on."""
        if self._files.pop(EVALUATION, None):
            self._replace_files({})
        (self.folder / EVALUATION).unlink(missing_ok=True)

    def _replace_files(self, entries: dict[str, list[int | str]]) -> None:
        """Add entries to the files of the checkpoint of this round; drop those not recorded."""
        checkpoint = self.store.peek()
        if checkpoint is not None and checkpoint.number == self.global_state.round:
            old: dict[str, list[int | str]] = checkpoint.meta["files"]
            files = {name: old[name] for name in old if name in self._files} | entries
            self.store.replace_meta(checkpoint.meta | {"files": files}, number=checkpoint.number)

    def require_unchanged(self, name: str) -> None:
        """Raise FedplanError if a file of the folder was recorded, and is lost or changed."""
        if name in self._files and not self.is_recorded(name):
            raise FedplanError(
                f"{self.folder / name} is missing or changed: restore it from a backup, or repair "
                "a simulation with `fedplan verify --repair`"
            )

    def is_recorded(self, name: str) -> bool:
        """Whether a file of the folder is as it was recorded last."""
        file = self.folder / name
        return file.is_file() and file_size_and_digest(file) == self._files.get(name)

    def begin_round(self) -> RoundState:
        """Return the open next round, with a request to each sampled client.

        Sets the phase of the round in the global state. Layer scores that need no poll are in the
        requests: those of the last vote, or under client-level DP without a vote those of a
        data-independent probe. Raises as `sample_clients`.
        """
        agreement = self.agreement
        self.global_state = announce_phase(agreement, self.global_state)
        number, scores = self.global_state.round + 1, self.global_state.choice or None
        cohort = self.aggregation.sample_clients(number, list(self.roster))
        builder = RequestBuilder(agreement, self.global_state)
        round_state = RoundState(
            {name: builder.request(name, self.roster[name]) for name in cohort},
            self._open_aggregator(None),
            start_digests=self.start_digests,
            digests=self.digests,
        )
        turns = class_turns(agreement.method.plan, self.roster, number, self.global_state.phase)
        votes = agreement.guarantee is not None and agreement.guarantee.vote_noise_multiplier
        # The result of a poll would reveal which clients take part.
        no_poll = self.aggregation.hides_clients and not votes and agreement.method.joint_choice
        if no_poll and any(map(agreement.selects_blocks, turns)):
            seed = seeds.seed(agreement.experiment, "probe", number)
            scores = agreement.method.probe(data_independent_input(agreement.blocks, seed))
        self._set_scores(round_state, scores)
        return round_state

    def voters(self, round_state: RoundState) -> list[str] | None:
        """Return the clients of the round to poll for layer scores before training.

        None if the round has neither a poll nor a DP vote. If not None, call `choose_blocks`. The
        list of a vote may be empty: the noise of the vote hides whether there were clients.
        """
        guarantee, agreement = self.agreement.guarantee, self.agreement
        if guarantee is not None and guarantee.vote_noise_multiplier:
            is_voting = guarantee.is_voting_round(self.global_state.round + 1)
            return list(round_state.cohort) if is_voting else None
        if not agreement.method.joint_choice or self.aggregation.hides_clients:
            return None
        cohort = round_state.cohort.items()
        return [name for name, request in cohort if agreement.selects_blocks(request.turn)] or None

    def choose_blocks(
        self, round_state: RoundState, polled: Mapping[str, Mapping[Block, float]]
    ) -> None:
        """Put joint layer scores into all requests of `round_state`; call before training.

        `polled`: scores of a poll or vote by client; a client with an unknown block is left out. A
        vote counts until the next; client-level DP charges the budget. Raises FedplanError if a
        poll has no valid scores, or if a client has responded already.
        """
        guarantee, number = self.agreement.guarantee, self.global_state.round + 1
        blocks = set(self.agreement.blocks)
        valid = {name: scores for name, scores in polled.items() if scores.keys() <= blocks}
        joint = self.aggregation.joint_scores(number, valid)
        if guarantee is not None and guarantee.vote_noise_multiplier:
            self.global_state = replace(self.global_state, choice=joint)
        elif not joint:
            raise FedplanError(
                f"round {number}: no client gave valid scores, so no layers can be chosen; start "
                "the run again to repeat this round"
            )
        self._set_scores(round_state, joint)

    def _set_scores(self, round_state: RoundState, scores: Scores) -> None:
        """Put scores, if any, into all requests, and open a new aggregator for these requests."""
        if round_state.responded:
            raise FedplanError("scores must be set before any client has responded")
        if scores is not None:
            for client, request in round_state.cohort.items():
                turn = replace(request.turn, scores=scores)
                round_state.cohort[client] = replace(request, turn=turn)
            round_state.aggregator = self._open_aggregator(scores)

    def _open_aggregator(self, scores: Scores) -> Aggregator:
        """Return an empty aggregator for the next round, given the joint layer scores."""
        agreement, global_state = self.agreement, self.global_state

        def shared_values() -> dict[str, Tensor]:  # of all params that any client may share
            number, phase = global_state.round + 1, global_state.phase
            turns = class_turns(agreement.method.plan, self.roster, number, phase)
            scored = [replace(turn, scores=scores) for turn in turns]
            params = self.aggregation.shared_params(scored)
            return {p.key: global_state.values[p.key] for p in params}

        return self.aggregation.open_round(global_state, shared_values, len(self.roster))

    def resend_all(self, round_state: RoundState, client: str) -> None:
        """Replace the request to a client that lost its state by one with all values that it needs.

        Counts the bytes of the old request as wasted.
        """
        old = round_state.cohort[client]
        round_state.wasted_bytes += old.nbytes
        traits = self.roster[client]
        request = make_request(self.agreement, self.global_state, client, traits, full=True)
        round_state.cohort[client] = replace(
            request,
            turn=replace(request.turn, scores=old.turn.scores),
            base_digests=old.base_digests,
            attempt=old.attempt,
        )

    def take(self, round_state: RoundState, update: Update, *, late: bool = False) -> None:
        """Validate an update and add it to the round, or note why not; see `accept_update`."""
        accept_update(self.agreement, self.global_state, round_state, update, is_late=late)

    def close_round(self, round_state: RoundState) -> None:
        """Aggregate the updates of a round into `global_state`, in memory; call `commit` next.

        Client-level DP charges the privacy budget. Raises FedplanError if the server optimizer
        returns an invalid value, PrivacyError if the budget does not suffice.
        """
        failpoint("round.before_close")
        result = round_state.aggregator.close()
        round_state.products, round_state.defence = result.products, result.defence
        round_state.secagg = result.secagg
        # The keys that a later round may change, in this or a later phase.
        number, phase = self.global_state.round + 1, self.global_state.phase
        phases = self.agreement.method.phase_rule.phases
        remaining = phases[phases.index(phase) :] if phase else ("", *phases)
        last_rounds = (self._last_rounds[phase] for phase in remaining)
        later = {key for rounds in last_rounds for key, last in rounds.items() if last > number}
        self.global_state = close_round(
            self.agreement, self.global_state, round_state, result, later=later
        )

    @cached_property
    def _last_rounds(self) -> dict[str, dict[str, float]]:
        """By phase, the last round that may change each key; see `last_changing_rounds`."""
        return last_changing_rounds(self.agreement, self.roster)

    def commit(
        self,
        round_state: RoundState,
        scores: Mapping[str, Any] | None = None,
        signs: Mapping[str, Any] | None = None,
    ) -> CommittedRound:
        """Write a closed round to disk (ledger, metrics, then global state); return the round.

        A crash before the global state is written repeats the round. `scores`: for the metrics
        file. `signs`: further fields of the round's ledger line, as `attention`. Logs all warnings.
        """
        history = self._history
        turns = tuple(round_state.records[name] for name in sorted(round_state.records))
        global_state, sizes = self.global_state, self.agreement.download_bytes
        self.digests.keep_only(global_state.values.values())
        changed = {k for k, v in global_state.versions.items() if v == global_state.round}
        requests = round_state.cohort.values()
        down = sum(sizes[key] for request in requests for key in request.versions)
        record = RoundRecord(
            round=global_state.round,
            phase=global_state.phase,
            aggregated=tuple(sorted(round_state.aggregated)),
            rejected=dict(sorted(round_state.rejected.items())),
            changed={k: self.digests.short_digest(global_state.values[k]) for k in sorted(changed)},
            drift=global_state.drift,
            upload_bytes=sum(turn.upload_bytes for turn in turns),
            download_bytes=round_state.wasted_bytes + down,
            products=round_state.products,
            defence=round_state.defence,
            secagg=round_state.secagg,
            edges=dict(sorted(round_state.edges.items())) or None,
        )
        record = read_round({**record.json(), **(signs or {})})
        record = replace(record, warnings=make_warnings(record, turns, history.drifts))
        ledger, opening = next_segment(self.ledger, history)
        ledger.append([*opening, *(turn.json() for turn in turns), record.json()])
        self.ledger = ledger
        failpoint("round.ledger_written")
        self.metrics.append([{"round": self.global_state.round, **scores}] if scores else [])
        failpoint("round.before_commit")
        tensors, meta = self.global_state.to_tensors()
        meta |= {"run": self.identity.id, "files": self._update_files()}
        if (guard := self.aggregation.guard) is not None:
            meta["charges"] = len(guard.budget.charges)  # so that a shortened budget file is seen
        self.store.write(tensors, meta, number=self.global_state.round)
        failpoint("round.committed")
        self._drop_outdated_start()
        history.add(record, turns, scores or {})
        for warning in record.warnings:
            log.warning("round %d: %s", record.round, warning)
        return self._committed_round(record, turns, scores or {})

    def _committed_round(
        self, record: RoundRecord, turns: tuple[TurnRecord, ...], scores: Mapping[str, Any]
    ) -> CommittedRound:
        """Return the object that callbacks get for a round, with a copy of all rounds' metrics."""
        run = self.agreement.experiment, self.identity.id, self.folder
        metrics, hides_clients = Metrics(self.history), self.aggregation.hides_clients
        return CommittedRound(self.rounds, record, turns, scores, metrics, *run, hides_clients)

    def _drop_outdated_start(self) -> None:
        """Drop the initial values that the global state has replaced, to free memory."""
        for key in [key for key in self.start if self.global_state.versions.get(key, 0)]:
            del self.start[key]

    def add_scores(self, committed: CommittedRound, scores: Mapping[str, Any]) -> CommittedRound:
        """Add evaluation metrics (`scores`) to the last committed round, on disk and in memory.

        For metrics that arrive after `commit`. Returns `committed` with the metrics.
        """
        self.metrics.append([{"round": committed.round, **scores}])
        self.record_files([METRICS])
        self.history[-1] = round_row(committed.record, committed.turns, scores)
        return replace(committed, scores=scores, metrics=Metrics(self.history))

    def keep_best(self, number: int) -> None:
        """If the global state is of round `number`, not 0, store it in place of the best one.

        The first call checks the stored one: raises StoreError if it is damaged or of another
        round.
        """
        folder, checks, self._checks_best = self.folder / BEST, self._checks_best, False
        store = Store(folder, keep=1)
        if number == self.global_state.round and number:
            if checks and store.find_damage():
                shutil.rmtree(folder)
            if number not in store.numbers():
                tensors, meta = replace(self.global_state, memory={}).to_tensors()
                store.write(tensors, meta | {"run": self.identity.id}, number=number)
        elif checks and number and (store.find_damage() or store.numbers() != [number]):
            raise StoreError(
                f"{folder} does not hold the best round, {number}, intact: restore it from a "
                "backup, or repair a simulation with `fedplan verify --repair`"
            )

    @property
    def history(self) -> Metrics:
        """The metrics of all committed rounds."""
        return self._history.metrics

    @cached_property
    def _history(self) -> History:
        """Metrics of all rounds and drift of the last ones, read from the ledger once."""
        return read_history(self.ledger, self.metrics.file)

    def last_round(self) -> CommittedRound | None:
        """Return the last committed round, read from ledger and metrics; None before the first."""
        _, records = read_segment(self.ledger.file)
        if not records or not isinstance(record := records[-1], RoundRecord):
            return None
        lines = {line["round"]: line for line in read_json_lines(self.metrics.file)}
        scores = {k: v for k, v in lines.get(record.round, {}).items() if k != "round"}
        all_turns = (each for each in records if isinstance(each, TurnRecord))
        turns = tuple(turn for turn in all_turns if turn.round == record.round)
        return self._committed_round(record, turns, scores)

    def _update_files(self) -> dict[str, list[int | str]]:
        """Return [length, digest] by path of the run's files beside the global state, for `verify`.

        These are recorded files, secrets and charges of DP, the open ledger segment and metrics.
        Secrets and charges are read again only if their time, size or inode have changed.
        """
        entries = {name: e for name, e in self._files.items() if not segment_number(name)}
        files = list[Path]()
        for name in (SECRET_FILE, CHARGES_FILE) if self.agreement.guarantee else ():
            files += sorted((self.folder / "privacy").rglob(name))
        for file in files:
            stat = file.stat()
            state = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
            if file not in self._file_digests or self._file_digests[file][0] != state:
                self._file_digests[file] = state, file_size_and_digest(file)
            entries[str(file.relative_to(self.folder))] = self._file_digests[file][1]
        entries |= {f.file.name: f.length_and_digest for f in (self.ledger, self.metrics)}
        self._files = entries
        return entries

    def global_values(self) -> dict[str, Tensor]:
        """Return the global model's trainable values; params that clients keep have the start's."""
        return global_values(self.agreement, self.global_state, self.start)
