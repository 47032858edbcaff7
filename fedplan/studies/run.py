# SPDX-License-Identifier: Apache-2.0
"""A run's folder: the files that describe it, and all that can be read from it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from math import fsum
from pathlib import Path
from typing import Any, TypeVar, cast

from fedplan.data.custom_task import CUSTOM_KIND, CustomTask
from fedplan.data.metrics import metric_direction
from fedplan.data.tasks.kinds import task_class
from fedplan.errors import FedplanError
from fedplan.federation.agreement import Agreement
from fedplan.federation.client import load_client_state
from fedplan.federation.global_state import BEST, METRICS, GlobalState
from fedplan.federation.identity import GLOBAL_FOLDER, RUN_FILE, STUDY, RunIdentity, read_identity
from fedplan.federation.ledger.history import Metrics, Row, join_scores, ledger_rows, run_failure
from fedplan.federation.ledger.records import Record, parse_line, read_record
from fedplan.federation.ledger.segments import closed_segment_faults, ledger_lines
from fedplan.federation.ledger.status import read_status
from fedplan.federation.server import WRITE_ONCE_FILES, Server
from fedplan.models.catalog import manifest_json, read_manifest
from fedplan.models.params import Params
from fedplan.privacy.accounting.budget import Unit
from fedplan.privacy.guard import CHARGES_FILE
from fedplan.privacy.statement import Expense, Statement, expenses_from_json
from fedplan.storage.files import (
    file_size_and_digest,
    make_folder,
    wrap_disk_errors,
    write_if_changed,
)
from fedplan.storage.journal import Journal, client_state_folder
from fedplan.storage.locks import FolderLock, acquire_folder_lock
from fedplan.storage.store import Store, TensorsAndMeta
from fedplan.studies.experiment import Experiment, make_agreement, privacy_statement
from fedplan.studies.model_builder import initial_expenses
from fedplan.studies.schema import Study, read_json_object, resolve_paths, study_from_dict
from fedplan.studies.section import ConfigError
from fedplan.studies.stored_model import MODEL_FOLDER, STORED_FILE, stored_files

MANIFEST, TASK = "manifest.json", "task.json"
"""Files in the folder of a run, here or at a site: model parameters; labels and clients."""
SWEEP_FILE = "sweep.json"
"""File in a sweep's folder with its specification."""
EARLIER = "earlier_privacy"
"""Key of the task file: the expenses of the initial model."""
READ_ATTEMPTS = 5
"""Attempts to read a run that commits rounds meanwhile."""

T = TypeVar("T")


class RunAdvanced(ConfigError):
    """The run has committed another round since it was opened; its earlier state is gone."""


