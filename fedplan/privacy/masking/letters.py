# SPDX-License-Identifier: Apache-2.0
"""Letters: what sites and their server say to each other in a masked round, as plain bytes.

Each carries the digest of the round's terms. Five go up: an advert, boxes, masked words, a consent
and what opens the sum. Four come down between them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fedplan.privacy.masking.ciphers import digest_of


@dataclass(frozen=True)
class Advert:
    """A site's public keys of a round, to close boxes and to mask, and the slots that it sends.

    Signed by its node key, so that no server can put other keys in their place.
    """

    terms: bytes
    site: str
    boxing: bytes
    masking: bytes
    slots: tuple[str, ...]
    signature: bytes = b""

    @property
    def body(self) -> bytes:
        """What is signed."""
        said = (self.terms, self.site, self.boxing, self.masking)
        return digest_of("advert", *said, *self.slots)


@dataclass(frozen=True)
class Adverts:
    """To all sites: the adverts of the round, by the sites' names."""

    terms: bytes
    adverts: tuple[Advert, ...]

    @property
    def digest(self) -> bytes:
        """The roster: who is there, with which keys, sending what."""
        return digest_of("roster", self.terms, *(each.body for each in self.adverts))


@dataclass(frozen=True)
class Boxes:
    """A site's shares for each other site, in boxes that only that one can open."""

    terms: bytes
    site: str
    boxes: Mapping[str, bytes]


@dataclass(frozen=True)
class Delivery:
    """To one site: the boxes that the others have closed for it. They are who is present."""

    terms: bytes
    boxes: Mapping[str, bytes]


@dataclass(frozen=True)
class MaskedWords:
    """A site's numbers under masks, by the name of each part."""

    terms: bytes
    site: str
    parts: Mapping[str, bytes]


@dataclass(frozen=True)
class Survivors:
    """To all sites: those whose masked words have come."""

    terms: bytes
    sites: tuple[str, ...]


@dataclass(frozen=True)
class Consent:
    """A site's signature under the survivors that it was told."""

    terms: bytes
    site: str
    signature: bytes


@dataclass(frozen=True)
class Consents:
    """To all survivors: the signatures of the others, which say that they were told the same."""

    terms: bytes
    consents: tuple[Consent, ...]


@dataclass(frozen=True)
class Unmasking:
    """A site's shares of what opens the sum: of the masks of those who are there, and the keys of
    those who are not.

    `masks` are by part and site, `keys` by site. Of no site are there both.
    """

    terms: bytes
    site: str
    masks: Mapping[str, Mapping[str, bytes]]
    keys: Mapping[str, bytes]


def consented(context: bytes, survivors: tuple[str, ...]) -> bytes:
    """What a consent signs."""
    return digest_of("survivors", context, *survivors)
