# SPDX-License-Identifier: Apache-2.0
"""Trainers: a process that stays at a site, so that imports, model and rows are there at once."""

from __future__ import annotations

import importlib.util
import os
import socket
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from fedplan.account import DELTA, Account, Limits
from fedplan.codes import EXITS, said_of, told
from fedplan.config import ConfigError, Study, read_study
from fedplan.desk import Desk, journal_in
from fedplan.errands import Order
from fedplan.faults import Faults
from fedplan.journal import home_of
from fedplan.mail import parcel_of
from fedplan.parcel import BrokenParcel, Parcel
from fedplan.seals import Seal
from fedplan.site import Site, cloak_of
from fedplan.studies import opened_run, stage_of
from fedplan.tables import load

if TYPE_CHECKING:
    from datasets import Dataset

SAID = frozenset(
    (
        *("name", "home", "data", "dataset", "key", "resident", "idle"),
        *("limit_rounds", "limit_bytes", "limit_epsilon", "limit_delta"),
        *("partition-id", "num-partitions"),
    )
)
"""What a node may be started with; every other word is a trait of the site."""

IDLE = 900.0
"""Seconds without a request after which a trainer ends."""


def desk_of(order: Order) -> Desk:
    """A site's desk, built from its study and from what its node was started with.

    What it writes only its owner may read; with a key, what tells of rows is sealed.
    """
    with _private():
        return _desk_of(order, seal_of(order))


def _desk_of(order: Order, seal: Seal | None) -> Desk:
    study, node = read_study(Path(order.study)), order.node
    name = name_of(study, node)
    own = None if study.data.path else (name, _table(order, study))
    stage = stage_of(study, own)
    if name not in stage.shares.train:
        raise ConfigError(f"the study has no client {name!r}")
    folder = folder_of(order.home, study, name)
    account = account_of(order, name, seal)
    traits = study.clients.traits.get(name, {})
    traits = traits | {k: str(v) for k, v in node.items() if k not in SAID}
    site = Site(
        name=name,
        rows=stage.shares.train[name],
        journal=journal_in(folder, seal),
        model=stage.model,
        start=stage.start,
        marks=stage.marks,
        loss=stage.shares.task.loss,
        traits=traits,
        cloak=cloak_of(stage.setup, account.folder, account),
        account=account,
    )
    opened_run(folder, study, stage.setup.params)
    faults = Faults(Path(order.home), seal)
    return Desk(stage.setup, site, folder, start=stage.digest, faults=faults)


def seal_of(order: Order) -> Seal | None:
    """What seals all that tells of a site's rows, if its node was given a key."""
    return Seal.from_file(Path(str(order.node["key"]))) if "key" in order.node else None


def account_of(order: Order, name: str, seal: Seal | None) -> Account:
    """The account of a site's dataset: one for all studies, by the node's own words alone.

    In a simulation all clients have one home, and each has an account.
    """
    node = order.node
    limits = Limits(
        _whole(node, "limit_rounds"),
        _whole(node, "limit_bytes"),
        _number(node, "limit_epsilon"),
        _number(node, "limit_delta") or DELTA,
    )
    dataset = name if "partition-id" in node else str(node.get("dataset", "rows"))
    return Account(Path(order.home) / "account" / home_of(Path(), dataset).name, limits, seal=seal)


@contextmanager
def _private() -> Generator[None]:
    """Let nobody else read what is written meanwhile."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def folder_of(home: str, study: Study, name: str) -> Path:
    """Where a site keeps an experiment, under its own name: neither a node's nor a run's number."""
    return Path(home) / quote(f"{study.name}-{study.seed}", safe="") / quote(name, safe="")


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


def serve(desk: Desk, listener: socket.socket, *, idle: float = IDLE) -> None:
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
            desk.answer(kind, Parcel.read(stream)).write(stream)


def noted(order: Order, error: Exception) -> str:
    """The code of an error of a site that has no desk yet; its text goes into the site's log.

    If not even the key can be read, nothing else was.
    """
    with suppress(Exception):
        return Faults(Path(order.home), seal_of(order)).note(error)
    return Faults(Path(order.home)).note(error)


def answered(order: Order, kind: str, parcel: Parcel) -> Parcel:
    """The answer of a site whose trainer does not stay."""
    try:
        desk = _desk(order.text)
    except Exception as error:
        return parcel_of({}, {**said_of(noted(order, error))})
    return desk.answer(kind, parcel)


@cache
def _desk(order: str) -> Desk:
    return desk_of(Order.of(order))


def main(text: str, address: str) -> None:
    """Build a desk, and stay. The socket opens when all is ready."""
    order = Order.of(text)
    os.umask(0o077)
    try:
        desk = desk_of(order)
    except Exception as error:
        code = noted(order, error)
        sys.stderr.write(f"fedplan: {told(code)}; fedplan faults {order.home} says more\n")
        raise SystemExit(EXITS[code]) from None
    with suppress(FileNotFoundError):
        os.unlink(address)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        serve(desk, listener, idle=float(order.node.get("idle", IDLE)))
        os.unlink(address)


if __name__ == "__main__":
    main(*sys.argv[1:])
