# SPDX-License-Identifier: Apache-2.0
"""Masked rounds among sites of one process: who dies at which step, and what the server then has."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TypeVar

import numpy as np
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedplan.secagg.client import ProtocolClient
from fedplan.secagg.crypto import NodeKey, SecAggError, node_public_key
from fedplan.secagg.messages import UnmaskShares
from fedplan.secagg.progress import MemoryProgressStore, ProgressStore
from fedplan.secagg.server import ProtocolServer, UnmaskedSums
from fedplan.secagg.terms import Slot, Terms
from fedplan.tensors.ring import Words, ints_from_words, widen_words, words_from_ints

STEPS = (
    "advertise_keys",
    "share_secrets",
    "mask_input",
    "sign_survivors",
    "reveal_shares",
)
NEVER = len(STEPS)
Said = TypeVar("Said")


@cache
def node(site: str) -> NodeKey:
    """A site's node key, which follows from its name; that of cleo signs differently each time."""
    if site == "cleo":
        return ec.derive_private_key(7, ec.SECP384R1())
    return Ed25519PrivateKey.from_private_bytes(site.encode().ljust(32, b"."))


def directory(sites: Sequence[str]) -> dict[str, bytes]:
    return {site: node_public_key(node(site)) for site in sites}


def terms(slots: Sequence[Slot], *, threshold: int, floor: int = 2, **said: object) -> Terms:
    held: dict[str, object] = {
        **{
            "experiment": "laws",
            "run": "a",
            "agreement_digest": "f" * 16,
            "round": 1,
            "base_digest": "b" * 16,
        },
        **said,
    }
    return Terms(**held, threshold=threshold, min_senders=floor, slots=tuple(slots))  # type: ignore[arg-type]


@dataclass
class Round:
    """Sites with their numbers, and a server. `gone` is the step that a site no longer does."""

    terms: Terms
    numbers: Mapping[str, Mapping[str, Words]]
    weights: Mapping[str, int]
    gone: Mapping[str, int] = field(default_factory=dict[str, int])
    notebooks: Mapping[str, ProgressStore] = field(default_factory=dict[str, ProgressStore])

    def __post_init__(self) -> None:
        known, self.answers = directory(list(self.numbers)), dict[str, UnmaskShares]()
        self.server = ProtocolServer(self.terms, known)
        self.sites = {
            name: ProtocolClient(
                name, node(name), known, self.notebooks.get(name, MemoryProgressStore())
            )
            for name in self.numbers
        }

    def there(self, step: int) -> list[str]:
        return [name for name in self.numbers if self.gone.get(name, NEVER) > step]

    def play(self, until: int = NEVER) -> UnmaskedSums | None:
        """All steps, or those before one of them."""
        steps: list[Callable[[], None]] = [
            *(self.advertise, self.share, self.mask, self.consent, self.answer)
        ]
        for step in steps[:until]:
            step()
        return self.server.unmask() if until == NEVER else None

    def advertise(self) -> None:
        for name in self.there(0):
            advert = self.sites[name].advertise_keys(self.terms, list(self.numbers[name]))
            self.server.accept_advert(advert)

    def share(self) -> None:
        roster = self.server.roster()
        for name in self.there(1):
            self.server.accept_shares(self.sites[name].share_secrets(roster))

    def mask(self) -> None:
        held = {name: self.server.shares_for(name) for name in self.there(1)}
        for name in self.there(2):
            numbers, weight = self.numbers[name], self.weights[name]
            self.server.add_masked_input(self.sites[name].mask_input(held[name], numbers, weight))

    def consent(self) -> None:
        said = self.server.survivor_list()
        for name in self.there(3):
            self.server.accept_signature(self.sites[name].sign_survivors(said))

    def answer(self) -> None:
        said = self.server.signature_list()
        for name in self.there(4):
            self.answers[name] = self.sites[name].reveal_shares(said)
            self.server.accept_unmask_shares(self.answers[name])


def drawn(dice: random.Random, slot: Slot) -> Words:
    """Numbers of a slot, up to a size at which no sum of a few wraps around."""
    if slot.wide:
        return words_from_ints(dice.randint(-(2**124), 2**124) for _ in range(slot.count))
    found = [dice.randint(-(2**60), 2**60) % 2**64 for _ in range(slot.count)]
    return np.array(found, dtype=np.uint64)


def federation(seed: int) -> Round:
    """A random federation: sites, what each sends, its weight, and when it dies."""
    dice = random.Random(seed)
    sites = [f"site {n}" for n in range(dice.randint(2, 6))]
    slots = [
        Slot(f"part {n}", dice.choice((0, 1, 3, 17)), dice.random() < 0.3)
        for n in range(dice.randint(1, 4))
    ]
    least = max(2, len(sites) // 2 + 1)
    threshold = dice.choice((least, least, dice.randint(least, len(sites))))
    agreed = terms(slots, threshold=threshold, floor=dice.randint(2, 3), round=dice.randint(1, 9))
    sent = {s: [slot for slot in slots if dice.random() < 0.8] for s in sites}
    numbers = {s: {slot.name: drawn(dice, slot) for slot in sent[s]} for s in sites}
    die = dice.choice((0.0, 0.2, 0.4))
    gone = {s: dice.randrange(NEVER) for s in sites if dice.random() < die}
    return Round(agreed, numbers, {s: dice.randint(1, 10**6) for s in sites}, gone)


def plain(made: Round) -> tuple[dict[str, list[int]], dict[str, int], set[str]] | None:
    """What must come out: sums and weights over the survivors, and what stays closed.

    None where a step has fewer sites than the threshold: the round is given up.
    """
    steps = [len(made.there(step)) for step in range(NEVER)]
    if min(steps) < made.terms.threshold or 2 * made.terms.threshold <= steps[0]:
        return None
    present, survivors = made.there(1), made.there(2)
    sums, weights, closed = dict[str, list[int]](), dict[str, int](), set[str]()
    roster = made.there(0)
    groups = {s.name: [n for n in roster if s.name in made.numbers[n]] for s in made.terms.slots}
    for slot in made.terms.slots:
        senders = [n for n in survivors if n in groups[slot.name]]
        if len(senders) >= made.terms.min_senders:
            sums[slot.name] = added([made.numbers[n][slot.name] for n in senders], slot)
            weights[slot.name] = sum(made.weights[n] for n in senders)
        elif groups[slot.name]:
            closed.add(slot.name)
    assert set(survivors) <= set(present)
    return (sums, weights, closed) if sums else None


def added(held: Sequence[Words], slot: Slot) -> list[int]:
    """The sum of numbers in Python's own."""
    rows = [ints_from_words(each if slot.wide else widen_words(each)) for each in held]
    return [sum(column) for column in zip(*rows, strict=True)]


def said(found: UnmaskedSums, made: Round) -> tuple[dict[str, list[int]], dict[str, int], set[str]]:
    wide = {slot.name: slot.wide for slot in made.terms.slots}
    sums = {n: ints_from_words(w if wide[n] else widen_words(w)) for n, w in found.numbers.items()}
    return sums, found.weights, set(found.withheld)


def refusal(asked: Callable[[], object]) -> str:
    """Why something is refused; nothing if it is not."""
    try:
        asked()
    except SecAggError as error:
        return str(error)
    return ""
