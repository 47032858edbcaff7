# SPDX-License-Identifier: Apache-2.0
"""Terms of a secure aggregation round: what all clients must agree on before one masks its input.

Their digest goes into every key, so an input masked under other terms (of another round or model)
cannot be unmasked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from fedplan.secagg.crypto import SecAggError, sha256_of

RULE = "fedplan secure aggregation 2: unmasked once a round, for survivors that a threshold signed"
"""Name and version of the protocol, part of every digest of terms."""
HEADER = 2
"""Numbers at the start of every group's vector: count of clients, and sum of their weights."""
MAX_CLIENT_WEIGHT = 2**27
"""Largest weight of a client, as in `ExactSum`: no sum of weights overflows."""


@dataclass(frozen=True)
class Slot:
    """A named vector of `count` numbers, which a client sends whole or not at all.

    name: unique in a round; a number has one 64-bit word, two if `wide`.
    """

    name: str
    count: int
    wide: bool = False


@dataclass(frozen=True)
class Terms:
    """The settings that all clients of a secure aggregation round must agree on.

    agreement_digest: fingerprint of the settings that server and clients fixed before round 1.
    base_digest: of the values that the round starts from. min_senders: a slot is unmasked only if
    at least this many surviving clients sent it. attempt: number of this attempt at the round, from
    1.

    Raises a SecAggError if threshold or min_senders is below 2, or if a slot's name repeats.
    """

    experiment: str
    run: str
    agreement_digest: str
    round: int
    base_digest: str
    threshold: int
    min_senders: int
    slots: tuple[Slot, ...]
    attempt: int = 1

    def __post_init__(self) -> None:
        if self.threshold < 2 or self.min_senders < 2:
            raise SecAggError(
                f"threshold is {self.threshold} and min_senders is {self.min_senders}: a sum of "
                "one client hides nothing; give 2 or more"
            )
        if len({slot.name for slot in self.slots}) < len(self.slots):
            raise SecAggError("two slots have one name: name each once")

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of all terms."""
        slots = (word for s in self.slots for word in (s.name, s.count, int(s.wide)))
        fields = (
            self.experiment,
            self.run,
            self.agreement_digest,
            self.round,
            self.attempt,
            self.base_digest,
        )
        return sha256_of(RULE, *fields, self.threshold, self.min_senders, *slots)

    @property
    def reveal_id(self) -> str:
        """Digest of run, round and slots, the same for all attempts: unmasked at most once."""
        slots = (slot.name for slot in self.slots)
        return sha256_of("reveal", self.experiment, self.run, self.round, *slots).hex()

    def revealable(self, groups: Sequence[SlotGroup], clients: Sequence[str]) -> list[SlotGroup]:
        """The slot groups that have at least `min_senders` senders among `clients`."""
        return [each for each in groups if len(each.senders_among(clients)) >= self.min_senders]

    def require_client_count(self, clients: int) -> None:
        """Raise a SecAggError if too few clients take part, or two groups could unmask a round."""
        if clients < self.threshold:
            raise SecAggError(
                f"{clients} clients take part, and the threshold is {self.threshold}: wait for more"
            )
        if 2 * self.threshold <= clients:
            raise SecAggError(
                f"a threshold of {self.threshold} of {clients} clients lets two halves unmask a "
                f"round each: take {clients // 2 + 1} at least"
            )


@dataclass(frozen=True)
class SlotGroup:
    """Slots with the same senders, sorted: they are masked, and unmasked or withheld, together."""

    slots: tuple[Slot, ...]
    clients: tuple[str, ...]

    @cached_property
    def name(self) -> str:
        """Digest of slots and clients, in hex: part of the key of each of the group's masks."""
        slots = [slot.name for slot in self.slots]
        return sha256_of("group", len(slots), *slots, *self.clients).hex()[:32]

    @property
    def narrow_count(self) -> int:
        """Number of one-word numbers, with the header."""
        return HEADER + sum(slot.count for slot in self.slots if not slot.wide)

    @property
    def word_count(self) -> int:
        """Number of 64-bit words that a client sends of this group."""
        return self.narrow_count + 2 * sum(slot.count for slot in self.slots if slot.wide)

    def senders_among(self, clients: Sequence[str]) -> tuple[str, ...]:
        """The clients of this group that are among `clients`, in the group's order."""
        return tuple(client for client in self.clients if client in set(clients))


def group_slots(
    terms: Terms, slots_by_client: Mapping[str, Sequence[str]]
) -> tuple[SlotGroup, ...]:
    """Group the slots of the terms by the clients that declared them; others are left out."""
    declared = {client: set(names) for client, names in sorted(slots_by_client.items())}
    groups = dict[tuple[str, ...], list[Slot]]()
    for slot in terms.slots:
        if senders := tuple(client for client, names in declared.items() if slot.name in names):
            groups.setdefault(senders, []).append(slot)
    return tuple(SlotGroup(tuple(slots), senders) for senders, slots in groups.items())
