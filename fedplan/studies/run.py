# SPDX-License-Identifier: Apache-2.0
"""Runs: what a run's folder held when a round was last committed, read and left as it is."""

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
from fedplan.federation.history import Metrics, metrics_of
from fedplan.federation.identity import RUN, Identity, read_identity
from fedplan.federation.record import Record, parsed, read_record
from fedplan.federation.segments import closed_faults, ledger_lines
from fedplan.federation.server import STUDY
from fedplan.federation.world import BEST, METRICS, WORLD, World
from fedplan.models.params import Params
from fedplan.models.schema import read
from fedplan.privacy.guard import CHARGES
from fedplan.storage.journal import Journal, home_of
from fedplan.storage.store import Read, Store
from fedplan.studies.folder import MANIFEST, noted_task, study_in
from fedplan.studies.schema import ConfigError, Study
from fedplan.studies.stage import agreement_of

LOOKS = 5
"""How often a run that goes on is looked at, until it lets itself be read in between."""

T = TypeVar("T")


class WentOn(ConfigError):
    """The run has closed rounds since it was opened: what it held then is no longer there."""


@dataclass(frozen=True)
class Run:
    """A run as it was when its `round` was committed; 0, before the first one.

    Nothing is locked, cut off or written, so it may be read while it goes on, and from a disk that
    cannot be written. Each part is read when it is first asked for, and is that of the same round
    however late that is: by the lengths in `meta`, or else it raises `WentOn`.
    """

    folder: Path
    round: int
    meta: dict[str, Any]

    @cached_property
    def study(self) -> Study:
        """The study that it is a run of."""
        return study_in(self.folder)

    @cached_property
    def params(self) -> Params:
        """The params of its model."""
        return read(self.folder / MANIFEST)

    @cached_property
    def identity(self) -> Identity:
        """Its id, and digests of what it is run on."""
        return read_identity(self.folder)

    @cached_property
    def agreement(self) -> Agreement:
        """What both of its ends agreed on."""
        made = agreement_of(self.study, self.params)
        return replace(made, start=self.identity.start, run=self.identity.id)

    @property
    def labels(self) -> list[str]:
        """The labels that its model tells apart."""
        return self._task[0]

    @property
    def clients(self) -> list[str]:
        """The names of its clients, where the study has their rows."""
        return self._task[1]

    @cached_property
    def _task(self) -> tuple[list[str], list[str]]:
        return noted_task(self.folder)

    @cached_property
    def world(self) -> World:
        """The federation's values, and what the server knows of its clients."""
        self._require_round()
        store = self._store
        found = store.find(lambda meta: meta == self.meta)
        if found is None:
            self.require_current()
            reasons = "; ".join(map(str, store.skipped))
            raise ConfigError(
                f"{self.folder / WORLD} is damaged ({reasons}): put a copy of it back"
            )
        return World.loaded(found.tensors, found.meta)

    @cached_property
    def best(self) -> World:
        """The federation's values of the round that scored best, if the study has it kept."""
        found = Store(self.folder / BEST, reading=True).read()
        if found is None or found.meta["run"] != self.identity.id:
            raise ConfigError(
                f"{self.folder} keeps no best round: say evaluate.keep_best before a run begins"
            )
        return World.loaded(found.tensors, found.meta)

    @property
    def has_best(self) -> bool:
        """Whether a best round is kept."""
        return bool(Store(self.folder / BEST, reading=True).numbers())

    def lines(self) -> Iterator[object]:
        """The lines of the ledger, as JSON or, where they are none, as bytes.

        They may be too many to be held at once, and are read a segment at a time.
        """
        if self.round:
            with self._there():
                yield from map(_line, ledger_lines(self.folder, self.meta["files"]))

    @cached_property
    def records(self) -> list[Record]:
        """The turns and the rounds that the ledger tells of; what is neither raises."""
        return [read_record(line) for line in self.lines()]

    @cached_property
    def metrics(self) -> Metrics:
        """A row of numbers for each round: its loss, its bytes, and the scores if any."""
        lines = self._content(METRICS).splitlines()
        scores = [cast("dict[str, Any]", parsed(line)) for line in lines]
        return metrics_of(self.records, scores)

    def home(self, client: str) -> Read:
        """What a client kept when the round was closed and not a turn later, and its notes."""
        if not self.study.gathered:
            raise ConfigError(f"{client}'s own model is at the site: export its folder there")
        if client not in self.clients:
            there = ", ".join(self.clients)
            raise ConfigError(f"there is no client {client!r}; there are {there}")
        journal, following = self.journal(client), self.agreement.request(self.round + 1, client)
        home = journal.home(following)
        # What was kept before is no later than what is kept now.
        last = journal.last(following)
        if not last and self.round and self.world.heard_from(client):
            raise ConfigError(f"{client}'s home is lost: put a copy of {journal.folder} back")
        if last and last not in self.requests(client):
            self.require_current()
            raise ConfigError(f"{journal.folder} is of another run: put a copy of it back")
        return home

    def requests(self, client: str, after: int = 0) -> set[str]:
        """The names of all that a client was asked for, after a round."""
        return {self.agreement.request(n, client) for n in range(after + 1, self.round + 1)}

    def journal(self, client: str) -> Journal:
        """A client's journal, as it is now: it may be a turn ahead."""
        return Journal(home_of(self.folder, client), reading=True)

    def require_current(self) -> None:
        """Raise if the run has committed anything since it was opened."""
        if (now := open_run(self.folder)).meta != self.meta:
            raise WentOn(
                f"{self.folder} went on from round {self.round} to {now.round}: look again"
            )

    def world_faults(self) -> list[str]:
        """What is damaged of the worlds that were committed."""
        return self._store.faults()

    def file_faults(self) -> dict[str, str]:
        """Files that are not as they were when the round was committed, each with the fault."""
        self._require_round()
        found = {name: self._file_fault(name) for name in self.meta["files"]}
        faults = {name: fault for name, fault in found.items() if fault}
        return closed_faults(self.folder, self.meta["files"]) | faults

    def _file_fault(self, name: str) -> str:
        file, (length, sha256) = self.folder / name, self.meta["files"][name]
        if not file.is_file():
            return f"{name} is lost"
        content = file.read_bytes()
        if hashlib.sha256(content[:length]).hexdigest() != sha256:
            return f"{name} is not what round {self.round} was committed with"
        if len(content) > length and not name.endswith(CHARGES):
            return (
                f"{name} has {len(content) - length} bytes after round {self.round}, the last "
                "that was committed: go on with the run by --resume, then verify it"
            )
        return ""

    def identity_faults(self) -> list[str]:
        """Whether it is the run that its world was made in, of the study that stands there."""
        identity, faults = self.identity, list[str]()
        if identity.id != self.meta["run"]:
            faults.append(f"{RUN} says another run than the world was made in")
        if identity.study != self.study.digest:
            faults.append(f"{RUN} says another study than stands in the folder")
        start = hashlib.sha256(identity.marks.encode()).hexdigest()[:16]
        if identity.start != start:
            faults.append(f"{RUN} says another start than its digests")
        return faults

    @property
    def _store(self) -> Store:
        return Store(self.folder / WORLD, reading=True)

    def _require_round(self) -> None:
        if not self.round:
            raise ConfigError(f"{self.folder / WORLD} holds no round that was committed")

    def _content(self, name: str) -> bytes:
        """A file that only grows, as long as it was when the round was committed."""
        if not self.round:
            return b""
        with self._there():
            return (self.folder / name).read_bytes()[: self.meta["files"][name][0]]

    @contextmanager
    def _there(self) -> Generator[None]:
        try:
            yield
        except OSError as error:
            raise ConfigError(f"{self.folder} is not the folder of a run: {error}") from error


def open_run(folder: Path | str) -> Run:
    """The run in a folder, as it was last committed.

    Only what was committed is looked up: no values are read before they are asked for.
    """
    folder = Path(folder)
    found = Store(folder / WORLD, reading=True).newest()
    if found is None and not (folder / STUDY).is_file():
        raise ConfigError(
            f"{folder} is not the folder of a run: there is no {STUDY} in it; name the one that "
            "`fedplan run --output` has written"
        )
    return Run(folder, found.number, found.meta) if found else Run(folder, 0, {})


def looked_at(folder: Path, look: Callable[[Run], T]) -> T:
    """What a look at a run finds; while the run goes on meanwhile, it is looked at again."""
    for _ in range(LOOKS - 1):
        try:
            return look(open_run(folder))
        except WentOn:
            continue
    return look(open_run(folder))


def _line(line: bytes) -> object:
    try:
        return parsed(line)
    except FedplanError:
        return line
