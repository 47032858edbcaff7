# SPDX-License-Identifier: Apache-2.0
"""Workers: a site's rows and model in one study, and its answers there."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from fedplan.data.tables import load
from fedplan.federation.account import Account, Limits
from fedplan.federation.client import Client, guard_of, share_guard_of
from fedplan.federation.codes import said_of
from fedplan.federation.egress import Egress
from fedplan.federation.endpoint import Endpoint, journal_in, place_of
from fedplan.federation.exams import Disclosure
from fedplan.federation.fault_log import FaultLog
from fedplan.federation.messages import Refused, run_of
from fedplan.naming import allowing
from fedplan.runners.site import Site
from fedplan.storage.journal import Journal
from fedplan.storage.names import folder_named
from fedplan.studies.folder import note_task, write_run
from fedplan.studies.schema import ConfigError, Study
from fedplan.studies.stage import exam_of, participation_of, stage_of
from fedplan.tensors.devices import device_named, settled
from fedplan.tensors.message import Message
from fedplan.tensors.riders import is_rider
from fedplan.tensors.serialization import packed

if TYPE_CHECKING:
    from datasets import Dataset

    from fedplan.federation.agreement import Agreement
    from fedplan.federation.masker import Masker


class Worker:
    """A site's rows and model, and its endpoint in the run that it was last asked in.

    What it writes only its owner may read; with a key, what tells of rows is sealed. The study came
    over a network: of the code that it names, only that is imported which the site has installed
    for fedplan, or which it allows. `egress` is where all that leaves is written down; with `mute`
    no loss does, and of scores what `disclosure` says.
    """

    def __init__(
        self,
        site: Site,
        study: Study,
        limits: Limits | None = None,
        *,
        egress: Egress | None = None,
        mute: bool = False,
        disclosure: Disclosure | None = None,
    ) -> None:
        self.disclosure = disclosure or Disclosure()
        with private(), allowing(site.allow):
            self.site, self.study, self.seal = site, study, site.seal
            name = site.name
            own = None if study.data.path else (name, table_of(site, study))
            self.stage = stage_of(study, own)
            if name not in self.stage.shares.train:
                raise ConfigError(f"the study has no client {name!r}")
            # The site knows its own machine: its word goes before the study's.
            settled(self.stage.model, device_named(site.device or study.device))
            self.traits = _traits(study, site)
            account = Path(site.home) / "account" / folder_named(site.dataset)
            self.account = Account(account, limits, seal=self.seal)
            self.faults = FaultLog(Path(site.home), self.seal)
            self.egress, self.mute = egress or Egress(Path(site.home)), mute
        self._endpoint: Endpoint | None = None

    def answer(self, kind: str, message: Message) -> Message:
        """The answer of the endpoint of the run that a request is of."""
        with private():
            try:
                endpoint = self.endpoint(run_of(message))
            except Exception as error:
                return packed({}, {**said_of(self.faults.note(error))})
            return endpoint.answer(kind, message)

    def endpoint(self, run: str) -> Endpoint:
        """The endpoint in a run."""
        if self._endpoint is None or self._endpoint.agreement.run != run:
            with private():
                self._endpoint = _endpoint_in(self, run)
        return self._endpoint


def _endpoint_in(worker: Worker, run: str) -> Endpoint:
    study, name, stage = worker.study, worker.site.name, worker.stage
    agreement, account = replace(stage.agreed, run=run), worker.account
    folder = folder_of(worker.site.home, study, name)
    place = place_of(folder, run)
    site = Client(
        name=name,
        rows=stage.shares.train[name],
        journal=journal_in(place, worker.seal),
        model=stage.model,
        start=stage.start,
        marks=stage.marks,
        base=stage.base.placed(stage.model, agreement.resting),
        loss=stage.shares.task.loss,
        traits=worker.traits,
        guard=guard_of(agreement, account.folder, account),
        shares=share_guard_of(agreement, account),
        account=account,
        deterministic=study.deterministic,
        mute=worker.mute or len(stage.shares.train[name]) < worker.disclosure.least_rows,
        exam=exam_of(study, stage.shares, name),
        disclosure=worker.disclosure,
        features=study.train.features,
    )
    if study.continues:
        _carry_over(worker, site.journal)
    write_run(place, study, agreement.params)
    note_task(place, stage.shares)
    masker = masker_of(worker, agreement, site, place) if agreement.masking.active else None
    return Endpoint(
        agreement, site, folder, faults=worker.faults, egress=worker.egress, masker=masker
    )


def masker_of(worker: Worker, agreement: Agreement, client: Client, place: Path) -> Masker:
    """A site's side of masked sums, by its own key and by those of the others that it was given."""
    from fedplan.federation.masker import Masker  # which takes an extra
    from fedplan.runners.peers import node_key, read_peers

    site, study = worker.site, worker.study
    if not site.peers or site.server is None or not site.server.node:
        raise Refused(
            f"sums of {study.name} are masked, and {site.name} does not have what that takes: "
            "say peers (a folder with every site's NAME.pub) and server.node in its site.toml"
        ).coded("peers")
    names = list(study.clients.names) or list(worker.stage.shares.train)
    directory = read_peers(Path(site.peers), names)
    who, node = participation_of(study), node_key(Path(site.server.node))

    def cohort(number: int) -> list[str]:
        return who.cohort(agreement.experiment, number, names)

    return Masker(agreement, client, node, directory, place, cohort=cohort)


def _carry_over(worker: Worker, journal: Journal) -> None:
    """Begin with what the site kept in the earlier run that the study says, if it was in it."""
    run, name = worker.study.continues, folder_named(worker.site.name)
    for place in Path(worker.site.home).glob(f"*/{name}/{run}"):
        home, _ = journal_in(place, worker.seal, reading=True).home()
        journal.begin({k: v for k, v in home.items() if not is_rider(k)})


def _traits(study: Study, site: Site) -> dict[str, str]:
    """What is said of a site: by the study, and by itself where that does not tell it is there."""
    own, name = site.traits, site.name
    if own and study.hides_clients:
        raise ConfigError(
            f"the site {name!r} says {', '.join(own)} of itself: this study hides its clients, so "
            f"traits are public and stand in the study, in clients.traits.{name}"
        )
    return study.clients.traits.get(name, {}) | own


@contextmanager
def private() -> Generator[None]:
    """Let nobody else read what is written meanwhile."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def folder_of(home: str, study: Study, name: str) -> Path:
    """Where a site keeps an experiment, under its own name; each run has a folder in it."""
    return Path(home) / folder_named(f"{study.name}-{study.seed}") / folder_named(name)


def roster_of(study: Study) -> list[str]:
    """The names of all clients of a study."""
    return list(study.clients.names) or list(stage_of(study).shares.train)


def table_of(site: Site, study: Study) -> Dataset:
    """The table that a site brings."""
    if not site.data:
        raise ConfigError(f"the site {site.name!r} does not say its data")
    if not site.rows:
        return load(site.data, split=study.data.split, empty=study.privacy is not None)
    file, _, function = site.rows.rpartition(":")
    module_spec = importlib.util.spec_from_file_location("fedplan_site_rows", file)
    if module_spec is None or module_spec.loader is None:
        raise ConfigError(f"{file} cannot be imported for its {function}")
    sys.path.insert(0, str(Path(file).parent))
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    return getattr(module, function)(site.data)
