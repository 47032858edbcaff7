# SPDX-License-Identifier: Apache-2.0
"""Masking sites: a site's side of a masked round, which believes nothing that is not signed.

Each step is noted before it is said. A step may be asked for again, and is then answered alike; to
ask for something else under the same step is refused.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace

from fedplan.privacy.masking.ciphers import (
    KEY,
    MaskingError,
    NodeKey,
    is_signed,
    node_public,
    signed,
)
from fedplan.privacy.masking.diary import Notebook, RoundNotes
from fedplan.privacy.masking.letters import (
    Advert,
    Adverts,
    Boxes,
    Consent,
    Consents,
    Delivery,
    MaskedWords,
    Survivors,
    Unmasking,
)
from fedplan.privacy.masking.openings import Openings
from fedplan.privacy.masking.standing import Standing
from fedplan.privacy.masking.terms import HEAVIEST, Terms
from fedplan.tensors.modular import Words

Directory = Mapping[str, bytes]
"""The public node key of every site, from hand to hand: never by the server's word alone."""


class MaskingSite:
    """One site of a masked sum: it knows the others by their node keys, in its own directory."""

    def __init__(
        self,
        name: str,
        node: NodeKey,
        directory: Directory,
        notebook: Notebook,
        openings: Openings | None = None,
    ) -> None:
        if directory.get(name) != node_public(node):
            raise MaskingError(f"the directory of {name} has another key of it than its node's")
        if len(set(directory.values())) < len(directory):
            raise MaskingError("two sites of the directory have one key: they could be one site")
        self.name, self._node, self._directory = name, node, dict(directory)
        self._notebook, self._openings = notebook, openings

    def advertise(self, terms: Terms, slots: Sequence[str], ground: str = "") -> Advert:
        """Begin a round: the keys of this site, and the slots that it will send.

        The terms are the site's own, made of what it was sent: the server says none of them. The
        `ground` is a digest of all that its own numbers are made of, by which openings go.
        """
        sent = tuple(slot.name for slot in terms.slots if slot.name in set(slots))
        if strange := set(slots) - set(sent):
            raise MaskingError(f"{min(strange)!r} is no slot of this round")
        found = self._notebook.read()
        if found is None or found.terms != terms:
            _require_new(terms, found)
            found = RoundNotes(terms, os.urandom(KEY), sent, ground)
            self._notebook.write(found)
        elif found.slots != sent:
            raise MaskingError(f"round {terms.round} was begun to send other slots")
        return self._advert(found)

    def share(self, said: Adverts) -> Boxes:
        """Cut this site's secrets into shares for all in the roster, if it is sound."""
        notes = self._notes(said.terms)
        if notes.adverts:
            # By what was signed: who signs again may write another signature.
            _require_same("the roster", said.digest, Standing(self.name, notes).roster, notes)
        else:
            self._require_roster(notes, said.adverts)
            notes = replace(notes, adverts=said.adverts)
            self._notebook.write(notes)
        return Boxes(said.terms, self.name, Standing(self.name, notes).boxes)

    def mask(self, said: Delivery, numbers: Mapping[str, Words], weight: int) -> MaskedWords:
        """This site's numbers under masks: of each part that enough of those present send."""
        notes = self._notes(said.terms)
        _require_step(notes.adverts, "boxes came before there was a roster")
        if notes.boxes:
            _require_same("what was delivered", dict(said.boxes), dict(notes.boxes), notes)
        notes = replace(notes, boxes=dict(said.boxes))
        standing = Standing(self.name, notes)
        _require_boxes(standing)
        _require_numbers(notes, numbers, weight)
        parts = standing.masked(numbers, weight)
        found = _digest(parts)
        if notes.masked not in ("", found):
            raise MaskingError(
                f"round {notes.terms.round} was masked with other numbers: the same masks on both "
                "would tell how they differ; begin another attempt"
            )
        if not notes.masked:
            self._notebook.write(replace(notes, masked=found))
        return MaskedWords(said.terms, self.name, parts)

    def consent(self, said: Survivors) -> Consent:
        """Sign who is still there: one list for each attempt, and this site is in it."""
        notes = self._notes(said.terms)
        _require_step(notes.masked, "survivors were named before anything was masked")
        if notes.survivors:
            _require_same("the list of survivors", said.sites, notes.survivors, notes)
        else:
            standing = Standing(self.name, notes)
            _require_survivors(standing, said.sites)
            if self._openings is not None:
                self._openings.require(notes.terms, notes.ground, standing.sums(said.sites))
            notes = replace(notes, survivors=said.sites)
            self._notebook.write(notes)
        body = Standing(self.name, notes).consent
        return Consent(said.terms, self.name, signed(self._node, body))

    def answer(self, said: Consents) -> Unmasking:
        """What opens the sum of the survivors, if enough of them have signed the same list."""
        notes = self._notes(said.terms)
        _require_step(notes.survivors, "the sum was to be opened before survivors were named")
        standing = Standing(self.name, notes)
        self._require_consents(standing, said.consents)
        if not notes.answered:
            if self._openings is not None:
                sums = standing.sums(notes.survivors)
                self._openings.note(notes.terms, notes.ground, sums)
            notes = replace(notes, answered=True)
            self._notebook.write(notes)
        return Standing(self.name, notes).unmasking()

    def _advert(self, notes: RoundNotes) -> Advert:
        made = Standing(self.name, notes).secrets.advert(self.name, notes.slots)
        return replace(made, signature=signed(self._node, made.body))

    def _notes(self, terms: bytes) -> RoundNotes:
        found = self._notebook.read()
        if found is None or found.terms.digest != terms:
            begun = f"it has begun round {found.terms.round}" if found else "it has begun no round"
            raise MaskingError(f"{self.name} is asked about a round of other terms: {begun}")
        return found

    def _require_roster(self, notes: RoundNotes, adverts: Sequence[Advert]) -> None:
        """Refuse a roster in which anything is not as each of its sites has signed it."""
        names = [each.site for each in adverts]
        if names != sorted(set(names)):
            raise MaskingError("the roster names a site twice, or is in no order")
        notes.terms.require_crowd(len(names))
        keys = [key for each in adverts for key in (each.boxing, each.masking)]
        if len(set(keys)) < len(keys):
            raise MaskingError("two sites of the roster have one key")
        own = Standing(self.name, notes).secrets.advert(self.name, notes.slots)
        if not any(each.body == own.body for each in adverts):
            raise MaskingError(f"the roster has other keys of {self.name} than its own, or none")
        for each in adverts:
            require_advert(notes.terms, each, self._directory)

    def _require_consents(self, standing: Standing, consents: Sequence[Consent]) -> None:
        survivors, agreed = standing.notes.survivors, set[str]()
        for each in consents:
            if each.site not in survivors:
                raise MaskingError(f"{each.site!r} consents, and is not among the survivors")
            if not is_signed(self._directory[each.site], standing.consent, each.signature):
                raise MaskingError(f"{each.site} has not signed these survivors")
            agreed.add(each.site)
        if len(agreed) < standing.terms.threshold:
            raise MaskingError(
                f"{len(agreed)} sites have signed the survivors, and the threshold is "
                f"{standing.terms.threshold}: nothing is opened"
            )


