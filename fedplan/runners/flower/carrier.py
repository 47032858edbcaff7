# SPDX-License-Identifier: Apache-2.0
"""The server's loop on Flower's grid: ask, count what comes as it comes, close, commit."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from flwr.app import ArrayRecord
from flwr.serverapp import Grid

from fedplan.errors import FedplanError
from fedplan.federation.callbacks import Callback, Closed, stopping
from fedplan.federation.codes import KINDS, meant
from fedplan.federation.evaluation import Scoring, together
from fedplan.federation.messages import Request, request_header, request_message, scored, update_of
from fedplan.federation.patience import Patience
from fedplan.federation.rounds import Tally, hear
from fedplan.federation.server import Server
from fedplan.federation.states import RunState, SiteState, state_said
from fedplan.federation.status import Status
from fedplan.federation.versions import other_versions, unlike_versions
from fedplan.privacy.errors import PrivacyError
from fedplan.runners.faults import Faults
from fedplan.runners.flower.calls import Calls, Guest, Letter
from fedplan.runners.flower.evaluations import Evaluations
from fedplan.runners.flower.records import arrays_of
from fedplan.studies.schema import Study
from fedplan.tensors.message import Message
from fedplan.tensors.named import Tensors, nbytes
from fedplan.tensors.serialization import JSON, packed, unpacked

log = logging.getLogger("fedplan")
Test = Callable[[Tensors], dict[str, float]]
"""What is measured of the world's values on a common test."""


