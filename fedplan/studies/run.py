# SPDX-License-Identifier: Apache-2.0
"""Read a run's folder: its study, ledger, metrics, global model and clients' states."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar, cast

from fedplan.errors import FedplanError
from fedplan.federation.agreement import Agreement
from fedplan.federation.global_state import BEST, GLOBAL_FOLDER, METRICS, GlobalState
from fedplan.federation.history import Metrics, collect_metrics
from fedplan.federation.identity import RUN_FILE, RunIdentity, read_identity
from fedplan.federation.ledger_segments import closed_segment_faults, ledger_lines
from fedplan.federation.record import Record, parse_line, read_record
from fedplan.federation.server import STUDY
from fedplan.models.manifest import read_manifest
from fedplan.models.params import Params
from fedplan.privacy.guard import CHARGES_FILE
from fedplan.storage.journal import Journal, client_state_folder
from fedplan.storage.store import Store, TensorsAndMeta
from fedplan.studies.experiment import make_agreement
from fedplan.studies.run_folder import MANIFEST, read_run_study, read_task_file
from fedplan.studies.schema import ConfigError, Study

READ_ATTEMPTS = 5
"""Attempts to read a run that commits rounds meanwhile."""

T = TypeVar("T")


class RunAdvanced(ConfigError):
    """The run has committed another round since it was opened; its earlier state is gone."""


@dataclass(frozen=True)
class Run:
    """A read-only view of a run at its last committed round when it was opened.

    Takes no lock and writes nothing, so a run can be read while it continues. Parts are read on
    first use, always as of `round`; raises RunAdvanced if that is no longer possible.

    `round`: the last committed round; 0 before the first.
    `meta`: metadata of that round's checkpoint, such as the lengths of the files.
    """

    folder: Path
    round: int
    meta: dict[str, Any]

    @cached_property
    def study(self) -> Study:
        """The study of the run."""
        return read_run_study(self.folder)

    @cached_property
    def params(self) -> Params:
        """The params of the model."""
        return read_manifest(self.folder / MANIFEST)

    @cached_property
    def identity(self) -> RunIdentity:
        """The run's id, and digests of its study, model and data."""
        return read_identity(self.folder)

    @cached_property
    def agreement(self) -> Agreement:
        """The agreement between server and clients."""
        agreement = make_agreement(self.study, self.params)
        return replace(agreement, start=self.identity.start, run=self.identity.id)

    @property
    def labels(self) -> list[str]:
        """The labels of the task; empty for tasks without labels."""
        return self._task[0]

    @property
    def clients(self) -> list[str]:
        """The names of the clients, if the run had their data; else empty."""
        return self._task[1]

    @cached_property
    def _task(self) -> tuple[list[str], list[str]]:
        return read_task_file(self.folder)

    @cached_property
    def global_state(self) -> GlobalState:
        """The global model and the server's state at `round`.

        Raises ConfigError before the first round, or if the checkpoint is damaged.
        """
        self._require_round()
        store = self._store
        checkpoint = store.find(lambda meta: meta == self.meta)
        if checkpoint is None:
            self.require_current()
            reasons = "; ".join(map(str, store.skipped))
            raise ConfigError(
                f"{self.folder / GLOBAL_FOLDER} is damaged ({reasons}): restore it from a backup"
            )
        return GlobalState.from_tensors(checkpoint.tensors, checkpoint.meta)

    @cached_property
    def best_state(self) -> GlobalState:
        """The global state of the best round.

        Raises ConfigError unless the study had `evaluate.keep_best`.
        """
        checkpoint = Store(self.folder / BEST, read_only=True).read_newest()
        if checkpoint is None or checkpoint.meta["run"] != self.identity.id:
            raise ConfigError(
                f"{self.folder} has no best round: set evaluate.keep_best before a run starts"
            )
        return GlobalState.from_tensors(checkpoint.tensors, checkpoint.meta)

    @property
    def has_best(self) -> bool:
        """Whether a best round is stored."""
        return bool(Store(self.folder / BEST, read_only=True).numbers())

    def ledger_lines(self) -> Iterator[object]:
        """Yield the ledger's lines as parsed JSON; a line that is not JSON is yielded as bytes.

        Reads one segment of the ledger at a time, to save memory.
        """
        if self.round:
            with self._explain_missing_files():
                yield from map(_parse_ledger_line, ledger_lines(self.folder, self.meta["files"]))

    @cached_property
    def records(self) -> list[Record]:
        """The turns and rounds of the ledger; raises for a line that is neither."""
        return [read_record(line) for line in self.ledger_lines()]

    @cached_property
    def metrics(self) -> Metrics:
        """One row of numbers per round: loss, bytes, and evaluation metrics."""
        lines = self._committed_content(METRICS).splitlines()
        scores = [cast("dict[str, Any]", parse_line(line)) for line in lines]
        return collect_metrics(self.records, scores)

    def client_state(self, client: str) -> TensorsAndMeta:
        """Return a client's stored tensors and notes as of `round`.

        Raises ConfigError if the client is unknown, its state is at a site, lost, or of another
        run.
        """
        if not self.study.has_central_data:
            raise ConfigError(f"{client}'s state is at its site: run the export there")
        if client not in self.clients:
            names = ", ".join(self.clients)
            raise ConfigError(f"there is no client {client!r}; there are {names}")
        journal, next_request = (
            self.journal(client),
            self.agreement.request_name(self.round + 1, client),
        )
        state = journal.client_state(next_request)
        last_request = journal.last_request(next_request)
        if not last_request and self.round and self.global_state.last_round_of(client):
            raise ConfigError(f"{client}'s state is lost: restore {journal.folder} from a backup")
        if last_request and last_request not in self.request_names(client):
            self.require_current()
            raise ConfigError(f"{journal.folder} belongs to another run: restore it from a backup")
        return state

    def request_names(self, client: str, after: int = 0) -> set[str]:
        """Return the names of all requests to a client after a round, up to `round`."""
        return {
            self.agreement.request_name(number, client)
            for number in range(after + 1, self.round + 1)
        }

    def journal(self, client: str) -> Journal:
        """Return a client's journal, opened read-only; it may be one turn ahead of `round`."""
        return Journal(client_state_folder(self.folder, client), read_only=True)

    def require_current(self) -> None:
        """Raise RunAdvanced if the run has committed another round since it was opened."""
        if (now := open_run(self.folder)).meta != self.meta:
            raise RunAdvanced(
                f"{self.folder} advanced from round {self.round} to {now.round}: try again"
            )

    def global_state_faults(self) -> list[str]:
        """Return descriptions of damaged checkpoints of the global model."""
        return self._store.find_damage()

    def file_faults(self) -> dict[str, str]:
        """Return faults by file name: files that differ from their committed content."""
        self._require_round()
        checked = {name: self._file_fault(name) for name in self.meta["files"]}
        faults = {name: fault for name, fault in checked.items() if fault}
        return closed_segment_faults(self.folder, self.meta["files"]) | faults

    def _file_fault(self, name: str) -> str:
        """Return the fault of one file, or "": lost, changed, or longer than committed."""
        file, (length, sha256) = self.folder / name, self.meta["files"][name]
        if not file.is_file():
            return f"{name} is lost"
        content = file.read_bytes()
        if hashlib.sha256(content[:length]).hexdigest() != sha256:
            return f"{name} differs from its content at round {self.round}"
        if len(content) > length and not name.endswith(CHARGES_FILE):
            return (
                f"{name} has {len(content) - length} bytes after round {self.round}, the last "
                "committed one: continue the run with --resume, then verify it"
            )
        return ""

    def identity_faults(self) -> list[str]:
        """Return mismatches between the run's identity file, study and checkpoints."""
        identity, faults = self.identity, list[str]()
        if identity.id != self.meta["run"]:
            faults.append(f"{RUN_FILE} names another run than the global model's checkpoint")
        if identity.study != self.study.digest:
            faults.append(f"{RUN_FILE} names another study than the one in the folder")
        start = hashlib.sha256(identity.marks.encode()).hexdigest()[:16]
        if identity.start != start:
            faults.append(
                f"{RUN_FILE} has an initial-model digest that differs from its param digests"
            )
        return faults

    @property
    def _store(self) -> Store:
        return Store(self.folder / GLOBAL_FOLDER, read_only=True)

    def _require_round(self) -> None:
        if not self.round:
            raise ConfigError(f"{self.folder / GLOBAL_FOLDER} holds no committed round")

    def _committed_content(self, name: str) -> bytes:
        """Return an append-only file up to its length at `round`; b"" before the first round."""
        if not self.round:
            return b""
        with self._explain_missing_files():
            return (self.folder / name).read_bytes()[: self.meta["files"][name][0]]

    @contextmanager
    def _explain_missing_files(self) -> Generator[None]:
        """Re-raise OSError of the body as ConfigError."""
        try:
            yield
        except OSError as error:
            raise ConfigError(f"{self.folder} is not the folder of a run: {error}") from error


def open_run(folder: Path | str) -> Run:
    """Open the run in a folder at its last committed round; model values are read later, on use.

    Raises ConfigError if the folder has no run.
    """
    folder = Path(folder)
    checkpoint = Store(folder / GLOBAL_FOLDER, read_only=True).peek()
    if checkpoint is None and not (folder / STUDY).is_file():
        raise ConfigError(
            f"{folder} is not the folder of a run: there is no {STUDY} in it; name the folder that "
            "`fedplan run --output` has written"
        )
    return Run(folder, checkpoint.number, checkpoint.meta) if checkpoint else Run(folder, 0, {})


def read_consistently(folder: Path, read: Callable[[Run], T]) -> T:
    """Return `read(run)` for the run in a folder; repeat if the run advances meanwhile.

    Raises RunAdvanced after READ_ATTEMPTS attempts.
    """
    for _ in range(READ_ATTEMPTS - 1):
        try:
            return read(open_run(folder))
        except RunAdvanced:
            continue
    return read(open_run(folder))


def _parse_ledger_line(line: bytes) -> object:
    """Return a ledger line as JSON value, or as bytes if it is not JSON."""
    try:
        return parse_line(line)
    except FedplanError:
        return line
