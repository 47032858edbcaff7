# SPDX-License-Identifier: Apache-2.0
"""Masked sums: a round's sum of which a server learns what it comes to, and who is in it.

A client's part of it is its own plain sum, as whole numbers: so what is opened closes as the plain
sum does, to the bit. Of values the weighted changes are masked, which one word can hold; the server
knows what they changed, and adds it again. Of each change one linear sum is opened, and no second
one: two sums of two clients would be both of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from fedplan.errors import FedplanError
from fedplan.federation.aggregation import Outcome, Plain, PlainSum, Polled
from fedplan.federation.agreement import Agreement
from fedplan.federation.messages import Rejected
from fedplan.federation.participation import Participation
from fedplan.federation.record import ALL, MaskedRecord
from fedplan.federation.world import World
from fedplan.models.params import Block
from fedplan.privacy.errors import PrivacyError
from fedplan.privacy.masking.ciphers import MaskingError, digest_of
from fedplan.privacy.masking.rehearsal import Contribution, rehearsed
from fedplan.privacy.masking.server import Opened
from fedplan.privacy.masking.terms import Slot, Terms
from fedplan.tensors.modular import (
    Words,
    add_words,
    counts_of_words,
    numbers_of,
    take_words,
    wide_of,
    widened,
    words_of_counts,
)
from fedplan.tensors.named import Tensors, whole_digest
from fedplan.tensors.sums import LARGEST_SUM, LARGEST_WEIGHT, ExactSum
from fedplan.tensors.totals import CARRY, GRID, dtype_of

POLLED = "scores"
"""The slot of a poll: a number for each block."""
STEPS, LARGEST_POLLED = round(1 / GRID), 2.0**60
"""Steps of the grid in one, and the largest score that is polled under masks."""
VALUE, SQUARE = "value/", "square/"
"""How the names of slots begin."""
LARGEST_SQUARE = 2**120
"""What one client's weighted square of a change stays below, in steps of 2**-80: so it is below
2**40, and a hundred clients fit two words."""


@dataclass(frozen=True)
class MaskedMean:
    """Updates are summed under masks: each param is the mean over its senders, as it is plain."""

    agreement: Agreement
    participation: Participation
    hides: ClassVar[bool] = False

    @property
    def guard(self) -> None:
        """Nothing is charged here."""
        return None

    def saved(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def cohort(self, number: int, roster: Sequence[str]) -> list[str]:
        """A share of the roster, drawn for the round, if a sum of so many can be opened once."""
        found = Plain(self.agreement, self.participation).cohort(number, roster)
        self.agreement.masking.least(len(found))
        return found

    def chosen(self, number: int, polled: Polled) -> dict[Block, float]:
        """The sum of what was polled, each score rounded once to the grid, as masks need it."""
        sums = dict[Block, int]()
        for scores in polled.values():
            for block, steps in scores_in_steps(scores).items():
                sums[block] = sums.get(block, 0) + steps
        return {block: steps / STEPS for block, steps in sums.items()}

    def begin(self, world: World, shared: Callable[[], Tensors], roster: int) -> MaskedSum:
        """Open the sum of a round."""
        asked = len(self.cohort(world.round + 1, [str(n) for n in range(roster)]))
        threshold = self.agreement.masking.least(asked)
        return MaskedSum(self.agreement, world.values, roster, world.round + 1, threshold)


@dataclass
class MaskedPoll:
    """The masked sum of what clients would choose: `opened`, or it `failed` for a reason."""

    agreement: Agreement
    marks: dict[str, str]
    number: int
    threshold: int
    opened: Opened | None = None
    sites: tuple[str, ...] = ()
    failed: str = ""

    def terms(self, asked: str, attempt: int = 1) -> Terms:
        """What all who are polled must agree on."""
        told, marks = self.agreement, self.marks
        return poll_terms(told, self.number, self.threshold, marks, asked=asked, attempt=attempt)

    @property
    def scores(self) -> dict[Block, float]:
        """The sum of all scores; nothing if it was not opened."""
        if self.opened is None or POLLED not in self.opened.numbers:
            return {}
        steps = numbers_of(self.opened.numbers[POLLED])
        sums = zip(self.agreement.blocks, steps, strict=True)
        return {block: each / STEPS for block, each in sums}


@dataclass
class MaskedSum:
    """The masked sum of a round: `opened` by who carried its letters, or rehearsed in one process.

    A rehearsal holds what each client would mask until all came: every client's words. Between
    machines they are masked where they are made, and the server has one sum: of `sites`, or it
    `failed` for a reason.
    """

    agreement: Agreement
    base: Tensors
    roster: int
    number: int
    threshold: int
    held: dict[str, Contribution] = field(default_factory=dict[str, Contribution])
    opened: Opened | None = None
    sites: tuple[str, ...] = ()
    failed: str = ""

    def require(self, values: Tensors, riders: Tensors, weight: int) -> None:
        """Refuse what cannot be summed."""
        self._plain().require(values, riders, weight)

    def add(self, client: str, values: Tensors, riders: Tensors, weight: int) -> None:
        """Hold what one client would mask."""
        own = self._plain()
        own.add(client, values, riders, weight)
        wide = self.agreement.masking.wide
        self.held[client] = Contribution(numbers_in(own, self.base, wide=wide), weight)

    def close(self) -> Outcome:
        """What the sum comes to, once it is open; a round that cannot be opened changes nothing."""
        sites, opened = self.sites or tuple(sorted(self.held)), self.opened
        try:
            opened = opened or self._rehearsed()
            made = self._made(opened)
        except PrivacyError:  # what nobody has paid for, or could write down, is not released
            raise
        except FedplanError as error:  # rubbish of one site ends the round, and not the run
            return Outcome({}, masked=MaskedRecord(self.threshold, sites, {ALL: str(error)}))
        closed = {name.removeprefix(VALUE): why for name, why in sorted(opened.closed.items())}
        told = {n: why for n, why in closed.items() if n in self.base or n == ALL}
        return replace(made, masked=MaskedRecord(self.threshold, sites, told))

    def _made(self, opened: Opened) -> Outcome:
        return plain_of(opened, self._plain(), wide=self.agreement.masking.wide).close()

    def _rehearsed(self) -> Opened:
        if self.failed:
            raise MaskingError(self.failed)
        return rehearsed(self.terms(), self.held)

    @property
    def marks(self) -> dict[str, str]:
        """The digests of all that the round starts from."""
        return {key: whole_digest(value) for key, value in sorted(self.base.items())}

    def terms(self, asked: str = "", attempt: int = 1) -> Terms:
        """What all who take part must agree on."""
        told, marks = self.agreement, self.marks
        return terms_of(told, self.number, self.threshold, marks, asked=asked, attempt=attempt)

    def _plain(self) -> PlainSum:
        return PlainSum(self.agreement, self.base, self.roster)


def terms_of(
    agreement: Agreement,
    number: int,
    threshold: int,
    base: Mapping[str, str],
    *,
    asked: str,
    attempt: int = 1,
) -> Terms:
    """The terms of a round that starts from values of these digests: each end makes its own.

    `asked` is the digest of the phase and of the scores that all choose by.
    """
    marks = (word for key in sorted(base) for word in (key, base[key]))
    return Terms(
        experiment=agreement.experiment,
        run=agreement.run,
        agreed=agreement.digest,
        round=number,
        base=digest_of("base", asked, *marks).hex(),
        threshold=threshold,
        floor=agreement.masking.floor,
        slots=slots_of(agreement),
        attempt=attempt,
    )


def poll_terms(
    agreement: Agreement,
    number: int,
    threshold: int,
    base: Mapping[str, str],
    *,
    asked: str,
    attempt: int = 1,
) -> Terms:
    """The terms of a poll before a round: its slots say that it is one."""
    made = terms_of(agreement, number, threshold, base, asked=asked, attempt=attempt)
    return replace(made, slots=(Slot(POLLED, len(agreement.blocks), wide=True),))


def scores_in_steps(scores: Mapping[Block, float]) -> dict[Block, int]:
    """Scores as whole steps of the grid; of what is no number, or too large to add, nothing."""
    if not all(abs(each) <= LARGEST_POLLED for each in scores.values()):
        return {}
    return {block: round(each * STEPS) for block, each in scores.items()}


def slots_of(agreement: Agreement) -> tuple[Slot, ...]:
    """All that clients may sum in a round: it follows from what was agreed, and from no client.

    The first has no numbers, and every client sends it: its weight is that of all.
    """
    wide, sizes = agreement.masking.wide, {p.key: p.numel for p in agreement.movable}
    return (
        Slot(ALL, 0),
        *(Slot(VALUE + key, size, wide) for key, size in sizes.items()),
        *(Slot(SQUARE + key, 1, wide=True) for key in sizes if key in agreement.squared),
    )


def sent_slots(agreement: Agreement, shared: Iterable[str]) -> list[str]:
    """The slots that a client sends which shares these params."""
    keys = list(shared)
    squares = (SQUARE + key for key in keys if key in agreement.squared)
    return [ALL, *(VALUE + key for key in keys), *squares]


def numbers_in(own: PlainSum, base: Tensors, *, wide: bool) -> dict[str, Words]:
    """One client's plain sum as the numbers that it would mask."""
    values, weights = words_in(own.values), own.values.weights()
    found = {ALL: np.zeros(0, np.uint64)}
    for key, words in values.items():
        take_words(words, _weighted(base[key], weights[key]))
        found[VALUE + key] = words if wide else narrowed(key, words)
        if key in own.agreement.squared:
            found[SQUARE + key] = wide_of([_square(key, own.drift.squares[key])])
    return found


