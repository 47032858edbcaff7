# SPDX-License-Identifier: Apache-2.0
"""Workers: a process that stays at a site, so that imports, model and rows are there at once."""

from __future__ import annotations

import importlib.util
import os
import re
import socket
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedplan.data.tables import load
from fedplan.federation.account import DELTA, Account, Limits
from fedplan.federation.client import Client, guard_of
from fedplan.federation.codes import EXITS, said_of, told
from fedplan.federation.endpoint import Endpoint, journal_in, place_of
from fedplan.federation.exams import Disclosure
from fedplan.federation.fault_log import FaultLog
from fedplan.federation.messages import run_of
from fedplan.naming import allowing
from fedplan.runners.worker_client import WorkerSpec
from fedplan.storage.encryption import Encryption
from fedplan.storage.names import folder_named
from fedplan.studies.folder import note_task, write_run
from fedplan.studies.schema import ConfigError, Study, read_study
from fedplan.studies.stage import exam_of, stage_of
from fedplan.tensors.devices import device_named, settled
from fedplan.tensors.message import BrokenMessage, Message
from fedplan.tensors.serialization import packed

if TYPE_CHECKING:
    from datasets import Dataset

SAID = frozenset(
    (
        *("name", "home", "data", "dataset", "key", "resident", "idle", "device", "allow"),
        *("limit_rounds", "limit_bytes", "limit_epsilon", "limit_delta"),
        *("partition-id", "num-partitions"),
    )
)
"""What a node may be started with; every other word is a trait of the site."""

IDLE = 900.0
"""Seconds without a request after which a worker ends."""


class Worker:
    """A site's rows and model, and its endpoint in the run that it was last asked in.

    What it writes only its owner may read; with a key, what tells of rows is sealed. The study came
    over a network: of the code that it names, only that is imported which the site has installed
    for fedplan, or which its node allows. `disclosure` says which scores may leave it.
    """

    def __init__(self, spec: WorkerSpec, disclosure: Disclosure | None = None) -> None:
        self.disclosure = disclosure or Disclosure()
        with _private(), allowing(allowed_by(spec)):
            self.spec, self.study = spec, read_study(Path(spec.study))
            self.seal = seal_of(spec)
            self.name = name = name_of(self.study, spec.node)
            own = None if self.study.data.path else (name, _table(spec, self.study))
            self.stage = stage_of(self.study, own)
            if name not in self.stage.shares.train:
                raise ConfigError(f"the study has no client {name!r}")
            # The site knows its own machine: its word goes before the study's.
            said = str(spec.node.get("device", self.study.device))
            settled(self.stage.model, device_named(said))
            self.traits = _traits(self.study, name, spec.node)
            self.account = account_of(spec, name, self.seal)
            self.faults = FaultLog(Path(spec.home), self.seal)
        self._endpoint: Endpoint | None = None

    def answer(self, kind: str, message: Message) -> Message:
        """The answer of the endpoint of the run that a request is of."""
        with _private():
            try:
                endpoint = self.endpoint(run_of(message))
            except Exception as error:
                return packed({}, {**said_of(self.faults.note(error))})
            return endpoint.answer(kind, message)

    def endpoint(self, run: str) -> Endpoint:
        """The endpoint in a run."""
        if self._endpoint is None or self._endpoint.agreement.run != run:
            with _private():
                self._endpoint = _endpoint_in(self, run)
        return self._endpoint


def _endpoint_in(worker: Worker, run: str) -> Endpoint:
    study, name, stage = worker.study, worker.name, worker.stage
    agreement, account = replace(stage.agreed, run=run), worker.account
    folder = folder_of(worker.spec.home, study, name)
    place = place_of(folder, run)
    site = Client(
        name=name,
        rows=stage.shares.train[name],
        journal=journal_in(place, worker.seal),
        model=stage.model,
        start=stage.start,
        marks=stage.marks,
        loss=stage.shares.task.loss,
        traits=worker.traits,
        guard=guard_of(agreement, account.folder, account),
        account=account,
        deterministic=study.deterministic,
        exam=exam_of(study, stage.shares, name),
        disclosure=worker.disclosure,
    )
    write_run(place, study, agreement.params)
    note_task(place, stage.shares)
    return Endpoint(agreement, site, folder, faults=worker.faults)


def _traits(study: Study, name: str, node: Mapping[str, Any]) -> dict[str, str]:
    """What is said of a site: by the study, and by itself where that does not tell it is there."""
    own = {k: str(v) for k, v in node.items() if k not in SAID}
    if own and study.privacy and study.privacy.unit == "client":
        raise ConfigError(
            f"the node of {name!r} says {', '.join(own)} of itself: this study hides its clients, "
            f"so traits are public and stand in the study, in clients.traits.{name}"
        )
    return study.clients.traits.get(name, {}) | own


def allowed_by(spec: WorkerSpec) -> list[str]:
    """The packages that a study may name things of, by the node's own words."""
    return [word for word in re.split(r"[\s,]+", str(spec.node.get("allow", ""))) if word]