@dataclass(frozen=True)
class RunReader:
    """A read-only view of a run's folder, as of the last round committed when it was opened.

    Get one by `read_run`. Takes no lock and writes nothing, so a run can be read while it
    continues. Parts are read from disk on first use and cached, always as of `round`, the last
    committed one (0 before the first). Raises RunAdvanced if the state of that round was
    overwritten meanwhile (see `read_consistently`). `meta`: metadata of that round's checkpoint.
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
        """The agreement (the settings that server and clients fixed before round 1), rebuilt."""
        agreement = make_agreement(self.study, self.params)
        return replace(agreement, start=self.identity.start, run=self.identity.id)

    @cached_property
    def labels(self) -> list[str]:
        """The labels of the task; empty for tasks without labels."""
        return read_task_file(self.folder)[0]

    @cached_property
    def clients(self) -> list[str]:
        """The names of the clients, if the run had their data; else empty."""
        return read_task_file(self.folder)[1]

    @cached_property
    def primary(self) -> str:
        """The name of the task's primary metric."""
        if primary := _read_task_content(self.folder / TASK).get("primary"):
            return str(primary)
        kind, status = self.study.task.kind, read_status(self.folder)
        if status is not None and status.primary_metric:
            return status.primary_metric
        return CustomTask.primary if kind == CUSTOM_KIND else task_class(kind).primary

    def higher_is_better(self, metric: str) -> bool | None:
        """Return whether a higher value of a metric of the run is better; None if not known."""
        return metric_direction(metric, self.directions)

    @cached_property
    def directions(self) -> dict[str, bool]:
        """Whether higher is better, of the metrics that the task names."""
        directions = _read_task_content(self.folder / TASK).get("higher_is_better", {})
        return {str(name): bool(higher) for name, higher in directions.items()}

    @cached_property
    def global_state(self) -> GlobalState:
        """The global model and the server's state at `round`; ConfigError if damaged or missing."""
        self._require_round()
        store = Store(self.folder / GLOBAL_FOLDER, read_only=True)
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
        """The global state of the best round; ConfigError if none is stored."""
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

        Reads one segment at a time, to save memory. Raises ConfigError if a file is missing.
        """
        if self.round:
            with self._explain_missing_files():
                for line in ledger_lines(self.folder, self.meta["files"]):
                    try:
                        value = parse_line(line)
                    except FedplanError:
                        value = line
                    yield value

    @cached_property
    def records(self) -> list[Record]:
        """The turns and rounds of the ledger; raises FedplanError for a line that is neither."""
        return [read_record(line) for line in self.ledger_lines()]

    @cached_property
    def metrics(self) -> Metrics:
        """One row of numbers per round: loss, bytes, and evaluation metrics."""
        scores = (cast("dict[str, Any]", parse_line(line)) for line in self._score_lines)
        return join_scores(ledger_rows(self.records), scores)

    @cached_property
    def failure(self) -> str:
        """Why the rounds so far have no result; "" if they have, or if privacy hides clients."""
        return "" if self.study.client_level_dp else run_failure(self.metrics)

    @cached_property
    def last_scores(self) -> Row:
        """The round and metrics of the last evaluation, without reading the ledger; or nothing."""
        for line in reversed(self._score_lines):
            scores = cast("dict[str, Any]", parse_line(line))
            row = join_scores([{"round": scores["round"]}], [scores])[0]
            if len(row) > 1:  # else attention shifts alone
                return row
        return {}

    @cached_property
    def _score_lines(self) -> list[bytes]:
        """The committed lines of the metrics file."""
        if not self.round:
            return []
        with self._explain_missing_files():
            committed_length = self.meta["files"][METRICS][0]
            return (self.folder / METRICS).read_bytes()[:committed_length].splitlines()

    def client_state(self, client: str) -> TensorsAndMeta:
        """Return (tensors, metadata) of a client's stored state, empty if it never took part.

        Raises ConfigError if the client is unknown, or if the client's state is at a site, lost, or
        of another run.
        """
        if not self.study.has_central_data:
            raise ConfigError(f"{client}'s state is at its site: run the export there")
        self.require_client(client)
        journal = self.journal(client)
        next_request = self.agreement.request_name(self.round + 1, client)
        answered_round = self.global_state.last_round_of(client) if self.round else 0
        state = load_client_state(journal, client, answered_round, next_request)
        last_request = journal.last_request(next_request)
        if last_request and last_request not in self.request_names(client):
            self.require_current()
            raise ConfigError(f"{journal.folder} belongs to another run: restore it from a backup")
        return state

    def require_client(self, client: str) -> None:
        """Raise ConfigError if there is no client of this name."""
        if client not in self.clients:
            names = ", ".join(self.clients)
            raise ConfigError(f"there is no client {client!r}; there are {names}")

    def request_names(self, client: str, after: int = 0) -> set[str]:
        """Return the names of a client's requests in the rounds after `after`, up to `round`."""
        rounds = range(after + 1, self.round + 1)
        return {self.agreement.request_name(number, client) for number in rounds}

    def journal(self, client: str) -> Journal:
        """Return a client's journal, opened read-only; it may be one turn ahead of `round`."""
        folder = client_state_folder(self.folder, client)
        return Journal(folder, read_only=True, optional=not self.agreement.clients_keep_state)

    def require_current(self) -> None:
        """Raise RunAdvanced if the run has committed another round since it was opened."""
        if (now := read_run(self.folder)).meta != self.meta:
            raise RunAdvanced(
                f"{self.folder} advanced from round {self.round} to {now.round}: try again"
            )

    def global_state_faults(self) -> list[str]:
        """Return a description of each damaged checkpoint of the global model."""
        return Store(self.folder / GLOBAL_FOLDER, read_only=True).find_damage()

    def file_faults(self) -> dict[str, str]:
        """Return faults by file name: files lost, changed or longer than when last committed.

        The file of charges may be longer, since it grows during a round. Raises ConfigError before
        the first round.
        """
        self._require_round()
        files = self.meta["files"]
        return closed_segment_faults(self.folder, files) | self._changed_files(files)

    def model_faults(self) -> dict[str, str]:
        """Return faults of the stored initial model by file name; of no other file."""
        return self._changed_files(
            {n: e for n, e in self.meta["files"].items() if n.startswith(f"{MODEL_FOLDER}/")}
        )

    def _changed_files(self, files: Mapping[str, tuple[int, str]]) -> dict[str, str]:
        """Return the faults of files with recorded [length, digest] by name.

        If a stored model is among them, so are the files in its folder that were not recorded.
        """
        faults = dict[str, str]()
        if f"{MODEL_FOLDER}/{STORED_FILE}" in files:
            added = (name for name in stored_files(self.folder) if name not in files)
            faults = {name: f"{name} was not written by the run" for name in added}
        for name, (length, sha256) in files.items():
            if not (self.folder / name).is_file():
                faults[name] = f"{name} is lost"
                continue
            if file_size_and_digest(self.folder / name) == [length, sha256]:
                continue
            # A log may have grown since.
            content = (self.folder / name).read_bytes() if name.endswith(".jsonl") else b""
            if hashlib.sha256(content[:length]).hexdigest() != sha256:
                faults[name] = f"{name} differs from its content at round {self.round}"
            elif not name.endswith(CHARGES_FILE):
                faults[name] = (
                    f"{name} has {len(content) - length} bytes after round {self.round}, the last "
                    "committed one: continue the run with --resume, then verify it"
                )
        return faults

    def identity_faults(self) -> list[str]:
        """Return sentences on mismatches between identity file, study and checkpoint."""
        identity, faults = self.identity, list[str]()
        if identity.id != self.meta["run"]:
            faults.append(f"{RUN_FILE} names another run than the global model's checkpoint")
        if identity.study != self.study.digest:
            faults.append(f"{RUN_FILE} names another study than the one in the folder")
        if identity.start != hashlib.sha256(identity.digests.encode()).hexdigest()[:16]:
            text = "has an initial-model digest that differs from its param digests"
            faults.append(f"{RUN_FILE} {text}")
        return faults

    def _require_round(self) -> None:
        if not self.round:
            read_run_study(self.folder)  # a run of another version has its rounds elsewhere
            raise ConfigError(f"{self.folder / GLOBAL_FOLDER} holds no committed round")

    @contextmanager
    def _explain_missing_files(self) -> Generator[None]:
        try:
            yield
        except OSError as error:
            raise ConfigError(f"{self.folder} is not the folder of a run: {error}") from error