class Carrier:
    """A server and the grid that carries its rounds.

    A round waits for all until it is time, and closes with no fewer than `quorum`. A site that
    agreed to another study, or starts from another model, is not asked; the others go on. Once a
    round is committed, those who are there are asked for the scores that `scoring` says, and `test`
    scores the world here.
    """

    def __init__(
        self,
        grid: Grid,
        server: Server,
        patience: Patience | None = None,
        *,
        quorum: int = 1,
        faults: Faults | None = None,
        callbacks: Sequence[Callback] = (),
        scoring: Scoring | None = None,
        test: Test | None = None,
        study: Study | None = None,
        status: Status | None = None,
    ) -> None:
        if server.aggregation.hides and quorum > 1:
            raise PrivacyError(
                f"the quorum is {quorum}, and this run hides its clients: a round that stops for "
                "want of answers tells who was away; leave clients.quorum out"
            )
        # A round of hidden clients closes with whatever came, and be it nothing.
        self.server, self.quorum = server, 0 if server.aggregation.hides else quorum
        hello = hello_of(server.agreement.run, study)
        self.calls = Calls(grid, server.roster, patience or Patience(), hello)
        self.status = self.calls.status = status or Status()
        self.callbacks = tuple(callbacks)
        self.faults, self._late = faults or Faults(), set[str]()
        self._unfit: dict[str, str] = {}
        self._adverts: dict[str, Any] = {}
        self._unlike: dict[str, str] = {}
        self._packed: tuple[tuple[tuple[str, int], ...], ArrayRecord] = ((), ArrayRecord())
        self.scoring, self.test = scoring or Scoring(), test
        self.evaluations = Evaluations(self.calls, server, self._arrays)

    def carry(self) -> None:
        """Play every round that is left, committing each before the next."""
        server, last = self.server, self.server.last()
        if last is not None:
            if self._unscored(last):
                self._gather(0)
            last = self._scored(last)
        stopped = stopping(self.callbacks, self._directed(last)) if last else ""
        stopped = self.status.halted(stopped)
        if server.world.round < server.rounds and not stopped:
            self._gather(min(self.quorum, len(server.roster)))
            stopped = self.status.halted()
        while server.world.round < server.rounds and not stopped:
            self._greet()
            tally = server.begin()
            self._late = self.faults.play(server, tally)
            for name in tally.cohort.keys() & self._unfit.keys():
                tally.rejected[name] = f"not asked: it {self._unfit[name]}"
            self._choose_together(tally)
            self.status.opened(len(tally.cohort.keys() - self._unfit.keys()))
            if server.agreement.masking.active:
                self._ask_masked(tally)
            else:
                self._ask(tally)
            server.end(tally)
            closed = self._directed(self._scored(server.commit(tally)))
            log.info("%s", _told(closed, self.scoring.primary))
            self.status.round(closed)
            stopped = self.status.halted(stopping(self.callbacks, closed))
        if stopped:
            log.info("stopped after round %d: %s", server.world.round, stopped)

    def _gather(self, enough: int) -> None:
        self.status.become(RunState.WAITING)
        self.calls.gather(enough)
        self.status.become(RunState.RUNNING)

    def _unscored(self, closed: Closed) -> bool:
        """Whether a round that was committed is still to be scored."""
        asked = self.scoring.sites or self.test is not None
        return asked and not closed.scores and self.scoring.due(closed.round, self.server.rounds)

    def _scored(self, closed: Closed) -> Closed:
        """A round with its scores, which are written down once: absent sites hold up no training.

        If its world is the best so far, it is kept.
        """
        if self._unscored(closed):
            scores = dict[str, Any]()
            if self.test is not None:
                scores["world"] = self.test(self.server.world_values())
            if self.scoring.sites:
                self._greet()
                scores["sites"] = together(*self.evaluations.ask(self._unfit), self.scoring)
            closed = self.server.score(closed, scores)
        self.server.keep_best(self.scoring.best(closed.metrics))
        return closed

    def _directed(self, closed: Closed) -> Closed:
        """A round with the task's own score, and which way is better; the server knows no task."""
        return replace(closed, higher=self.scoring.higher, primary=self.scoring.primary)

    def _greet(self) -> None:
        """Hear who the sites are; one that agreed to something else has no part until it mends."""
        self.calls.look()
        for name, guest in self.calls.guests.items():
            if reason := self._unfit_for(name, guest):
                if self._unfit.get(name) != reason:
                    log.warning("%s is not asked: it %s", name, reason)
                self.status.site(name, SiteState.REFUSED, f"not asked: it {reason}")
                self._unfit[name] = reason
            else:
                self._unfit.pop(name, None)
                self.server.roster[name] = guest.traits
                self._tell_versions(name, guest)

    def _tell_versions(self, name: str, guest: Guest) -> None:
        """Tell once of a site that takes part with other packages than ours."""
        odd = unlike_versions(guest.versions)
        if odd and self._unlike.get(name) != odd:
            self.status.tell("site versions", f"has {odd}; it takes part", site=name)
        self._unlike[name] = odd

    def _unfit_for(self, name: str, guest: Guest) -> str:
        """Why a site cannot take part, in words; nothing if it can.

        Where clients are hidden their traits are public, in the study: to hear them from a site
        would tell that it is there.
        """
        agreement, said = self.server.agreement, dict(self.server.roster[name])
        if self.server.aggregation.hides and guest.traits != said:
            return "has traits of its own, and this run hides its clients: see clients.traits"
        if agreement.start and guest.start != agreement.start:
            return (
                f"starts from the model {guest.start[:40]} and not from {agreement.start}: give it "
                "the same weights, and start it again"
            )
        if odd := other_versions(guest.versions):
            return f"has {odd}: install the same there and here"
        if guest.run != agreement.run:
            return f"is in the run {guest.run[:40]} and this is {agreement.run}: start it again"
        if guest.agreed != agreement.fingerprint:
            return (
                f"agreed to {guest.agreed[:40]} and this study is {agreement.fingerprint}: give it "
                "the same study, and start it again"
            )
        return ""

    def _ask(self, tally: Tally) -> None:
        """Ask all for their turns, and count each as it comes."""
        letters = {n: self._letter(tally, n) for n in tally.cohort if n not in self._unfit}
        for name, answer in self.calls.ask("train", letters, lambda: self._enough(tally)):
            if isinstance(answer, str):
                tally.rejected.setdefault(name, answer.splitlines()[0])
                self.status.site(name, SiteState.FAILED, tally.rejected[name])
            elif self._lacks(tally, name, answer):
                letters[name] = self._letter(tally, name)
            else:
                # All who are there have been asked: who comes later has it packed anew.
                self._packed = ((), ArrayRecord())
                self._count(tally, name, answer)
            # Else it would be held while the next one is fetched.
            del answer
        silent = tally.cohort.keys() - set(tally.heard) - tally.rejected.keys()
        tally.rejected |= {name: "no answer" for name in silent}
        for name in silent - self.calls.absent:
            self.status.site(name, SiteState.FAILED, "no answer in time")
        if not self._enough(tally):
            reasons = "; ".join(f"{n}: {why}" for n, why in sorted(tally.rejected.items()))
            raise FedplanError(
                f"round {self.server.world.round + 1} has {len(tally.heard)} answers and needs "
                f"{self.quorum}: {reasons}; start the run again to go on with it"
            )

    def _ask_masked(self, tally: Tally) -> None:
        """Ask all for their turns, and then for a sum that nobody has a share of in the clear."""
        from fedplan.runners.flower.masked import MaskedRound  # which takes an extra

        made = MaskedRound(self.calls, self.server, tally, late=self._late)
        while made.begins():
            self._adverts = {}
            self._ask(tally)
            made.play(self._adverts)
        made.settle()

    def _enough(self, tally: Tally) -> bool:
        return len(tally.heard) >= min(self.quorum, len(tally.cohort))

    def _letter(self, tally: Tally, name: str) -> Letter:
        def letter() -> tuple[Message, ArrayRecord | None]:
            request = tally.cohort[name]
            request = replace(request, values=self.evaluations.lacking(request))
            said = packed({}, request_header(request))
            return said, self._arrays(request)

        return letter

    def _arrays(self, request: Request) -> ArrayRecord:
        """The values of a request as arrays: most clients of a round lack the same ones."""
        which = tuple(sorted((key, request.versions.get(key, -1)) for key in request.values))
        if which != self._packed[0]:
            self._packed = (which, arrays_of(request_message(request).blobs))
        return self._packed[1]

    def _lacks(self, tally: Tally, name: str, answer: Message) -> bool:
        """Whether a site has lost what it was sent before; it is then asked anew, with all."""
        if not _said(answer).get("lacking") or tally.cohort[name].anew:
            return False
        self.server.anew(tally, name)
        log.warning("%s has lost what it was sent before, and is sent all of it", name)
        return True

    def _count(self, tally: Tally, name: str, answer: Message) -> None:
        said = _said(answer)
        if kind := next((kind for kind in KINDS if kind in said), ""):
            tally.rejected.setdefault(name, meant(kind, str(said[kind])))
            log.warning("%s %s", name, meant(kind, str(said[kind])))
            self.status.site(name, state_said(tally.rejected[name]), tally.rejected[name])
            return
        limit = 2 * nbytes(self.server.world.values) + 2**22
        try:
            riders = self.server.agreement.method.riders
            update = update_of(answer, riders=riders, limit=limit)
            if update.client != name:
                raise FedplanError(f"{name} answers for {update.client[:80]!r}")
        except FedplanError as error:
            tally.rejected[name] = str(error).splitlines()[0]
            log.warning("%s is not counted: %s", name, tally.rejected[name])
            self.status.site(name, SiteState.FAILED, tally.rejected[name])
            return
        if self.server.agreement.masking.active:
            if hear(self.server.agreement, self.server.world, tally, update):
                self._adverts[name] = said.get("advert")
                self.status.site(name, SiteState.ANSWERED)
            return
        self.server.take(tally, update, late=name in self._late)
        self.status.site(name, SiteState.ANSWERED)

    def _choose_together(self, tally: Tally) -> None:
        voters = self.server.voters(tally)
        if voters is None:
            return
        if self.server.agreement.masking.active:
            return self._poll_masked(tally, voters)
        letters = {name: self._letter(tally, name) for name in voters if name not in self._unfit}
        polled = dict[str, Any]()
        enough = min(self.quorum, len(voters))
        for name, answer in self.calls.ask("query.poll", letters, lambda: len(polled) >= enough):
            if isinstance(answer, Message) and self._lacks(tally, name, answer):
                letters[name] = self._letter(tally, name)
                continue
            try:
                said = _said(answer) if isinstance(answer, Message) else {}
                polled[name] = scored(said.get("scores"))
            except FedplanError as error:
                log.warning("%s has no say in this round: %s", name, error)
        self.server.choose(tally, polled)
        for name in polled:
            # What came with the question is there: it need not come again.
            tally.cohort[name] = replace(tally.cohort[name], values={})

    def _poll_masked(self, tally: Tally, voters: Sequence[str]) -> None:
        """Have all say what they would choose, so that only the sum of it is seen."""
        from fedplan.runners.flower.masked import MaskedRound, poll_of  # which takes an extra

        total = poll_of(self.server, tally)
        made = MaskedRound(self.calls, self.server, tally, poll=total)
        while made.begins():
            made.play(self._polled(tally, voters))
        if not total.scores:
            raise FedplanError(
                f"round {total.number}: what clients would choose was not summed: "
                f"{total.failed}; start the run again to go on with this round"
            )
        self.server.choose(tally, {"all": total.scores})

    def _polled(self, tally: Tally, voters: Sequence[str]) -> dict[str, Any]:
        """The adverts of all who are polled."""
        found = dict[str, Any]()
        letters = {name: self._letter(tally, name) for name in voters if name not in self._unfit}
        for name, answer in self.calls.ask("query.poll", letters, lambda: True):
            if isinstance(answer, Message) and self._lacks(tally, name, answer):
                letters[name] = self._letter(tally, name)
            elif isinstance(answer, Message) and (advert := _said(answer).get("advert")):
                found[name] = advert
        return found


def hello_of(run: str, study: Study | None) -> Message:
    """What a site is asked first: whether it takes part in a run of a study, which comes whole."""
    said: dict[str, JSON] = {"run": run}
    if study is not None:
        said["study"] = study.model_dump(mode="json")
    return packed({}, said)


def _said(answer: Message) -> dict[str, Any]:
    try:
        return unpacked(Message(answer.header))[1]
    except FedplanError:
        return {}


def _told(closed: Closed, primary: str) -> str:
    whole, loss = closed.whole, closed.row.get("loss", 0.0)
    missing = f", not counted: {', '.join(whole.rejected)}" if whole.rejected else ""
    names = (f"{kind}.{primary}" for kind in ("world", "sites.world", "sites.own"))
    scores = "".join(f"{name} {closed.row[name]:.3f}, " for name in names if name in closed.row)
    return (
        f"round {closed.round} of {closed.rounds}: loss {loss:.3f}, {scores}"
        f"{len(whole.counted)} counted{missing}, {whole.up} bytes up, {whole.down} down"
    )
