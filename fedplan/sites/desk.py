# SPDX-License-Identifier: Apache-2.0
"""The desk of a site: each request is looked at before anything is done for it.

A study comes as data, with the first request of a run. From then on the run is of that study: the
desk knows it by every word, asks whether it is approved each time, and refuses what is not.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from fedplan.errors import FedplanError
from fedplan.federation.codes import KINDS, said_of, told
from fedplan.federation.egress import Egress, Warrant, ended
from fedplan.federation.endpoint import EVALUATE, HELLO, Endpoint, place_of
from fedplan.federation.exams import Disclosure
from fedplan.federation.fault_log import FaultLog
from fedplan.federation.identity import is_id
from fedplan.federation.messages import Refused, run_of
from fedplan.language.turn import Turn
from fedplan.models.teaching import untaught
from fedplan.naming import allowing
from fedplan.runners.site import Site
from fedplan.runners.worker import Worker, folder_of, private
from fedplan.sites.approvals import Approvals
from fedplan.sites.policy import Policy
from fedplan.storage.files import put_file
from fedplan.storage.logs import Log
from fedplan.studies.schema import ConfigError, Study, study_of
from fedplan.tensors.message import Message
from fedplan.tensors.serialization import packed, unpacked

REQUESTS = ("hello", "poll", "train", "evaluate")
RUNS, REJOIN = "runs", "rejoin"
"""In a home: which run is of which study; which runs may go on from a home that was put back."""


class Approver(Protocol):
    """Who says whether a study may run here."""

    @property
    def policy(self) -> Policy:
        """What the site lets happen, as it is now."""
        ...

    def admit(self, study: Study, server: str = "", run: str = "") -> str:
        """Who approved of a study in a run; an error with its code if nobody has."""
        ...


class Desk:
    """A site as its server meets it: the study that a run is of, approved, and its worker.

    All that leaves is written down first, refusals too. `server` tells which server this is, by the
    digest of its certificate.
    """

    def __init__(
        self, site: Site, approver: Approver, server: Callable[[], str] = lambda: ""
    ) -> None:
        self.site, self.approver, self.server = site, approver, server
        self.home = Path(site.home)
        with private():
            self.faults, self.egress = FaultLog(self.home, site.seal), Egress(self.home)
        self.log, self._noted = Log(self.home), ("", "", "")
        self._worker: tuple[tuple[str, str], Worker] | None = None
        self._shown = self._asked = ""

    def answer(self, kind: str, message: Message) -> Message:
        """The answer to a request. Of what goes wrong a code leaves, and the text stays here."""
        # Even to tell two studies apart is to find the code that they name.
        # What one study teaches of a type of model is not for the next.
        with private(), allowing(self.site.allow), untaught():
            try:
                worker = self._admitted(kind, message)
            except Exception as error:
                answer = self._ended(self.faults.note(error), message)
            else:
                answer = worker.answer(kind, message)
            self._note(kind, message, answer)
            return answer

    def _note(self, kind: str, message: Message, answer: Message) -> None:
        """Say in the log what was asked and how it ended: by a code, and no more."""
        said = _heard(answer)
        code = next((told(str(said[word])) for word in KINDS if word in said), "")
        # A server asks again and again while a study waits for a person: once is enough.
        if code and (kind, _run_in(message), code) == self._noted:
            return
        self._noted, number = (kind, _run_in(message), code), _heard(message).get("round")
        self.log.note(
            f"{kind if kind in REQUESTS else 'request'} {'ended' if code else 'answered'}",
            code,
            level="warning" if code else "info",
            run=_run_in(message),
            round=number if type(number) is int else 0,
            site=self.site.name,
        )

    def _ended(self, code: str, message: Message) -> Message:
        """A code, written down as all that leaves; a record that cannot be written lets it pass."""
        answer = packed({}, {"client": self.site.name, **said_of(code)})
        with suppress(FedplanError):
            run = _run_in(message)
            self.egress.note(
                ended(code, answer, site=self.site.name, run=run),
                Warrant(self._asked or _offered_in(message), self._shown),
            )
        return answer

    def _admitted(self, kind: str, message: Message) -> Worker:
        """The worker of a request's study, if the request may be answered."""
        self._asked = ""
        run, (_, said) = run_of(message), unpacked(Message(message.header))
        # A server may show another certificate from one request to the next, as after a rotation.
        self._shown = self.server() or self._shown
        study = self._offered(run, said) if kind == HELLO else self._bound(run)
        self._asked = study.whole
        approver = self.approver.admit(study, self._shown, run)
        if kind == HELLO:
            self._bind(run, study)
        worker = self._worker_of(study)
        endpoint = worker.endpoint(run)
        endpoint.warrant = Warrant(study.whole, self._shown, approver)
        if kind != HELLO:
            _require_asked(kind, study)
            _require_rounds(study, said)
            self._require_current(endpoint, run, said)
        return worker

    def _offered(self, run: str, said: Mapping[str, Any]) -> Study:
        """The study that a server offers, which is the one that its run began with.

        Rounds may be added, if that was approved too.
        """
        offered = said.get("study")
        if not isinstance(offered, dict):
            raise Refused(f"the run {run} is offered without a study").coded("another-study")
        study = study_of(offered)
        data = study.data
        if study.gathered or data.test_path or data.test_split or data.test:
            raise Refused("a study names rows, and this site reads its own").coded("policy")
        if study.continues and self._file(study.continues).exists():
            earlier = folder_of(self.site.home, self._bound(study.continues), self.site.name)
            if not place_of(earlier, study.continues).is_dir():
                raise Refused(f"what was kept in {study.continues} is lost").coded("restored")
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
        """The worker of a study under the policy: of one at a time, since each holds a model."""
        policy = self.approver.policy
        known = study.whole, policy.digest
        if self._worker is None or self._worker[0] != known:
            self._worker = None
            mute = "loss" not in policy.metrics
            worker = Worker(
                self.site,
                study,
                policy.bounds,
                egress=self.egress,
                mute=mute,
                disclosure=Disclosure(
                    frozenset(policy.metrics), policy.least_rows, own=not policy.never_share
                ),
            )
            self._worker = (known, worker)
        return self._worker[1]

    def _require_current(self, endpoint: Endpoint, run: str, said: Mapping[str, Any]) -> None:
        """Refuse to go on from a home that is older than what the site has already told."""
        _, notes = endpoint.site.journal.home()
        last = max((line["round"] for line in notes.get("lines", ())), default=0)
        heard, meant = said.get("heard"), self.home / REJOIN / run
        if type(heard) is not int or heard <= last:
            # It is good until a turn stands in the journal that goes beyond what was told.
            meant.unlink(missing_ok=True)
            return
        if not meant.exists():
            raise Refused(
                f"{self.site.name} has told of round {heard} of the run {run}, and its home ends "
                f"with round {last}: a copy was put back, or it is lost; `fedplan site rejoin "
                f"{run}` goes on from there"
            ).coded("restored")


