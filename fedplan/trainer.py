# SPDX-License-Identifier: Apache-2.0
"""Trainers: a process that stays at a site, so that imports, model and rows are there at once."""

from __future__ import annotations

import importlib.util
import os
import socket
import sys
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedplan.config import ConfigError, Study, read_study
from fedplan.desk import Desk, journal_in, place_of
from fedplan.errands import Order
from fedplan.errors import FedplanError
from fedplan.mail import parcel_of, run_of
from fedplan.names import folder_named
from fedplan.outgoing import Limits
from fedplan.parcel import BrokenParcel, Parcel
from fedplan.seals import Seal
from fedplan.site import Site, cloak_of
from fedplan.studies import note_task, stage_of, write_run
from fedplan.tables import load

if TYPE_CHECKING:
    from datasets import Dataset

SAID = frozenset(
    (
        *("name", "home", "data", "key", "resident", "idle"),
        *("limit_rounds", "limit_bytes", "limit_epsilon", "partition-id", "num-partitions"),
    )
)
"""What a node may be started with; every other word is a trait of the site."""

IDLE = 900.0
"""Seconds without a request after which a trainer ends."""


class Office:
    """A site's rows and model, and its desk in the run that it was last asked in."""

    def __init__(self, order: Order) -> None:
        self.order, self.study = order, read_study(Path(order.study))
        self.name = name = name_of(self.study, order.node)
        own = None if self.study.data.path else (name, _table(order, self.study))
        self.stage = stage_of(self.study, own)
        if name not in self.stage.shares.train:
            raise ConfigError(f"the study has no client {name!r}")
        self._desk: Desk | None = None

    def answer(self, kind: str, parcel: Parcel) -> Parcel:
        """The answer of the desk of the run that a request is of."""
        try:
            run = run_of(parcel)
        except FedplanError as error:
            return parcel_of({}, {"refused": str(error).splitlines()[0]})
        if self._desk is None or self._desk.setup.run != run:
            self._desk = desk_of(self, run)
        return self._desk.answer(kind, parcel)


def desk_of(office: Office, run: str) -> Desk:
    """A site's desk in a run, built from its study and from what its node was started with."""
    order, study, name, stage = office.order, office.study, office.name, office.stage
    node, setup = order.node, replace(stage.agreed, run=run)
    folder = folder_of(order.home, study, name)
    place = place_of(folder, run)
    seal = Seal.from_file(Path(str(node["key"]))) if "key" in node else None
    traits = _traits(study, name, node)
    site = Site(
        name=name,
        rows=stage.shares.train[name],
        journal=journal_in(place, seal),
        model=stage.model,
        start=stage.start,
        marks=stage.marks,
        loss=stage.shares.task.loss,
        traits=traits,
        cloak=cloak_of(setup, folder / "privacy"),
    )
    limits = Limits(
        _whole(node, "limit_rounds"), _whole(node, "limit_bytes"), _number(node, "limit_epsilon")
    )
    write_run(place, study, setup.params)
    note_task(place, stage.shares)
    return Desk(setup, site, folder, limits)


def _traits(study: Study, name: str, node: Mapping[str, Any]) -> dict[str, str]:
    """What is said of a site: by the study, and by itself where that does not tell it is there."""
    own = {k: str(v) for k, v in node.items() if k not in SAID}
    if own and study.privacy and study.privacy.unit == "client":
        raise ConfigError(
            f"the node of {name!r} says {', '.join(own)} of itself: this study hides its clients, "
            f"so traits are public and stand in the study, in clients.traits.{name}"
        )
    return study.clients.traits.get(name, {}) | own


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


def _table(order: Order, study: Study) -> Dataset:
    """The table that a site brings."""
    if "data" not in order.node:
        raise ConfigError("this node does not say its data: --node-config 'data=\"rows.csv\" ...'")
    path = str(order.node["data"])
    if not order.rows:
        return load(path, split=study.data.split)
    file, _, function = order.rows.rpartition(":")
    spec = importlib.util.spec_from_file_location("fedplan_site_rows", file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{file} cannot be imported for its {function}")
    sys.path.insert(0, str(Path(file).parent))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
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


def serve(office: Office, listener: socket.socket, *, idle: float = IDLE) -> None:
    """Answer one request after the other, until none has come for a while."""
    listener.settimeout(idle)
    while True:
        try:
            line, _ = listener.accept()
        except TimeoutError:
            return
        with line, line.makefile("rwb") as stream, suppress(OSError, BrokenParcel):
            # Who asked may be gone by now: the answer stands in the journal.
            line.settimeout(None)
            kind = stream.readline(64).decode(errors="replace").strip()
            answered(office, kind, Parcel.read(stream)).write(stream)


def answered(office: Office, kind: str, parcel: Parcel) -> Parcel:
    """A site's answer. An error that nobody foresaw stays in the log: it may tell of rows."""
    try:
        return office.answer(kind, parcel)
    except Exception as error:
        traceback.print_exc()
        said = f"{type(error).__name__} at {office.name}; its log says more"
        return parcel_of({}, {"failed": said})


def main(text: str, address: str) -> None:
    """Build a desk, and stay. The socket opens when all is ready."""
    order = Order.of(text)
    try:
        office = Office(order)
    except FedplanError as error:
        raise SystemExit(f"fedplan: {error}") from error
    with suppress(FileNotFoundError):
        os.unlink(address)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        serve(office, listener, idle=float(order.node.get("idle", IDLE)))
        os.unlink(address)


if __name__ == "__main__":
    main(*sys.argv[1:])
