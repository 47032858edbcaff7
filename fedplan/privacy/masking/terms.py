# SPDX-License-Identifier: Apache-2.0
"""Terms: what all sites of a masked round must agree on before one of them masks anything.

Their digest goes into every key. So what was masked under other terms, for another round or another
model, opens nothing here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from fedplan.privacy.masking.ciphers import MaskingError, digest_of

RULE = "fedplan masked sum 1: opened once a round, for the senders that a threshold of them signed"
HEADER = 2
"""Numbers that every part begins with: how many sites it is the sum of, and their weight."""
HEAVIEST = 2**27
"""The most that a site may weigh, as in a plain sum: no sum of weights wraps around."""


@dataclass(frozen=True)
class Slot:
    """Numbers under one name, of which a site sends all or none; wide ones have two words."""

    name: str
    count: int
    wide: bool = False


@dataclass(frozen=True)
class Terms:
    """What is summed, when, from which model on, and how many it takes.

    `agreed` is the fingerprint of the agreement, `base` a digest of the values that the round
    starts from. It takes `threshold` sites to open a sum, and a part has `floor` senders at least.
    A round that broke off may be begun anew as the next `attempt`.
    """

    experiment: str
    run: str
    agreed: str
    round: int
    base: str
    threshold: int
    floor: int
    slots: tuple[Slot, ...]
    attempt: int = 1

    def __post_init__(self) -> None:
        if self.threshold < 2 or self.floor < 2:
            raise MaskingError(
                f"the threshold is {self.threshold} and the floor {self.floor}: a sum of one site "
                "hides nothing, so take 2 at least"
            )
        if len({slot.name for slot in self.slots}) < len(self.slots):
            raise MaskingError("two slots have one name: name each once")

    @cached_property
    def digest(self) -> bytes:
        """What stands for all of it."""
        slots = (word for s in self.slots for word in (s.name, s.count, int(s.wide)))
        said = (self.experiment, self.run, self.agreed, self.round, self.attempt, self.base)
        return digest_of(RULE, *said, self.threshold, self.floor, *slots)

    @property
    def occasion(self) -> str:
        """What is opened once, by whatever terms: a round of a run, or the poll before it."""
        slots = (slot.name for slot in self.slots)
        return digest_of("occasion", self.experiment, self.run, self.round, *slots).hex()

    def require_crowd(self, sites: int) -> None:
        """Refuse so many sites that two groups of them could open a round twice, or too few."""
        if sites < self.threshold:
            raise MaskingError(
                f"{sites} sites are there, and the threshold is {self.threshold}: wait for more"
            )
        if 2 * self.threshold <= sites:
            raise MaskingError(
                f"a threshold of {self.threshold} of {sites} sites lets two halves open a round "
                f"each: take {sites // 2 + 1} at least"
            )


@dataclass(frozen=True)
class MaskedPart:
    """Slots that just these sites send: what is masked, and opened or left closed, together."""

    slots: tuple[Slot, ...]
    sites: tuple[str, ...]

    @cached_property
    def name(self) -> str:
        """Its digest: it goes into the key of each of its masks."""
        slots = [slot.name for slot in self.slots]
        return digest_of("part", len(slots), *slots, *self.sites).hex()[:32]

    @property
    def narrow(self) -> int:
        """Its narrow numbers, with its header."""
        return HEADER + sum(slot.count for slot in self.slots if not slot.wide)

    @property
    def wide(self) -> int:
        """Its wide numbers."""
        return sum(slot.count for slot in self.slots if slot.wide)

    @property
    def words(self) -> int:
        """Words of 64 bits that a site sends of it."""
        return self.narrow + 2 * self.wide

    def among(self, sites: Sequence[str]) -> tuple[str, ...]:
        """Those of some sites that send it."""
        return tuple(site for site in self.sites if site in set(sites))


def parts_of(terms: Terms, sent: Mapping[str, Sequence[str]]) -> tuple[MaskedPart, ...]:
    """The parts of a round, by the names of the slots that each site sends."""
    among = {site: set(names) for site, names in sorted(sent.items())}
    held = dict[tuple[str, ...], list[Slot]]()
    for slot in terms.slots:
        if senders := tuple(site for site, names in among.items() if slot.name in names):
            held.setdefault(senders, []).append(slot)
    return tuple(MaskedPart(tuple(slots), sites) for sites, slots in held.items())