def plain_of(opened: Opened, total: PlainSum, *, wide: bool) -> PlainSum:
    """The plain sum that was opened, of what is not closed."""
    sums = dict[str, Words]()
    for name, words in opened.numbers.items():
        if (key := name.removeprefix(VALUE)) != name:
            sums[key] = words if wide else widened(words)
            add_words(sums[key], _weighted(total.base[key], opened.weights[name]))
        elif (key := name.removeprefix(SQUARE)) != name:
            (total.drift.squares[key],) = numbers_of(words)
    total.values = sum_of(sums, opened, total.base)
    total.weight = opened.weights.get(ALL, 0)
    return total


def words_in(held: ExactSum) -> dict[str, Words]:
    """The steps of the grid that a sum holds, as wide numbers."""
    tensors, facts = held.tensors()
    return {key: words_of_counts(tensors[f"{key}.upper"], tensors[f"{key}.lower"]) for key in facts}


def _weighted(value: Tensor, weight: int) -> Words:
    """A value so many times, in steps of the grid."""
    total = ExactSum()
    while weight > 0:
        total.add({"": value}, min(weight, LARGEST_WEIGHT))
        weight -= LARGEST_WEIGHT
    return words_in(total)[""]


def narrowed(name: str, words: Words) -> Words:
    """Wide numbers as narrow ones, if they fit."""
    found = np.ascontiguousarray(words[:, 0])
    if not np.array_equal(widened(found), words):
        raise Rejected(
            f"the weighted change of {name!r} does not fit one word: say aggregation.wide"
        )
    return found


def _square(key: str, steps: int) -> int:
    if steps >= LARGEST_SQUARE:
        raise Rejected(
            f"the change of {key!r} is too large for a masked sum: rows times its squared length "
            "stay below 2**40; take smaller steps"
        )
    return steps


def sum_of(held: Mapping[str, Words], opened: Opened, like: Mapping[str, Tensor]) -> ExactSum:
    """An exact sum of numbers that were opened, in the shapes and dtypes of others."""
    tensors, facts = dict[str, Tensor](), dict[str, object]()
    for key, words in held.items():
        upper, lower = counts_of_words(words, tuple(like[key].shape))
        senders, weight = len(opened.senders[VALUE + key]), opened.weights[VALUE + key]
        tensors |= {f"{key}.upper": upper, f"{key}.lower": lower}
        most = int(torch.max(upper.abs())) + 1 if upper.numel() else 0
        facts[key] = {
            "dtype": dtype_of(like[key]),
            "weight": weight,
            "senders": senders,
            "reach": min(most << CARRY, LARGEST_SUM - 1),
        }
    return ExactSum.read(tensors, facts)
