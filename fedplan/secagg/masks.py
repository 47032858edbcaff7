# SPDX-License-Identifier: Apache-2.0
"""Self masks and pairwise masks, added modulo 2**64 (or 2**128) to a client's input vector.

Masks are added in place and generated in small chunks: the memory is that of the vector, for any
number of clients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fedplan.secagg.crypto import KeyStream, SecAggError, hkdf, sha256_of, x25519_shared_secret
from fedplan.secagg.terms import HEADER, SlotGroup
from fedplan.tensors.ring import WORD, Words, add_words, subtract_words


@dataclass(frozen=True)
class GroupVector:
    """The numbers of a slot group (slots of the same senders) as one vector of 64-bit words.

    words: header (count of clients, sum of weights), one-word numbers, then two-word numbers.
    split: number of words before the two-word numbers.
    Made by `empty`, `of` or `from_bytes`; `add` and `apply_mask` change the words in place, modulo
    2**64 or 2**128.
    """

    words: Words
    split: int

    @staticmethod
    def empty(group: SlotGroup) -> GroupVector:
        """A vector of zeros."""
        return GroupVector(np.zeros(group.word_count, np.uint64), group.narrow_count)

    @staticmethod
    def of(
        group: SlotGroup, numbers: Mapping[str, Words], weight: int, clients: int
    ) -> GroupVector:
        """Return a client's input: a header of 1 and `weight`, and a copy of its numbers by slot.

        Raises a SecAggError for a wrong shape, or a number so large that a sum over `clients`
        clients could overflow.
        """
        vector, limit = GroupVector.empty(group), 2 ** (WORD - 1) // clients
        vector.narrow[:HEADER] = (1, weight)
        for name, view in vector.numbers(group).items():
            values = numbers[name]
            if view.shape != values.shape:
                raise SecAggError(
                    f"{name} has numbers of shape {values.shape}, and {view.shape} was agreed: "
                    "give each slot the shape in its terms"
                )
            top = (values[:, 1] if values.ndim == 2 else values).view(np.int64)
            if top.size and not -limit < int(top.min()) <= int(top.max()) < limit:
                raise SecAggError(
                    f"{name} holds a number that is too large for a sum of {clients} clients: make "
                    "its slot wide, or give smaller weights"
                )
            view[...] = values
        return vector

    @staticmethod
    def from_bytes(group: SlotGroup, content: bytes) -> GroupVector:
        """Read-only vector of a group from `content`; a SecAggError for a wrong number of bytes."""
        if len(content) != 8 * group.word_count:
            raise SecAggError(
                f"slot group {group.name} has {len(content)} bytes and not {8 * group.word_count}: "
                "both ends must sum the same slots"
            )
        return GroupVector(np.frombuffer(content, dtype="<u8"), group.narrow_count)

    def to_bytes(self) -> bytes:
        """All words as little-endian bytes."""
        return self.words.astype("<u8", copy=False).tobytes()

    @property
    def narrow(self) -> Words:
        """View of the header and the one-word numbers."""
        return self.words[: self.split]

    @property
    def wide(self) -> Words:
        """View of the two-word numbers, one per row."""
        return self.words[self.split :].reshape(-1, 2)

    def numbers(self, group: SlotGroup) -> dict[str, Words]:
        """Views of the numbers by slot name: [count], or [count, 2] for a wide slot."""
        views, narrow_start, wide_start = dict[str, Words](), HEADER, 0
        for slot in group.slots:
            if slot.wide:
                views[slot.name] = self.wide[wide_start : wide_start + slot.count]
                wide_start += slot.count
            else:
                views[slot.name] = self.narrow[narrow_start : narrow_start + slot.count]
                narrow_start += slot.count
        return views

    def add(self, other: GroupVector) -> None:
        """Add another vector of the same group in place, modulo the ring."""
        add_words(self.narrow, other.narrow)
        add_words(self.wide, other.wide)

    def apply_mask(self, key: bytes, *, subtract: bool = False) -> None:
        """Add or subtract the mask generated from a key, in place."""
        combine, stream = subtract_words if subtract else add_words, KeyStream(key)
        for chunk, words in stream.words(self.narrow.size):
            combine(self.narrow[chunk], words)
        for chunk, words in stream.words(self.wide.size):
            combine(self.wide[chunk.start // 2 : chunk.stop // 2], words.reshape(-1, 2))


def mask_context(terms_digest: bytes, roster_digest: bytes, sharing: Sequence[str]) -> bytes:
    """Digest that every mask key depends on, with the clients whose shares were forwarded."""
    return sha256_of("context", terms_digest, roster_digest, *sharing)


def self_mask_key(seed: bytes, context: bytes, group: str, client: str) -> bytes:
    """Key of a client's self mask for a slot group, from its seed for that group."""
    return hkdf(seed, context, "self", group, client)


def pairwise_mask_keys(
    secret: bytes, context: bytes, own: str, other: tuple[str, bytes], groups: Sequence[str]
) -> dict[str, bytes]:
    """Keys of the pairwise masks of two clients, by slot group; the same on both sides.

    secret: private masking key of the client `own`; other: name and public masking key of the other
    client. Of the two, the client with the smaller name adds the mask, the other one subtracts it.
    """
    name, public_key = other
    shared, pair = x25519_shared_secret(secret, public_key), sorted((own, name))
    return {group: hkdf(shared, context, "pair", group, *pair) for group in groups}