def read_run(folder: Path | str) -> RunReader:
    """Open the run in a folder at the last committed round; ConfigError if there is none."""
    folder = Path(folder)
    checkpoint = Store(folder / GLOBAL_FOLDER, read_only=True).peek()
    if checkpoint is None and not (folder / STUDY).is_file():
        raise ConfigError(
            f"{folder} is not the folder of a run: there is no {STUDY} in it; name the folder that "
            "`fedplan run --output` has written"
        )
    number, meta = (checkpoint.number, checkpoint.meta) if checkpoint else (0, {})
    return RunReader(folder, number, meta)


def read_consistently(folder: Path, read: Callable[[RunReader], T]) -> T:
    """Return `read(run)` of the run in a folder; tries again if the run advances meanwhile."""
    for _ in range(READ_ATTEMPTS - 1):
        try:
            return read(read_run(folder))
        except RunAdvanced:
            continue
    return read(read_run(folder))


def claim_run_folder(folder: Path, study: Study, experiment: Experiment) -> FolderLock:
    """Create and lock a run's folder, and return the lock; write the first files of a new run.

    Where the study hides clients, others than the owner lose access to it.
    The files of a started run are left for `update_run_files`. Raises ConfigError if the folder has
    a run of another study, StoreError if another process has the lock.
    """
    make_folder(folder, private=study.hides_clients)
    with wrap_disk_errors(f"{folder} cannot be locked", "name a folder that you may write to"):
        claim = acquire_folder_lock(folder)
    if (folder / STUDY).exists() and read_run_study(folder).digest != study.digest:
        raise ConfigError(f"{folder} holds a run of another study: name another folder")
    if not (folder / RUN_FILE).exists():
        write_run_files(folder, study, experiment)
    return claim


def update_run_files(server: Server, study: Study, experiment: Experiment) -> None:
    """Rewrite the files of a resumed run, and record their digests."""
    write_run_files(server.folder, study, experiment)
    server.record_files(WRITE_ONCE_FILES)
    if server.global_state.round < server.rounds:
        server.remove_evaluation()


