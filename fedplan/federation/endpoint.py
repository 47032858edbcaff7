# SPDX-License-Identifier: Apache-2.0
"""Endpoints: where a site takes requests and hands out answers, whatever carries them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fedplan.errors import FedplanError, StoreError
from fedplan.federation.agreement import Agreement
from fedplan.federation.client import Client
from fedplan.federation.codes import said_of
from fedplan.federation.egress import (
    AGREEMENT,
    CONSENT,
    EVALUATION,
    GUESSED,
    KEYS,
    SCORES,
    SHARES,
    UNMASKING,
    UPDATE,
    Egress,
    Leaving,
    Warrant,
    content_mark,
    ended,
)
from fedplan.federation.evaluation import evaluate, scores_said
from fedplan.federation.fault_log import FaultLog
from fedplan.federation.identity import is_id
from fedplan.federation.masking import STEPS, WORDS
from fedplan.federation.messages import (
    Refused,
    Request,
    Update,
    listed,
    request_of,
    run_of,
    update_message,
)
from fedplan.federation.polls import poll
from fedplan.federation.record import ROLES
from fedplan.federation.turns import local
from fedplan.federation.versions import own_versions
from fedplan.storage.encryption import Encryption
from fedplan.storage.files import keep_file
from fedplan.storage.journal import Journal
from fedplan.storage.store import Store
from fedplan.tensors.message import Message
from fedplan.tensors.named import nbytes
from fedplan.tensors.riders import param_of
from fedplan.tensors.serialization import JSON, packed

if TYPE_CHECKING:
    from fedplan.federation.masker import Masker

HELLO, POLL, TRAIN, EVALUATE = "hello", "poll", "train", "evaluate"
LEFT: dict[str, str] = dict(zip(STEPS, (SHARES, UPDATE, CONSENT, UNMASKING), strict=True))
"""What leaves at each step of a masked sum."""


class Endpoint:
    """A site in one run.

    What it keeps and what it has seen lie in a folder of the run, `place_of`. What leaves is
    written to `egress`, the record of all runs, and what goes wrong to `faults`. `warrant` is by
    whose word it answers: whoever hands it a request may set another. Where sums are masked, the
    `masker` has its side of them, and without one it takes no part.
    """

    def __init__(
        self,
        agreement: Agreement,
        site: Client,
        folder: Path,
        *,
        faults: FaultLog | None = None,
        egress: Egress | None = None,
        warrant: Warrant | None = None,
        masker: Masker | None = None,
    ) -> None:
        self.agreement, self.site, self.folder = agreement, site, place_of(folder, agreement.run)
        self.masker = masker
        self.egress, self.warrant = egress or Egress(folder), warrant or Warrant()
        self.faults = faults or FaultLog(folder, site.journal.seal)
        self.seen, self._number = self._store(), 0
        for place in (folder, self.folder):
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
            keep_file(place / AGREEMENT, json.dumps(self._agreed(), indent=1))
        self._kinds = {p.key: str(p.kind) for p in agreement.params}

    def answer(self, kind: str, message: Message) -> Message:
        """The answer to a request. Of what goes wrong a code leaves, and the text stays here."""
        turns = {HELLO: self._hello, POLL: self._poll, TRAIN: self._train}
        turns |= {EVALUATE: self._evaluate}
        turns |= {each: partial(self._masking, each) for each in STEPS}
        try:
            if kind not in turns:
                raise Refused(f"{self.site.name} knows no {kind[:40]!r}").coded("request")
            self._recall()
            return turns[kind](message)
        except Exception as error:
            return self._ended(self.faults.note(error))

    def _ended(self, code: str) -> Message:
        """A code, written down as all that leaves; a record that cannot be written lets it pass."""
        answer = packed({}, {**said_of(code)})
        agreed = self.agreement
        said = ended(
            code, answer, site=self.site.name, experiment=agreed.experiment, run=agreed.run
        )
        with suppress(FedplanError):
            self.egress.note(said, self.warrant)
        return answer

    def _hello(self, message: Message) -> Message:
        said: dict[str, JSON] = {
            "client": self.site.name,
            "agreed": self.agreement.fingerprint,
            "start": self.agreement.start,
            "run": self.agreement.run,
            "traits": dict(self.site.traits),
            "record": self.egress.head.sha256,
            "versions": dict(own_versions()),
        }
        if self.agreement.run and (run := run_of(message)) != self.agreement.run:
            raise Refused(
                f"{self.site.name} is in run {self.agreement.run}, and not in {run}"
            ).coded("another-study")
        if self.agreement.masking.active:
            said["node"] = self._masker.public.hex()
        return self._leave(Message(packed({}, said).header), HELLO, None, {})

    def _poll(self, message: Message) -> Message:
        request, before = request_of(message), self.site.held
        scores = poll(self.agreement, self.site, request)
        self._remember(before)
        if self.agreement.masking.active:
            advert = self._masker.poll(request, scores)
            return self._leave(packed({}, {"advert": advert}), KEYS, request, {})
        answer = packed({}, {"scores": listed(scores)})
        return self._leave(answer, SCORES, request, {})

    def _train(self, message: Message) -> Message:
        request, before = request_of(message), self.site.held
        update = local(self.agreement, self.site, request, lent=True)
        self._remember(before)
        if self.agreement.masking.active:
            advert = self._masker.begin(request, update)
            alone = replace(update, values={}, riders={}, weight=1)
            return self._leave(update_message(alone, advert), KEYS, request, {})
        return self._leave(update_message(update), UPDATE, request, self._parts(update))

    @property
    def _masker(self) -> Masker:
        if self.masker is None:
            raise Refused(
                f"{self.site.name} takes part in no masked sum: its site.toml names no peers"
            ).coded("peers")
        return self.masker

    def _masking(self, step: str, message: Message) -> Message:
        """A step of a masked sum. Words are what was trained; all else is keys and shares."""
        masker = self._masker
        if run_of(message) != self.agreement.run:
            raise Refused(f"{self.site.name} is in another run").coded("another-study")
        polled, found = masker.is_poll(message), dict[str, int]()
        answer = masker.step(step, message)
        for param in masker.shared if step == WORDS and not polled else ():
            kind = self._kinds[param.key]
            found[kind] = found.get(kind, 0) + self.agreement.up(param)
        what = SCORES if step == WORDS and polled else LEFT[step]
        return self._leave(answer, what, None, found, masker.begun(polled=polled))

    def _evaluate(self, message: Message) -> Message:
        request, before = request_of(message), self.site.held
        scores = evaluate(self.agreement, self.site, request)
        self._remember(before)
        answer = packed({}, {"scores": scores_said(scores)})
        return self._leave(answer, EVALUATION, request, {})

    def _parts(self, update: Update) -> dict[str, int]:
        found = dict[str, int]()
        for key, value in {**update.values, **update.riders}.items():
            kind = self._kinds[param_of(key)]
            found[kind] = found.get(kind, 0) + nbytes({key: value})
        return found

    def _leave(
        self,
        answer: Message,
        what: str,
        request: Request | None,
        parts: Mapping[str, int],
        masked: tuple[int, tuple[str, ...]] | None = None,
    ) -> Message:
        """Write down what is about to leave, and let it; of a masked sum, with whom."""
        up = sum(parts.values())
        said = Leaving(
            what,
            self.site.name,
            self.agreement.experiment,
            self.agreement.run,
            content=content_mark(answer, self.site.key if what in GUESSED else b""),
            up=up,
            said=answer.nbytes - up,
            parts=dict(parts),
        )
        if request is not None:
            turn, down = request.turn, request.nbytes
            said = replace(
                said, request=request.name, round=turn.round, phase=turn.phase, down=down
            )
        if masked is not None:
            number, among = masked
            name = self.agreement.request(number, self.site.name)
            said = replace(said, request=name, round=number, among=among)
        self.egress.note(said, self.warrant)
        return answer

    def _recall(self) -> None:
        """Take up what was last seen; if it is damaged it is lost, and the server sends it anew."""
        if max(self.seen.numbers(), default=0) == self._number:
            return
        try:
            found = self.seen.read()
        except StoreError:
            self.site.journal.home()  # with another key than its own nothing is thrown away
            shutil.rmtree(self.folder / "seen")
            self.seen, found = self._store(), None
        self._number = found.number if found else 0
        self.site.seen = found.tensors if found else {}
        self.site.held = dict(found.meta["held"]) if found else {}

    def _store(self) -> Store:
        return Store(self.folder / "seen", keep=1, seal=self.site.journal.seal)

    def _remember(self, before: Mapping[str, int]) -> None:
        """Write down what was seen, before the server is told that it was."""
        if self.site.held != before:
            self._number = max(self.seen.numbers(), default=0) + 1
            self.seen.write(self.site.seen, {"held": self.site.held}, number=self._number)

    def _agreed(self) -> dict[str, Any]:
        method, account = self.agreement.method, self.site.account
        return {
            "site": self.site.name,
            "experiment": self.agreement.experiment,
            "plan": method.plan.text,
            "model": self.agreement.start,
            "fingerprint": self.agreement.fingerprint,
            "wire": method.wire.text,
            "traits": self.site.traits,
            "limits": asdict(account.limits) if account else {},
            "account": str(account.folder.absolute()) if account else "",
            "run": self.agreement.run,
            "prefix": self.agreement.prefix,
            **({"peers": self.masker.peers} if self.masker is not None else {}),
        }


def place_of(folder: Path, run: str) -> Path:
    """Where a site keeps what it has of one run, under its folder for the study."""
    return folder / run if run else folder


def last_of(folder: Path) -> Path:
    """Where a site keeps its only run of a study, or the run that this folder is of."""
    runs = [each for each in sorted(folder.iterdir()) if is_id(each.name)]
    if len(runs) > 1:
        names = ", ".join(str(each) for each in runs)
        raise FedplanError(f"{folder} holds {len(runs)} runs: name one of {names}")
    return runs[0] if runs else folder


def journal_in(folder: Path, seal: Encryption | None = None, *, reading: bool = False) -> Journal:
    """The journal of a site's folder."""
    return Journal(folder / "home", replies=True, seal=seal, reading=reading)


def own_values(agreement: Agreement, folder: Path, key: Path | None = None) -> dict[str, Tensor]:
    """A site's own model: what was its own in its last turn, over what it last saw of the world."""
    seal = Encryption.from_file(key) if key is not None else None
    home, notes = journal_in(folder, seal, reading=True).home()
    if not notes:
        raise StoreError(f"{folder / 'home'} holds no turn of this run: put a copy of it back")
    seen = Store(folder / "seen", keep=1, seal=seal, reading=True).read()
    letters = notes["lines"][-1]["roles"]
    own = {p.key for p, letter in zip(agreement.params, letters, strict=False) if ROLES[letter].own}
    found = (seen.tensors if seen else {}) | {k: v for k, v in home.items() if k in own}
    keys = {p.key for p in agreement.trainable}
    return {k: v for k, v in found.items() if k in keys}