def approvals_of(site: Site) -> Approvals:
    """What a site says to the studies that it is offered."""
    seen = Turn(client=site.name, traits=site.traits)
    return Approvals(Path(site.home), Path(site.policy), site=seen, allow=site.allow)


def rejoin(site: Site, run: str) -> None:
    """Let a run go on from a home that was put back: said by a person, and good for once."""
    if not is_id(run) or not (Path(site.home) / RUNS / f"{run}.json").exists():
        there = [file.stem for file in sorted((Path(site.home) / RUNS).glob("*.json"))]
        raise FedplanError(
            f"{site.name} knows no run {run[:40]!r}: its runs are {', '.join(there) or 'none'}"
        )
    with private(), allowing(site.allow):
        said = json.loads((Path(site.home) / RUNS / f"{run}.json").read_text(encoding="utf-8"))
        approvals_of(site).rejoined(run, study_of(said))
        place = Path(site.home) / REJOIN
        place.mkdir(parents=True, exist_ok=True)
        (place / run).touch()


def _require_asked(kind: str, study: Study) -> None:
    if kind == EVALUATE and not study.evaluate.sites:
        raise Refused("scores are asked for, and the study that was approved has none").coded(
            "undisclosed"
        )


def _require_rounds(study: Study, said: Mapping[str, Any]) -> None:
    number = said.get("round")
    if type(number) is int and number > study.train.rounds:
        raise Refused(f"round {number} is asked for, and {study.train.rounds} were approved").coded(
            "rounds"
        )


def _run_in(message: Message) -> str:
    try:
        return run_of(message)
    except FedplanError:
        return ""


def _heard(message: Message) -> dict[str, Any]:
    try:
        return unpacked(Message(message.header))[1]
    except FedplanError:
        return {}


def _offered_in(message: Message) -> str:
    """A digest of the study in a request that was refused: it may be none that can be read."""
    offered = _heard(message).get("study")
    if not isinstance(offered, dict):
        return ""
    return "?" + hashlib.sha256(json.dumps(offered, sort_keys=True).encode()).hexdigest()
