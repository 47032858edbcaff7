# SPDX-License-Identifier: Apache-2.0
"""The desk of a site: each request is looked at before anything is done for it.

A study comes as data, with the first request of a run. From then on the run is of that study: the
desk knows it by every word, asks whether it is approved each time, and refuses what is not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from fedplan.federation.account import Limits
from fedplan.federation.codes import said_of
from fedplan.federation.endpoint import HELLO, Endpoint
from fedplan.federation.fault_log import FaultLog
from fedplan.federation.messages import Refused, run_of
from fedplan.naming import allowing
from fedplan.runners.site import Site
from fedplan.runners.worker import Worker, private
from fedplan.storage.files import put_file
from fedplan.studies.schema import ConfigError, Study, study_of
from fedplan.tensors.message import Message
from fedplan.tensors.serialization import packed, unpacked

RUNS, REJOIN = "runs", "rejoin"
"""In a home: which run is of which study; which runs may go on from a home that was put back."""


class Approver(Protocol):
    """Who says whether a study may run here."""

    def admit(self, study: Study) -> str:
        """Who approved of a study; an error with its code if nobody has."""
        ...


class Desk:
    """A site as its server meets it: the study that a run is of, approved, and its worker."""

    def __init__(self, site: Site, approver: Approver, limits: Limits | None = None) -> None:
        self.site, self.approver, self.limits = site, approver, limits
        self.home = Path(site.home)
        self.faults = FaultLog(self.home, site.seal)
        self._worker: tuple[str, Worker] | None = None

    def answer(self, kind: str, message: Message) -> Message:
        """The answer to a request. Of what goes wrong a code leaves, and the text stays here."""
        with private():
            try:
                worker = self._admitted(kind, message)
            except Exception as error:
                said = said_of(self.faults.note(error))
                return packed({}, {"client": self.site.name, **said})
            return worker.answer(kind, message)

    def _admitted(self, kind: str, message: Message) -> Worker:
        """The worker of a request's study, if the request may be answered."""
        run, (_, said) = run_of(message), unpacked(Message(message.header))
        study = self._offered(run, said) if kind == HELLO else self._bound(run)
        self.approver.admit(study)
        if kind == HELLO:
            self._bind(run, study)
        worker = self._worker_of(study)
        if kind != HELLO:
            _require_rounds(study, said)
            self._require_current(worker.endpoint(run), run, said)
        return worker

    def _offered(self, run: str, said: Mapping[str, Any]) -> Study:
        """The study that a server offers, which is the one that its run began with.

        Rounds may be added, if that was approved too.
        """
        offered = said.get("study")
        if not isinstance(offered, dict):
            raise Refused(f"the run {run} is offered without a study").coded("another-study")
        with allowing(self.site.allow):
            study = study_of(offered)
        if study.gathered:
            raise Refused("a study names rows, and this site reads its own").coded("policy")
        if self._file(run).exists() and self._bound(run).digest != study.digest:
            raise Refused(f"the run {run} is of another study").coded("another-study")
        return study

    def _bound(self, run: str) -> Study:
        """The study that a run was greeted with."""
        try:
            said = json.loads(self._file(run).read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise Refused(f"the run {run} is not known here").coded("unknown-run") from error
        except (OSError, ValueError) as error:
            raise ConfigError(f"{self._file(run)} cannot be read: {error}").coded("disk") from error
        with allowing(self.site.allow):
            return study_of(said)

    def _bind(self, run: str, study: Study) -> None:
        file = self._file(run)
        text = study.model_dump_json(indent=1)
        if not file.exists() or file.read_text(encoding="utf-8") != text:
            file.parent.mkdir(parents=True, exist_ok=True)
            put_file(file, text)

    def _file(self, run: str) -> Path:
        return self.home / RUNS / f"{run}.json"

    def _worker_of(self, study: Study) -> Worker:
        """The worker of a study: of one at a time, since each holds a model."""
        if self._worker is None or self._worker[0] != study.whole:
            self._worker = None
            self._worker = (study.whole, Worker(self.site, study, self.limits))
        return self._worker[1]

    def _require_current(self, endpoint: Endpoint, run: str, said: Mapping[str, Any]) -> None:
        """Refuse to go on from a home that is older than what the site has already told."""
        _, notes = endpoint.site.journal.home()
        last = max((line["round"] for line in notes.get("lines", ())), default=0)
        heard, meant = said.get("heard"), self.home / REJOIN / run
        if type(heard) is not int or heard <= last:
            return
        if not meant.exists():
            raise Refused(
                f"{self.site.name} has told of round {heard} of the run {run}, and its home ends "
                f"with round {last}: a copy was put back, or it is lost; `fedplan site rejoin "
                f"{run}` goes on from there"
            ).coded("restored")
        meant.unlink()


def rejoin(site: Site, run: str) -> None:
    """Let a run go on from a home that was put back: said by a person, and good for once."""
    with private():
        place = Path(site.home) / REJOIN
        place.mkdir(parents=True, exist_ok=True)
        (place / run).touch()


def _require_rounds(study: Study, said: Mapping[str, Any]) -> None:
    number = said.get("round")
    if type(number) is int and number > study.train.rounds:
        raise Refused(f"round {number} is asked for, and {study.train.rounds} were approved").coded(
            "rounds"
        )
