# SPDX-License-Identifier: Apache-2.0
"""Maskers: a site's side of the masked sums of a run: its own terms, its numbers, its letters.

Nothing of an update is in a letter but under masks. It stays in the site's journal: so whoever was
killed between two letters has it again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from fedplan.federation import masking
from fedplan.federation.aggregation import PlainSum
from fedplan.federation.agreement import Agreement
from fedplan.federation.client import (
    Client,
    own_turn,
    require_base,
    world_held,
    world_marks,
)
from fedplan.federation.masked import (
    POLLED,
    VALUE,
    numbers_in,
    poll_terms,
    scores_in_steps,
    sent_slots,
    terms_of,
)
from fedplan.federation.masked_letters import (
    advert_said,
    adverts_of,
    boxes_said,
    consent_said,
    consents_of,
    delivery_of,
    letter_in,
    letter_message,
    survivors_of,
    terms_in,
    unmasking_said,
    words_message,
)
from fedplan.federation.messages import Refused, Request, Update, asked_of
from fedplan.federation.noised import change_of, mechanism_of, noised_numbers
from fedplan.federation.turns import ASKED, BASE, OWN
from fedplan.models.params import Block, Params
from fedplan.privacy.guard import ShareGuard
from fedplan.privacy.masking.ciphers import NodeKey, digest_of
from fedplan.privacy.masking.diary import Diary, RoundNotes
from fedplan.privacy.masking.letters import Adverts
from fedplan.privacy.masking.openings import Openings
from fedplan.privacy.masking.site import Directory, MaskingSite
from fedplan.privacy.masking.terms import Terms
from fedplan.privacy.mechanisms.gaussian import Change
from fedplan.storage.store import Store
from fedplan.tensors.message import Message
from fedplan.tensors.modular import Words, wide_of
from fedplan.tensors.riders import param_of
from fedplan.tensors.serialization import JSON

DIARY, POLLS, BALLOT, OPENED = "masks", "poll-masks", "ballot", "openings.jsonl"
"""Beside a site's journal: what it has said in masked rounds and in polls, and its last scores; and
beside its account, if it has one, for it is of all runs, what it has helped to open."""


class Masker:
    """A site in the masked sums of a run.

    `directory` has the node keys of all sites, from hand to hand; `cohort` says whom the study asks
    in a round: the threshold follows from it, and from no word of the server.
    """

    def __init__(
        self,
        agreement: Agreement,
        client: Client,
        node: NodeKey,
        directory: Directory,
        folder: Path,
        *,
        cohort: Callable[[int], Sequence[str]],
    ) -> None:
        self.agreement, self.client, self._directory = agreement, client, dict(directory)
        self.threshold = agreement.masking.least(len(cohort(1)))
        if agreement.in_shares and client.shares is None:
            raise Refused(
                f"{client.name} has nothing that adds its share of the noise: give it an account"
            ).coded("masked")
        seal = client.journal.seal
        self._diary, self._polls = (Diary(folder / each, seal=seal) for each in (DIARY, POLLS))
        account, self._cohort = client.account, cohort
        opened = Openings((account.folder if account is not None else folder) / OPENED)
        self.site = MaskingSite(client.name, node, directory, self._diary, opened)
        self._poll = MaskingSite(client.name, node, directory, self._polls, opened)
        self._ballot = Store(folder / BALLOT, keep=1, seal=seal)

    def begin(self, request: Request, update: Update) -> dict[str, JSON]:
        """The site's keys of a round, once it has an update; the terms are its own.

        They are held against what the update was made of, and not against what came since.
        """
        _, line = self._answered(request.turn.round)
        require_base(self.client, request, line[BASE])
        if line[ASKED] != asked_of(request.turn):
            raise Refused(
                f"{self.client.name} has trained in another phase, or by other scores, than it is "
                f"told now in round {request.turn.round}"
            ).coded("values")
        self._require_charged()
        shared = {param_of(name) for name in update.values}
        if self.agreement.in_shares:
            shared = {p.key for p in self.agreement.public(request.turn)}
        keys = [p.key for p in self.agreement.movable if p.key in shared]
        terms = self._terms(terms_of, request)
        slots = sent_slots(self.agreement, keys)
        return advert_said(self.site.advertise(terms, slots, _ground("round", line[BASE])), terms)

    def _require_charged(self) -> None:
        """Refuse to go on if words have left whose charge is gone: a file was lost or put back."""
        last, shares = self._diary.read(), self.client.shares
        if shares is not None and last is not None and last.masked:
            shares.require_charged(self.agreement.request(last.terms.round, self.client.name))

    def poll(self, request: Request, scores: Mapping[Block, float]) -> dict[str, JSON]:
        """The site's keys of a poll: what it would choose is noted, and goes under masks."""
        home, _ = self.client.journal.home(request.name)
        turn = own_turn(self.client, request)
        marks = world_marks(self.agreement, self.client, turn, home)
        require_base(self.client, request, marks)
        terms, number = self._terms(poll_terms, request), request.turn.round
        steps = scores_in_steps(scores)
        told = [str(steps.get(block, 0)) for block in self.agreement.blocks]
        self._ballot.write({}, {"round": number, "scores": told}, number=number)
        advert = self._poll.advertise(terms, [POLLED], _ground("poll", marks))
        return advert_said(advert, terms)

    def _terms(self, made: Callable[..., Terms], request: Request) -> Terms:
        number, asked = request.turn.round, asked_of(request.turn)
        said = self.agreement, number, self.threshold, request.base
        return made(*said, asked=asked, attempt=request.attempt)

    def step(self, step: str, message: Message) -> Message:
        """The answer to one of the letters that follow: of a round, or of the poll before it."""
        polled, run = self.is_poll(message), self.agreement.run
        site, notes = (self._poll, self._polls) if polled else (self.site, self._diary)
        match step:
            case masking.SHARE:
                terms = _begun(self.client.name, notes).terms
                roster = letter_in(message, lambda said: adverts_of(said, terms))
                self._require_cohort(roster, terms.round)
                return letter_message(run, boxes_said(site.share(roster)))
            case masking.WORDS:
                delivery = letter_in(message, delivery_of)
                numbers = self._scores() if polled else self._numbers()
                return words_message(run, site.mask(delivery, *numbers))
            case masking.CONSENT:
                survivors = letter_in(message, survivors_of)
                return letter_message(run, consent_said(site.consent(survivors)))
            case _:
                consents = letter_in(message, consents_of)
                return letter_message(run, unmasking_said(site.answer(consents)))

    def is_poll(self, message: Message) -> bool:
        """Whether a letter is of the poll that was last begun."""
        polled = self._polls.read()
        return polled is not None and terms_in(message) == polled.terms.digest

    @property
    def public(self) -> bytes:
        """The key by which the others know this site."""
        return self._directory[self.client.name]

    @property
    def peers(self) -> dict[str, str]:
        """Those whom it knows, each by the digest of its key."""
        known = sorted(self._directory.items())
        return {name: hashlib.sha256(key).hexdigest() for name, key in known}

    @property
    def round(self) -> int:
        """The round that it last began."""
        return self._notes.terms.round

    def begun(self, *, polled: bool) -> tuple[int, tuple[str, ...]]:
        """A round, or the poll before it, and whose sum it is, as far as it was told."""
        notes = _begun(self.client.name, self._polls if polled else self._diary)
        present = (*notes.boxes, self.client.name) if notes.boxes else ()
        there = tuple(sorted(present or {each.site for each in notes.adverts}))
        return notes.terms.round, notes.survivors or there

    @property
    def shared(self) -> Params:
        """What it sends in that round."""
        sent = set(self._notes.slots)
        return tuple(p for p in self.agreement.movable if VALUE + p.key in sent)

    @property
    def _notes(self) -> RoundNotes:
        return _begun(self.client.name, self._diary)

    def _scores(self) -> tuple[dict[str, Words], int]:
        """What the site would choose, as the numbers that it masks; all weigh the same."""
        found, number = self._ballot.read(), _begun(self.client.name, self._polls).terms.round
        if found is None or found.meta["round"] != number:
            raise Refused(f"{self.client.name} has no scores of round {number}").coded("masked")
        return {POLLED: wide_of(int(each) for each in found.meta["scores"])}, 1

    def _require_cohort(self, roster: Adverts, number: int) -> None:
        """Refuse those whom the study does not ask: other halves could open a round again."""
        asked = set(self._cohort(number))
        if strange := sorted(each.site for each in roster.adverts if each.site not in asked):
            raise Refused(
                f"{strange[0]!r} is in the roster, and is not asked in round {number}"
            ).coded("masked")

    def _answered(self, number: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The site's update of a round, from its journal, and what it was made of."""
        client = self.client
        found = client.journal.answered(self.agreement.request(number, client.name))
        if found is None:
            raise Refused(f"{client.name} has no update of round {number} any more").coded("masked")
        return found

    def _numbers(self) -> tuple[dict[str, Words], int]:
        """The site's own plain sum of a round as the numbers that it masks, and its weight."""
        agreement, client, number = self.agreement, self.client, self.round
        coded, line = self._answered(number)
        base = world_held(client, {param_of(name) for name in coded})
        for key, value in base.items():
            if client.digests.whole(value) != line[BASE][key]:
                raise Refused(
                    f"{client.name} has another {key} than its update of round {number} is of"
                ).coded("masked")
        decoded = agreement.method.wire.decode(coded, base)
        if client.shares is not None:
            return self._noised(client.shares, change_of(decoded, base)), 1
        own = PlainSum(agreement, base, 1)
        own.require(decoded, {}, line[OWN])
        own.add(client.name, decoded, {}, line[OWN])
        return numbers_in(own, base, wide=agreement.masking.wide), line[OWN]

    def _noised(self, shares: ShareGuard, change: Change) -> dict[str, Words]:
        """The site's clipped change with its share of noise, on all that it declared; charged."""
        agreement, client, terms = self.agreement, self.client, self._notes.terms
        held = world_held(client, [p.key for p in self.shared])
        made = mechanism_of(shares, agreement, held, len(self._cohort(terms.round)))
        about = agreement.request(terms.round, client.name)
        own = shares.share(made, change, terms.round, about, terms.digest)
        return noised_numbers(own, wide=agreement.masking.wide)


def _ground(kind: str, marks: Mapping[str, str]) -> str:
    """One digest of all that a site's answer of a kind is made of."""
    words = (word for key in sorted(marks) for word in (key, marks[key]))
    return digest_of("ground", kind, *words).hex()


def _begun(site: str, diary: Diary) -> RoundNotes:
    found = diary.read()
    if found is None:
        raise Refused(f"{site} has begun no masked sum").coded("masked")
    return found
