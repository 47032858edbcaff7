# SPDX-License-Identifier: Apache-2.0
"""Standing: all that follows from a site's notes of a round, worked out once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from fedplan.privacy.masking.diary import RoundNotes
from fedplan.privacy.masking.holding import RoundSecrets
from fedplan.privacy.masking.letters import Advert, Adverts, Unmasking, consented
from fedplan.privacy.masking.masks import PartWords, context_of, pair_keys, put_pair, self_key
from fedplan.privacy.masking.terms import MaskedPart, Terms, parts_of
from fedplan.tensors.modular import Words


@dataclass(frozen=True)
class Standing:
    """A site in a round, as far as its notes go."""

    name: str
    notes: RoundNotes

    @property
    def terms(self) -> Terms:
        """What all have agreed on."""
        return self.notes.terms

    @cached_property
    def secrets(self) -> RoundSecrets:
        """What the site draws in the round."""
        return RoundSecrets(self.notes.secret, self.terms.digest)

    @cached_property
    def adverts(self) -> dict[str, Advert]:
        """The roster, by name."""
        return {each.site: each for each in self.notes.adverts}

    @cached_property
    def roster(self) -> bytes:
        """The digest of the roster."""
        return Adverts(self.terms.digest, self.notes.adverts).digest

    @cached_property
    def parts(self) -> tuple[MaskedPart, ...]:
        """What is masked together, and by whom."""
        return parts_of(self.terms, {each.site: each.slots for each in self.notes.adverts})

    @cached_property
    def present(self) -> tuple[str, ...]:
        """Those who have sent their boxes, and the site itself."""
        return tuple(sorted((*self.notes.boxes, self.name)))

    @cached_property
    def context(self) -> bytes:
        """What all masks of the round follow from."""
        return context_of(self.terms.digest, self.roster, self.present)

    @property
    def consent(self) -> bytes:
        """What is signed of the survivors."""
        return consented(self.context, self.notes.survivors)

    def sent_by(self, site: str) -> list[MaskedPart]:
        """The parts that a site declared."""
        return [part for part in self.parts if site in part.sites]

    def reaching(self, sites: Sequence[str]) -> list[MaskedPart]:
        """The parts of which enough senders are among some sites."""
        return [part for part in self.parts if len(part.among(sites)) >= self.terms.floor]

    def sums(self, sites: Sequence[str]) -> dict[str, tuple[str, ...]]:
        """The senders of each slot that some sites could open."""
        parts = self.reaching(sites)
        return {slot.name: part.among(sites) for part in parts for slot in part.slots}

    @cached_property
    def boxes(self) -> dict[str, bytes]:
        """The site's shares for all others, each in its box."""
        return {
            site: self.secrets.closed(self.name, advert, self.roster, self._cut[site])
            for site, advert in self.adverts.items()
            if site != self.name
        }

    @cached_property
    def _cut(self) -> dict[str, list[bytes]]:
        own, sites = self.sent_by(self.name), list(self.adverts)
        return self.secrets.cut(own, sites, self.roster, self.terms.threshold)

    def shares(self, site: str) -> list[bytes]:
        """What this site has of another's secrets: of its key, then of each part it declared."""
        if site == self.name:
            return self._cut[site]
        box, count = self.notes.boxes[site], len(self.sent_by(site)) + 1
        return self.secrets.opened(self.name, self.adverts[site], self.roster, box, count)

    def masked(self, numbers: Mapping[str, Words], weight: int) -> dict[str, bytes]:
        """The site's numbers under masks, of each part that enough of those present send."""
        parts = [p for p in self.reaching(self.present) if self.name in p.sites]
        among = len(self.present)
        words = {part.name: PartWords.of(part, numbers, weight, among) for part in parts}
        for part in parts:
            seed = self.secrets.seed(part.name, self.roster)
            words[part.name].put_on(self_key(seed, self.context, part.name, self.name))
        for site in self.present:
            common = [part.name for part in parts if site in part.sites and site != self.name]
            for name, key in self._pair(site, common).items():
                put_pair(words[name], key, first=self.name < site)
        return {name: words.pop(name).written for name in list(words)}  # each let go at once

    def _pair(self, site: str, parts: Sequence[str]) -> dict[str, bytes]:
        if not parts:
            return {}
        other = (site, self.adverts[site].masking)
        return pair_keys(self.secrets.masking, self.context, self.name, other, parts)

    def unmasking(self) -> Unmasking:
        """Shares of the masks of survivors, in parts that are opened, and the keys of the gone."""
        survivors, masks = self.notes.survivors, dict[str, dict[str, bytes]]()
        held = {site: self.shares(site) for site in self.present}
        gone = set[str]()
        for part in self.reaching(survivors):
            senders = part.among(survivors)
            masks[part.name] = {s: held[s][1 + self.sent_by(s).index(part)] for s in senders}
            gone |= set(part.among(self.present)) - set(senders)
        keys = {site: held[site][0] for site in sorted(gone)}
        return Unmasking(self.terms.digest, self.name, masks, keys)
