# SPDX-License-Identifier: Apache-2.0
"""A masked round over Flower's grid: four letters after the turns, and a sum that is opened once.

A site that is silent at a step is gone from then on. A sum that cannot be opened is begun anew
once, and then given up: the round changes nothing, and says why.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

from flwr.app import ArrayRecord

from fedplan.errors import FedplanError
from fedplan.federation import masking
from fedplan.federation.codes import KINDS, meant
from fedplan.federation.docket import DOCKET, POLL_DOCKET, Docket, note_docket, read_docket
from fedplan.federation.masked import MaskedPoll, MaskedSum
from fedplan.federation.masked_letters import (
    advert_of,
    advert_said,
    adverts_said,
    boxes_of,
    boxes_said,
    consent_of,
    consents_said,
    delivery_said,
    letter_in,
    letter_message,
    survivors_said,
    unmasking_of,
    words_in,
)
from fedplan.federation.messages import asked_of
from fedplan.federation.rounds import Tally
from fedplan.federation.server import Server
from fedplan.privacy.masking.ciphers import MaskingError
from fedplan.privacy.masking.letters import Advert
from fedplan.privacy.masking.server import MaskingServer, Opened
from fedplan.runners.flower.calls import Calls, Letter
from fedplan.storage.failpoints import reach
from fedplan.tensors.message import Message
from fedplan.tensors.serialization import JSON, SerializationError, unpacked

log = logging.getLogger("fedplan")
ATTEMPTS = 2
"""How often a process begins a round's sum: who was only slow may be there the second time."""
GONE = "gone before the masked sum was closed"
"""Why a client is not counted whose turn was heard, and whose words were not."""