def require_advert(terms: Terms, advert: Advert, directory: Directory) -> None:
    """Refuse an advert that is not of these terms, or not of the site that it names."""
    site = advert.site
    if site not in directory:
        raise MaskingError(f"{site!r} is not in the directory")
    if advert.terms != terms.digest:
        raise MaskingError(
            f"the keys of {site} are of other terms: of another round or attempt, of another "
            "agreement, or it was sent another model"
        )
    if not is_signed(directory[site], advert.body, advert.signature):
        raise MaskingError(f"the keys of {site} are not signed by its node key")
    if set(advert.slots) - {slot.name for slot in terms.slots}:
        raise MaskingError(f"{site} declares slots that this round does not have")


def _require_boxes(standing: Standing) -> None:
    """Refuse a delivery by too few, or of what does not open."""
    boxes = standing.notes.boxes
    if strange := set(boxes) - (standing.adverts.keys() - {standing.name}):
        raise MaskingError(f"a box is of {min(strange)!r}, which is no other site of the roster")
    standing.terms.require_crowd(len(boxes) + 1)
    for site in boxes:
        standing.shares(site)


def _require_numbers(notes: RoundNotes, numbers: Mapping[str, Words], weight: int) -> None:
    if set(numbers) != set(notes.slots):
        raise MaskingError(
            f"numbers of {len(numbers)} slots were given, and {len(notes.slots)} were declared: "
            "give those"
        )
    if not 0 < weight <= HEAVIEST:
        raise MaskingError(f"the weight is {weight}: give a whole number from 1 to 2**27")


def _require_survivors(standing: Standing, sites: Sequence[str]) -> None:
    """Refuse a list of survivors that is wrong, or under which nothing could be opened."""
    if list(sites) != sorted(set(sites)):
        raise MaskingError("the list of survivors names a site twice, or is in no order")
    if strange := set(sites) - set(standing.present):
        raise MaskingError(f"{min(strange)!r} cannot have survived: it was not present")
    if standing.name not in sites:
        raise MaskingError(
            f"{standing.name} is said to be gone, and has sent its words: who is said to be both "
            "would be laid open"
        )
    if len(sites) < standing.terms.threshold:
        raise MaskingError(
            f"{len(sites)} sites have survived, and the threshold is {standing.terms.threshold}: "
            "nothing is opened"
        )
    if not standing.reaching(sites):
        raise MaskingError(f"no part has {standing.terms.floor} senders left: nothing is opened")


def _require_new(terms: Terms, found: RoundNotes | None) -> None:
    """Refuse to begin what was over, or was opened, or is not later than what was begun."""
    if found is None:
        return
    held = found.terms
    if terms.run != held.run:
        raise MaskingError(f"this diary is of run {held.run!r}: keep one for each run")
    if terms.round < held.round:
        raise MaskingError(f"round {terms.round} is over: this site has begun round {held.round}")
    if terms.round > held.round:
        return
    if found.answered:
        raise MaskingError(
            f"round {terms.round} was opened in attempt {held.attempt}: a site opens a round once"
        )
    if terms.attempt <= held.attempt:
        raise MaskingError(
            f"round {terms.round} was begun under other terms, as attempt {held.attempt}: another "
            "attempt has a higher number"
        )


def _require_step(done: object, reason: str) -> None:
    if not done:
        raise MaskingError(reason)


def _require_same(what: str, said: object, held: object, notes: RoundNotes) -> None:
    if said != held:
        raise MaskingError(
            f"{what} is another than this site was told before in round {notes.terms.round}"
        )


def _digest(parts: Mapping[str, bytes]) -> str:
    found = hashlib.sha256()
    for name, content in parts.items():
        found.update(name.encode())
        found.update(content)
    return found.hexdigest()