def seal_of(spec: WorkerSpec) -> Encryption | None:
    """What seals all that tells of a site's rows, if its node was given a key."""
    return Encryption.from_file(Path(str(spec.node["key"]))) if "key" in spec.node else None


def account_of(spec: WorkerSpec, name: str, seal: Encryption | None) -> Account:
    """The account of a site's dataset: one for all studies, by the node's own words alone.

    In a simulation all clients have one home, and each has an account.
    """
    node = spec.node
    limits = Limits(
        _whole(node, "limit_rounds"),
        _whole(node, "limit_bytes"),
        _number(node, "limit_epsilon"),
        _number(node, "limit_delta") or DELTA,
    )
    dataset = name if "partition-id" in node else str(node.get("dataset", "rows"))
    return Account(Path(spec.home) / "account" / folder_named(dataset), limits, seal=seal)


@contextmanager
def _private() -> Generator[None]:
    """Let nobody else read what is written meanwhile."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def folder_of(home: str, study: Study, name: str) -> Path:
    """Where a site keeps an experiment, under its own name; each run has a folder in it."""
    return Path(home) / folder_named(f"{study.name}-{study.seed}") / folder_named(name)


def name_of(study: Study, node: Mapping[str, Any]) -> str:
    """The name that a node was started with; in a simulation its place among the clients."""
    if "name" in node:
        return str(node["name"])
    if "partition-id" in node:
        return roster_of(study)[int(node["partition-id"])]
    raise ConfigError("this node does not say its name: --node-config 'name=\"north\" ...'")


def roster_of(study: Study) -> list[str]:
    """The names of all clients of a study."""
    return list(study.clients.names) or list(stage_of(study).shares.train)


def _table(spec: WorkerSpec, study: Study) -> Dataset:
    """The table that a site brings."""
    if "data" not in spec.node:
        raise ConfigError("this node does not say its data: --node-config 'data=\"rows.csv\" ...'")
    path = str(spec.node["data"])
    if not spec.rows:
        return load(path, split=study.data.split, empty=study.privacy is not None)
    file, _, function = spec.rows.rpartition(":")
    module_spec = importlib.util.spec_from_file_location("fedplan_site_rows", file)
    if module_spec is None or module_spec.loader is None:
        raise ConfigError(f"{file} cannot be imported for its {function}")
    sys.path.insert(0, str(Path(file).parent))
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    return getattr(module, function)(path)


def _whole(node: Mapping[str, Any], name: str) -> int:
    said = node.get(name, 0)
    if type(said) is not int or said < 0:
        raise ConfigError(f"{name} is {said!r}: it is a whole number")
    return said


def _number(node: Mapping[str, Any], name: str) -> float:
    said = node.get(name, 0.0)
    if type(said) not in (int, float) or not 0 <= said < inf:
        raise ConfigError(f"{name} is {said!r}: it is a number, 0 or more")
    return float(said)


def serve(worker: Worker, listener: socket.socket, *, idle: float = IDLE) -> None:
    """Answer one request after the other, until none has come for a while."""
    listener.settimeout(idle)
    while True:
        try:
            line, _ = listener.accept()
        except TimeoutError:
            return
        with line, line.makefile("rwb") as stream, suppress(OSError, BrokenMessage):
            # Who asked may be gone by now: the answer stands in the journal.
            line.settimeout(None)
            kind = stream.readline(64).decode(errors="replace").strip()
            worker.answer(kind, Message.read(stream)).write(stream)


def noted(spec: WorkerSpec, error: Exception) -> str:
    """The code of an error of a site that has no endpoint yet; its text goes into the site's log.

    If not even the key can be read, nothing else was.
    """
    with suppress(Exception):
        return FaultLog(Path(spec.home), seal_of(spec)).note(error)
    return FaultLog(Path(spec.home)).note(error)


def answered(spec: WorkerSpec, kind: str, message: Message) -> Message:
    """The answer of a site whose worker does not stay."""
    try:
        worker = _worker_of(spec.text)
    except Exception as error:
        return packed({}, {**said_of(noted(spec, error))})
    return worker.answer(kind, message)


@cache
def _worker_of(spec: str) -> Worker:
    return Worker(WorkerSpec.of(spec))


def main(text: str, address: str) -> None:
    """Build an endpoint, and stay. The socket opens when all is ready."""
    spec = WorkerSpec.of(text)
    os.umask(0o077)
    try:
        worker = Worker(spec)
    except Exception as error:
        code = noted(spec, error)
        sys.stderr.write(f"fedplan: {told(code)}; fedplan faults {spec.home} says more\n")
        raise SystemExit(EXITS[code]) from None
    with suppress(FileNotFoundError):
        os.unlink(address)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        serve(worker, listener, idle=float(spec.node.get("idle", IDLE)))
        os.unlink(address)


if __name__ == "__main__":
    main(*sys.argv[1:])