class MaskedRound:
    """The masked sum of an open round, attempt by attempt."""

    def __init__(
        self,
        calls: Calls,
        server: Server,
        tally: Tally,
        *,
        late: Collection[str] = (),
        poll: MaskedPoll | None = None,
    ) -> None:
        self.calls, self.tally, self._late = calls, tally, set(late)
        self.total = poll or cast("MaskedSum", tally.total)
        self._run = server.agreement.run
        self._file = server.folder / (DOCKET if poll is None else POLL_DOCKET)
        self._docket, self._left = read_docket(self._file, self.total.number), ATTEMPTS
        self._marks, self._asked = self.total.marks, ""
        self._gone = dict[str, str]()

    def begins(self) -> bool:
        """Whether the sum is to be begun, and if so have all requests say under which terms."""
        if self.total.opened is not None or not self._left:
            return False
        self._left -= 1
        self._note(self._docket)
        for name, request in self.tally.cohort.items():
            fresh = replace(request, base=self._marks, attempt=self._docket.attempt)
            self.tally.cohort[name], self._asked = fresh, asked_of(fresh.turn)
        return True

    def play(self, adverts: Mapping[str, Any]) -> None:
        """All letters after the turns; if they do not open the sum, it is to be begun anew."""
        try:
            self.total.opened = self._opened(adverts)
            self.total.sites = self._docket.survivors
        except (MaskingError, SerializationError) as error:
            self.total.failed = str(error)
            log.warning("round %d: %s", self.total.number, error)
            self._docket = self._docket.again()

    def settle(self) -> None:
        """Count those whose words are in the sum; of the others say why they are not."""
        tally = self.tally
        for name in tally.heard:
            if self.total.opened is None:
                tally.rejected.setdefault(name, f"not summed: {self.total.failed}"[:300])
            elif name in self.total.sites:
                tally.counted.append(name)
                tally.rejected.pop(name, None)
            else:
                late = "late" if name in self._late else self._gone.get(name, GONE)
                tally.rejected.setdefault(name, late)

    def _note(self, docket: Docket) -> None:
        self._docket = note_docket(self._file, docket)

    def _opened(self, adverts: Mapping[str, Any]) -> Opened:
        server = self._server(adverts)
        self._shared(server)
        self._masked(server)
        survivors = self._docket.survivors
        letter = letter_message(self._run, survivors_said(server.survivors()))
        for name, answer in self._ask(masking.CONSENT, dict.fromkeys(survivors, letter)):
            self._taken(name, lambda a=answer: server.consented(letter_in(a, consent_of)))
        reach("masking.consented")
        letter = letter_message(self._run, consents_said(server.consents()))
        for name, answer in self._ask(masking.UNMASK, dict.fromkeys(survivors, letter)):
            self._taken(name, lambda a=answer: server.answered(letter_in(a, unmasking_of)))
        reach("masking.answered")
        return server.open()

    def _server(self, said: Mapping[str, Any]) -> MaskingServer:
        """The server's side, with its roster: as it was told before, or of who has come."""
        terms = self.total.terms(self._asked, self._docket.attempt)
        known = {name: guest.key for name, guest in self.calls.guests.items()}
        server = MaskingServer(terms, known)
        held = self._docket.adverts or {n: x for n, x in said.items() if n not in self._late}
        read = dict[str, Advert]()
        for name, each in held.items():
            self._taken(name, lambda n=name, x=each: read.update({n: advert_of(x, terms)}))
        for name, advert in read.items():
            if self._by(name, advert.site):
                self._taken(name, lambda a=advert: server.advertised(a))
        roster = server.adverts()
        told = {each.site: advert_said(each, terms) for each in roster.adverts}
        self._note(replace(self._docket, adverts=told))
        reach("masking.roster")
        self._roster = letter_message(self._run, adverts_said(roster, terms))
        return server

    def _shared(self, server: MaskingServer) -> None:
        """All boxes: those that were delivered before, or what sites now send."""
        if self._docket.boxes:
            for each in self._docket.boxes.values():
                server.shared(boxes_of(each))
            return
        found = dict[str, JSON]()
        for name, answer in self._ask(
            masking.SHARE, dict.fromkeys(self._docket.adverts, self._roster)
        ):

            def take(name: str = name, answer: Message = answer) -> None:
                boxes = letter_in(answer, boxes_of)
                if self._by(name, boxes.site):
                    server.shared(boxes)
                    found[name] = boxes_said(boxes)

            self._taken(name, take)
        server.present()
        self._note(replace(self._docket, boxes=found))
        reach("masking.boxes")

    def _masked(self, server: MaskingServer) -> None:
        """The masked words of all who are present; after a kill, of those who were told of."""
        told = self._docket.survivors
        names = told or tuple(sorted(self._docket.boxes))
        letters = {
            name: letter_message(self._run, delivery_said(server.delivery(name))) for name in names
        }
        for name, answer in self._ask(masking.WORDS, letters):

            def take(name: str = name, answer: Message = answer) -> None:
                words = words_in(answer)
                if self._by(name, words.site):
                    server.add(words)

            self._taken(name, take)
            del answer, take  # else it would be held while the next one is fetched
        survivors = server.survivors().sites
        if told and told != survivors:
            raise MaskingError("not all are there again whose sum was to be opened")
        self._note(replace(self._docket, survivors=survivors))
        reach("masking.survivors")

    def _ask(self, step: str, letters: Mapping[str, Message]) -> Iterator[tuple[str, Message]]:
        """The answers of a step, as they come; who refuses or is silent is gone."""
        asked = {name: _letter(each) for name, each in letters.items()}
        silent = set(asked)
        for name, answer in self.calls.ask(f"query.{step}", asked, lambda: True):
            silent.discard(name)
            if isinstance(answer, str):
                self._gone.setdefault(name, answer.splitlines()[0])
            elif why := _refusal(answer):
                log.warning("%s at %s: %s", name, step, why)
                self._gone.setdefault(name, f"{step}: {why}")
            else:
                yield name, answer
            del answer
        for name in silent:
            self._gone.setdefault(name, f"no answer at {step}")

    def _by(self, name: str, site: str) -> bool:
        """Whether a letter is of the site that sent it."""
        if site != name:
            self._gone.setdefault(name, f"it writes as {site[:80]!r}")
        return site == name

    def _taken(self, name: str, take: Callable[[], object]) -> None:
        """Take a letter; one that is not as it must be is its sender's fault alone."""
        try:
            take()
        except (MaskingError, FedplanError) as error:
            log.warning("%s: %s", name, error)
            self._gone.setdefault(name, str(error).splitlines()[0][:300])
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            self._gone.setdefault(name, f"its letter cannot be read: {str(error)[:80]}")


def poll_of(server: Server, tally: Tally) -> MaskedPoll:
    """The masked poll before a round."""
    total = cast("MaskedSum", tally.total)
    return MaskedPoll(server.agreement, total.marks, total.number, total.threshold)


def _letter(message: Message) -> Letter:
    def letter() -> tuple[Message, ArrayRecord | None]:
        return message, None

    return letter


def _refusal(answer: Message) -> str:
    """What a site says instead of a letter, in words of ours."""
    try:
        said = unpacked(Message(answer.header))[1]
    except FedplanError:
        return "its answer cannot be read"
    kind = next((kind for kind in KINDS if kind in said), "")
    return meant(kind, str(said[kind])) if kind else ""
