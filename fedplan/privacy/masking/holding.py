# SPDX-License-Identifier: Apache-2.0
"""Holdings of a round's secrets: what a site draws, and how it is cut into shares and boxes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from fedplan.privacy.masking.ciphers import (
    KEY,
    KeyStream,
    MaskingError,
    agreed_secret,
    closed_box,
    framed,
    key_from,
    opened_box,
    public_of,
)
from fedplan.privacy.masking.letters import Advert
from fedplan.privacy.masking.shares import PRIME, SIZE, split
from fedplan.privacy.masking.terms import MaskedPart

Cut = Mapping[str, Sequence[bytes]]
"""For each site its shares: of the masking key, then of the seed of each part."""


@dataclass(frozen=True)
class RoundSecrets:
    """All that a site draws in a round, from one secret: the same whenever it is asked for."""

    secret: bytes
    terms: bytes

    def _drawn(self, *words: str | int | bytes) -> bytes:
        return key_from(self.secret, self.terms, *words)

    @cached_property
    def boxing(self) -> bytes:
        """The secret that boxes are closed and opened by."""
        return self._drawn("boxing")

    @cached_property
    def masking(self) -> bytes:
        """The secret of the masks that are shared with others."""
        return self._drawn("masking")

    def seed(self, part: str, roster: bytes) -> bytes:
        """The seed of the mask of its own, of a part."""
        return self._drawn("seed", part, roster)

    def advert(self, site: str, slots: tuple[str, ...]) -> Advert:
        """The advert of a site, not signed yet."""
        return Advert(self.terms, site, public_of(self.boxing), public_of(self.masking), slots)

    def cut(
        self, parts: Sequence[MaskedPart], sites: Sequence[str], roster: bytes, threshold: int
    ) -> dict[str, list[bytes]]:
        """The shares of each site, by its place in the roster."""
        found = {site: list[bytes]() for site in sites}
        secrets = [self.masking, *(self.seed(part.name, roster) for part in parts)]
        for number, secret in enumerate(secrets):
            stream = KeyStream(self._drawn("coefficients", roster, number))
            # Twice the bits of the field, so that none of its numbers comes more often.
            others = [int.from_bytes(stream.bytes(2 * KEY)) % PRIME for _ in range(1, threshold)]
            cuts = split(int.from_bytes(secret), others, range(1, len(sites) + 1))
            for site, each in zip(sites, cuts, strict=True):
                found[site].append(each.to_bytes(SIZE))
        return found

    def closed(self, own: str, to: Advert, roster: bytes, shares: Sequence[bytes]) -> bytes:
        """A box for another site."""
        key = self._box_key(to, roster, own, to.site)
        return closed_box(key, b"".join(shares), framed(own, to.site))

    def opened(self, own: str, by: Advert, roster: bytes, box: bytes, count: int) -> list[bytes]:
        """The shares in a box of another site, of which there are so many."""
        key = self._box_key(by, roster, by.site, own)
        content = opened_box(key, box, framed(by.site, own))
        if content is None:
            raise MaskingError(
                f"the box of {by.site} does not open: it is of another round, or was changed"
            )
        if len(content) != SIZE * count:
            raise MaskingError(f"the box of {by.site} has {len(content)} bytes of shares")
        return [content[at : at + SIZE] for at in range(0, len(content), SIZE)]

    def _box_key(self, other: Advert, roster: bytes, sender: str, receiver: str) -> bytes:
        common = agreed_secret(self.boxing, other.boxing)
        return key_from(common, roster, "box", sender, receiver)