def write_run_files(folder: Path, study: Study, experiment: Experiment) -> None:
    """Write a run's study, with absolute paths, and its manifest and task file; makes the folder.

    The task file has what exports, reports and statements need when data and initial model are
    gone: labels, names of clients, the primary metric, the direction of the task's metrics, and
    what the initial model has cost in privacy, if anything.
    """
    make_folder(folder)
    write_if_changed(folder / STUDY, resolve_paths(study, Path.cwd()).model_dump_json(indent=1))
    write_if_changed(folder / MANIFEST, manifest_json(experiment.agreement.params))
    task = experiment.data.task
    content: dict[str, Any] = {
        "labels": task.labels,
        "clients": list(experiment.data.train),
        "primary": task.primary,
        "higher_is_better": task.directions,
    }
    earlier = read_earlier_expenses(folder) if (folder / TASK).exists() else ()
    if not earlier:
        download = study.privacy is not None
        earlier = initial_expenses(study, experiment.model, download=download)
    if earlier:
        content[EARLIER] = [asdict(each) for each in earlier]
    write_if_changed(folder / TASK, json.dumps(content, indent=1) + "\n")


def read_earlier_expenses(folder: Path) -> tuple[Expense, ...]:
    """Return what the initial model of the run in a folder had cost in privacy before the run."""
    file = folder / TASK
    return expenses_from_json(_read_task_content(file).get(EARLIER, []), str(file))


def sweep_expenses(folder: Path) -> tuple[Expense, ...]:
    """Return what the other runs of a sweep have cost, for a run's folder in it; else nothing.

    Who takes one run of a sweep has looked at all of them. One expense for each unit, after those
    of initial models that this run does not start from.
    """
    place, name = folder.absolute().parent, folder.absolute().name
    file = place / SWEEP_FILE
    sweep = read_json_object(file)
    if file.exists() and "runs" not in sweep:
        raise ConfigError(f"{file} lists no runs: restore it from a backup")
    names = sweep.get("runs", {})
    others = [place / other for other in names if other != name]
    spent, models = dict[Unit, list[Statement]](), dict[Expense, None]()
    for other in others:
        if (other / STUDY).exists():
            models |= dict.fromkeys(read_earlier_expenses(other))
            statement = privacy_statement(read_run_study(other), other, earlier=())
            if statement is not None and statement.charges:
                spent.setdefault(statement.guarantee.unit, []).append(statement)
    own = read_earlier_expenses(folder) if models else ()
    runs = (
        Expense(
            f"{len(of_unit)} other {'run' if len(of_unit) == 1 else 'runs'} of the sweep",
            unit,
            fsum(each.epsilon_spent for each in of_unit),
            fsum(each.guarantee.delta for each in of_unit),
        )
        for unit, of_unit in spent.items()
    )
    return (*(each for each in models if each not in own), *runs)


def _read_task_content(file: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ConfigError(f"{file.parent} has no readable {TASK}: {error!r}") from error


def read_task_file(folder: Path) -> tuple[list[str], list[str]]:
    """Return (labels, client names) of the run in a folder; ConfigError if unreadable."""
    try:
        content = _read_task_content(folder / TASK)
        lists = tuple([str(item) for item in content[name]] for name in ("labels", "clients"))
    except (TypeError, KeyError) as error:
        raise ConfigError(f"{folder} has no readable {TASK}: {error!r}") from error
    return lists[0], lists[1]


def read_run_study(folder: Path) -> Study:
    """Return the study of a run's folder; raise ConfigError if it cannot be read."""
    try:
        content = json.loads((folder / STUDY).read_text(encoding="utf-8"))
        return study_from_dict(content if isinstance(content, dict) else {STUDY: content})
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{folder} is not the folder of a run: {STUDY}: {error}") from error
    except ConfigError as error:
        reason, *more = (line.strip() for line in str(error).splitlines()[1:] or [str(error)])
        others = f", and {len(more)} more" if more else ""
        raise ConfigError(
            f"{folder} is a run of another version of fedplan, or its {STUDY} was edited ({reason}"
            f"{others}): open and export it with the version that wrote it"
        ) from error


def read_run_agreement(folder: Path, study: Study | None = None) -> Agreement:
    """Return the agreement of the run in a folder; `study` replaces the study there."""
    return make_agreement(study or read_run_study(folder), read_manifest(folder / MANIFEST))
