# SPDX-License-Identifier: Apache-2.0
"""Masks: the numbers of a part as words, and what is added to them so that they say nothing.

Masks are added in place and made in small chunks: the memory is that of the words, however many
sites there are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fedplan.privacy.masking.ciphers import (
    KeyStream,
    MaskingError,
    agreed_secret,
    digest_of,
    key_from,
)
from fedplan.privacy.masking.terms import HEADER, MaskedPart
from fedplan.tensors.modular import WORD, Words, add_words, take_words


@dataclass(frozen=True)
class PartWords:
    """The numbers of a part, as words: its header and all that is narrow, then all that is wide."""

    words: Words
    split: int

    @staticmethod
    def empty(part: MaskedPart) -> PartWords:
        """Nothing yet."""
        return PartWords(np.zeros(part.words, np.uint64), part.narrow)

    @staticmethod
    def of(part: MaskedPart, numbers: Mapping[str, Words], weight: int, among: int) -> PartWords:
        """One site's numbers: it counts once, by its weight, among so many sites.

        Each may be as large as its share of a word: then no sum wraps around.
        """
        found = PartWords.empty(part)
        found.narrow[:HEADER] = (1, weight)
        for name, place in found._places(part):
            if place.shape != numbers[name].shape:
                raise MaskingError(
                    f"{name} has numbers of shape {numbers[name].shape}, and {place.shape} was "
                    "agreed: give each slot what its terms say"
                )
            _require_room(name, numbers[name], among)
            place[...] = numbers[name]
        return found

    @staticmethod
    def read(part: MaskedPart, content: bytes) -> PartWords:
        """What `written` wrote."""
        if len(content) != 8 * part.words:
            raise MaskingError(
                f"part {part.name} has {len(content)} bytes and not {8 * part.words}: both ends "
                "must sum the same slots"
            )
        return PartWords(np.frombuffer(content, dtype="<u8"), part.narrow)

    @property
    def written(self) -> bytes:
        """All words as bytes."""
        return self.words.astype("<u8", copy=False).tobytes()

    @property
    def narrow(self) -> Words:
        """The header and what is narrow."""
        return self.words[: self.split]

    @property
    def wide(self) -> Words:
        """What is wide, in rows of two."""
        return self.words[self.split :].reshape(-1, 2)

    def numbers(self, part: MaskedPart) -> dict[str, Words]:
        """The numbers of each slot."""
        return dict(self._places(part))

    def add(self, other: PartWords) -> None:
        """Add another site's numbers."""
        add_words(self.narrow, other.narrow)
        add_words(self.wide, other.wide)

    def put_on(self, key: bytes) -> None:
        """Put on the mask of a key."""
        stream = KeyStream(key)
        for chunk, words in stream.words(self.narrow.size):
            add_words(self.narrow[chunk], words)
        for chunk, words in stream.words(self.wide.size):
            add_words(self.wide[chunk.start // 2 : chunk.stop // 2], words.reshape(-1, 2))

    def take_off(self, key: bytes) -> None:
        """Take off the mask of a key."""
        stream = KeyStream(key)
        for chunk, words in stream.words(self.narrow.size):
            take_words(self.narrow[chunk], words)
        for chunk, words in stream.words(self.wide.size):
            take_words(self.wide[chunk.start // 2 : chunk.stop // 2], words.reshape(-1, 2))

    def _places(self, part: MaskedPart) -> list[tuple[str, Words]]:
        found, at, far = list[tuple[str, Words]](), HEADER, 0
        for slot in part.slots:
            if slot.wide:
                found.append((slot.name, self.wide[far : far + slot.count]))
                far += slot.count
            else:
                found.append((slot.name, self.narrow[at : at + slot.count]))
                at += slot.count
        return found


def context_of(terms: bytes, roster: bytes, present: Sequence[str]) -> bytes:
    """What every mask of a round follows from, beside its secret."""
    return digest_of("context", terms, roster, *present)


def self_key(seed: bytes, context: bytes, part: str, site: str) -> bytes:
    """The key of the mask that a site puts on by itself."""
    return key_from(seed, context, "self", part, site)


def pair_keys(
    secret: bytes, context: bytes, own: str, other: tuple[str, bytes], parts: Sequence[str]
) -> dict[str, bytes]:
    """The keys of the masks that two sites share, by part: of the other, its name and public key.

    The first of the two by name puts the mask on, the second takes it off.
    """
    name, public = other
    common, pair = agreed_secret(secret, public), sorted((own, name))
    return {part: key_from(common, context, "pair", part, *pair) for part in parts}


def put_pair(words: PartWords, key: bytes, *, first: bool) -> None:
    """A site's side of a mask that two share."""
    if first:
        words.put_on(key)
    else:
        words.take_off(key)


def _require_room(name: str, numbers: Words, among: int) -> None:
    """Refuse numbers of which so many together could pass a word, or two."""
    top = (numbers[:, 1] if numbers.ndim == 2 else numbers).view(np.int64)
    most = 2 ** (WORD - 1) // among
    if top.size and not -most < int(top.min()) <= int(top.max()) < most:
        raise MaskingError(
            f"{name} holds a number that is too large for a sum of {among} sites: make its slot "
            "wide, or give smaller weights"
        )
