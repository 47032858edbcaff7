# SPDX-License-Identifier: Apache-2.0
"""Masking servers: the server's side of a masked round: it carries letters, adds words, opens once.

Each message step is closed by asking for what goes down next: who has not answered by then is gone.
Its memory is one sum, however many sites there are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from fedplan.privacy.masking.ciphers import KEY, MaskingError, is_signed, public_of
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
    consented,
)
from fedplan.privacy.masking.masks import PartWords, context_of, pair_keys, put_pair, self_key
from fedplan.privacy.masking.shares import PRIME, pulls
from fedplan.privacy.masking.site import Directory, require_advert
from fedplan.privacy.masking.terms import HEADER, HEAVIEST, MaskedPart, Terms, parts_of
from fedplan.tensors.modular import Words

ADVERTS, BOXES, WORDS = "adverts", "boxes", "words"
"""Steps that close: whoever comes later is not among those who go on."""


@dataclass(frozen=True)
class Opened:
    """The sums of a round: of each slot its numbers, who sent it, and what they weigh together.

    `closed` are slots that nobody may see, with the reason.
    """

    numbers: dict[str, Words]
    senders: dict[str, tuple[str, ...]]
    weights: dict[str, int]
    closed: dict[str, str] = field(default_factory=dict[str, str])


class MaskingServer:
    """The open sum of one masked round."""

    def __init__(self, terms: Terms, directory: Directory) -> None:
        self.terms, self._directory = terms, directory
        self._closed = set[str]()
        self._adverts = dict[str, Advert]()
        self._boxes = dict[str, Mapping[str, bytes]]()
        self._sent = set[str]()
        self._sums = dict[str, PartWords]()
        self._consents = dict[str, Consent]()
        self._answers = dict[str, Unmasking]()

    def advertised(self, advert: Advert) -> None:
        """Take the keys of a site."""
        self._require_open(ADVERTS, advert.site)
        require_advert(self.terms, advert, self._directory)
        self._adverts[advert.site] = advert

    def adverts(self) -> Adverts:
        """The roster: who comes later is not in this round."""
        return self._roster

    def shared(self, boxes: Boxes) -> None:
        """Take the boxes of a site."""
        self._require_among(boxes.site, self._roster_names, boxes.terms)
        self._require_open(BOXES, boxes.site)
        if set(boxes.boxes) != set(self._roster_names) - {boxes.site}:
            raise MaskingError(f"{boxes.site} has not closed a box for each other site")
        self._boxes[boxes.site] = dict(boxes.boxes)

    def present(self) -> tuple[str, ...]:
        """Those whose boxes have come: who comes later is not in this round."""
        return self._present

    def delivery(self, site: str) -> Delivery:
        """The boxes for one site, by all who are present."""
        self._require_among(site, self._present, self.terms.digest)
        others = {s: self._boxes[s][site] for s in self._present if s != site}
        return Delivery(self.terms.digest, others)

    def add(self, masked: MaskedWords) -> None:
        """Add the masked words of a site: all of them, or none and an error."""
        site = masked.site
        self._require_among(site, self._present, masked.terms)
        self._require_open(WORDS, site)
        if site in self._sent:
            raise MaskingError(f"{site} was added before")
        wanted = {p.name: p for p in self._reaching(self._present) if site in p.sites}
        if set(masked.parts) != set(wanted):
            raise MaskingError(f"{site} sends other parts than it declared")
        read = {name: PartWords.read(wanted[name], each) for name, each in masked.parts.items()}
        for name, words in read.items():
            self._sums.setdefault(name, PartWords.empty(wanted[name])).add(words)
        self._sent.add(site)

    def survivors(self) -> Survivors:
        """Those who were added: who comes later is not in the sum."""
        return Survivors(self.terms.digest, self._survivors)

    def consented(self, consent: Consent) -> None:
        """Take a site's signature under the survivors."""
        self._require_among(consent.site, self._survivors, consent.terms)
        body = consented(self._context, self._survivors)
        if not is_signed(self._directory[consent.site], body, consent.signature):
            raise MaskingError(f"{consent.site} has signed other survivors")
        self._consents[consent.site] = consent

    def consents(self) -> Consents:
        """The signatures, if there are enough."""
        self._require_enough(len(self._consents), "have signed the survivors")
        return Consents(self.terms.digest, tuple(c for _, c in sorted(self._consents.items())))

    def answered(self, unmasking: Unmasking) -> None:
        """Take what a site gives to open the sum."""
        self._require_among(unmasking.site, self._survivors, unmasking.terms)
        self._answers[unmasking.site] = unmasking

    def open(self) -> Opened:
        """Take all masks off the sums of those parts that have enough senders left."""
        self._require_enough(len(self._answers), "have given what opens the sum")
        held = dict(sorted(self._answers.items())[: self.terms.threshold])
        opened, closed = self._reaching(self._survivors), dict[str, str]()
        for part in self._parts:
            if part not in opened:
                left = len(part.among(self._survivors))
                reason = f"{left} of {self.terms.floor} senders are left"
                closed |= {slot.name: reason for slot in part.slots}
        self._take_selves(opened, held)
        self._take_pairs(opened, held)
        found = Opened({}, {}, {}, closed)
        for part in opened:
            self._note(found, part)
        return found

    def _note(self, found: Opened, part: MaskedPart) -> None:
        """What a part has come to, if its header says that all masks are off."""
        words, senders = self._sums[part.name], part.among(self._survivors)
        count, weight = (int(each) for each in words.narrow[:HEADER])
        if count != len(senders) or not count <= weight <= count * HEAVIEST:
            raise MaskingError(
                f"part {part.name} does not open: one of {', '.join(part.sites)} has masked "
                "otherwise, or has given wrong shares; the round is given up"
            )
        for name, numbers in words.numbers(part).items():
            found.numbers[name], found.senders[name] = numbers, senders
            found.weights[name] = weight

    def _take_selves(self, parts: Sequence[MaskedPart], held: Mapping[str, Unmasking]) -> None:
        weights = self._pulls(held)
        for part in parts:
            for site in part.among(self._survivors):
                shares = [
                    _number(_of(each.masks.get(part.name, {}), site, by))
                    for by, each in held.items()
                ]
                seed = _secret(weights, shares, site)
                key = self_key(seed, self._context, part.name, site)
                self._sums[part.name].take_off(key)

    def _take_pairs(self, parts: Sequence[MaskedPart], held: Mapping[str, Unmasking]) -> None:
        """Take off what survivors had put on for each that is gone."""
        weights = self._pulls(held)
        for site in (each for each in self._present if each not in self._survivors):
            torn = [part for part in parts if site in part.sites]
            if not torn:
                continue
            shares = [_number(_of(each.keys, site, by)) for by, each in held.items()]
            secret = _secret(weights, shares, site)
            if public_of(secret) != self._adverts[site].masking:
                raise MaskingError(f"the shares of the key of {site} do not fit it")
            for other in self._survivors:
                common = {part.name for part in torn if other in part.sites}
                self._take_pair(site, secret, other, sorted(common))

    def _take_pair(self, gone: str, secret: bytes, other: str, parts: Sequence[str]) -> None:
        if parts:
            known = (other, self._adverts[other].masking)
            for name, key in pair_keys(secret, self._context, gone, known, parts).items():
                # The side of the one who is gone, so that both together are nothing.
                put_pair(self._sums[name], key, first=gone < other)

    def _pulls(self, held: Mapping[str, Unmasking]) -> list[int]:
        names = self._roster_names
        return pulls([names.index(site) + 1 for site in held])

    @cached_property
    def _roster(self) -> Adverts:
        self.terms.require_crowd(len(self._adverts))
        self._closed.add(ADVERTS)
        return Adverts(self.terms.digest, tuple(a for _, a in sorted(self._adverts.items())))

    @cached_property
    def _roster_names(self) -> list[str]:
        return [each.site for each in self._roster.adverts]

    @cached_property
    def _parts(self) -> tuple[MaskedPart, ...]:
        return parts_of(self.terms, {each.site: each.slots for each in self._roster.adverts})

    @cached_property
    def _present(self) -> tuple[str, ...]:
        self._require_enough(len(self._boxes), "have sent boxes")
        self._closed.add(BOXES)
        return tuple(sorted(self._boxes))

    @cached_property
    def _context(self) -> bytes:
        return context_of(self.terms.digest, self._roster.digest, self._present)

    @cached_property
    def _survivors(self) -> tuple[str, ...]:
        self._require_enough(len(self._sent), "have sent their words")
        self._closed.add(WORDS)
        return tuple(sorted(self._sent))

    def _reaching(self, sites: Sequence[str]) -> list[MaskedPart]:
        return [part for part in self._parts if len(part.among(sites)) >= self.terms.floor]

    def _require_enough(self, sites: int, did: str) -> None:
        if sites < self.terms.threshold:
            raise MaskingError(
                f"{sites} sites {did}, and the threshold is {self.terms.threshold}: the attempt is "
                "given up"
            )

    def _require_among(self, site: str, sites: Sequence[str], terms: bytes) -> None:
        if site not in sites or terms != self.terms.digest:
            raise MaskingError(f"{site!r} is not, or no longer, in this round")

    def _require_open(self, step: str, site: str) -> None:
        if step in self._closed:
            raise MaskingError(f"{site!r} comes too late: the others have gone on")


def _of(shares: Mapping[str, bytes], site: str, by: str) -> bytes:
    if site not in shares:
        raise MaskingError(f"{by} has given no share of {site}")
    return shares[site]


def _number(share: bytes) -> int:
    return int.from_bytes(share)


def _secret(weights: Sequence[int], shares: Sequence[int], site: str) -> bytes:
    found = sum(w * each for w, each in zip(weights, shares, strict=True)) % PRIME
    if found >> (8 * KEY):
        raise MaskingError(f"the shares of {site} do not fit each other")
    return found.to_bytes(KEY)
