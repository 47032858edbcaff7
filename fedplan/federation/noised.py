# SPDX-License-Identifier: Apache-2.0
"""Noised sums: masked sums of hidden clients, to which each adds a share of the noise.

A client clips its own change and adds its share on every number that anybody may send in the round.
So the sum that a server opens has its noise, and it never sees one without. What is opened is the
sum of clipped changes and of shares, to the bit; whose it is, is public.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from fedplan.errors import FedplanError
from fedplan.federation.aggregation import Outcome, Polled, about_round, require_no_riders
from fedplan.federation.agreement import Agreement
from fedplan.federation.masked import (
    ALL,
    VALUE,
    MaskedMean,
    MaskedSum,
    narrowed,
    sum_of,
    words_in,
)
from fedplan.federation.participation import Participation
from fedplan.federation.world import World
from fedplan.models.params import Block
from fedplan.privacy.guard import Guard, ServerGuard
from fedplan.privacy.masking.rehearsal import Contribution
from fedplan.privacy.masking.server import Opened
from fedplan.privacy.mechanisms.gaussian import Change, Mechanism
from fedplan.tensors.modular import Words, widened
from fedplan.tensors.named import Tensors, all_finite
from fedplan.tensors.sums import ExactSum
from fedplan.tensors.totals import GRID


@dataclass(frozen=True)
class NoisedMean:
    """Each client is hidden, from the server too: changes are clipped and noised at the clients."""

    agreement: Agreement
    participation: Participation
    guard: ServerGuard
    hides: ClassVar[bool] = True

    def saved(self) -> dict[str, Any]:
        """How many charges there are: with fewer nobody knows what was spent."""
        return {"charges": len(self.guard.budget.charges)}

    def cohort(self, number: int, roster: Sequence[str]) -> list[str]:
        """All clients, if the round is paid for and a sum of so many can be opened once."""
        self.guard.require_room(number, about_round(number))
        return MaskedMean(self.agreement, self.participation).cohort(number, roster)

    def chosen(self, number: int, polled: Polled) -> dict[Block, float]:
        """Nothing: nobody is polled, since nobody would pay for it."""
        raise FedplanError(f"round {number}: hidden clients are not polled under masks")

    def begin(self, world: World, shared: Callable[[], Tensors], roster: int) -> NoisedSum:
        """Open the sum of a round over all that anybody may share in it."""
        masking, number = self.agreement.masking, world.round + 1
        made = mechanism_of(self.guard, self.agreement, shared(), roster)
        return NoisedSum(
            self.agreement,
            world.values,
            roster,
            number,
            masking.least(roster),
            guard=self.guard,
            mechanism=made,
        )


@dataclass
class NoisedSum(MaskedSum):
    """The masked sum of a round that has its noise in it; in a rehearsal the server's own secret
    draws the shares.
    """

    guard: ServerGuard = field(kw_only=True)
    mechanism: Mechanism = field(kw_only=True)

    def require(self, values: Tensors, riders: Tensors, weight: int) -> None:
        """A change of any length can be clipped; what rides beside it cannot be hidden."""
        require_no_riders(riders)

    def add(self, client: str, values: Tensors, riders: Tensors, weight: int) -> None:
        """Hold what one client would mask: all weigh alike."""
        about, change = f"{about_round(self.number)}/{client}", change_of(values, self.base)
        own = self.guard.share(self.mechanism, change, about)
        self.held[client] = Contribution(noised_numbers(own, wide=self.agreement.masking.wide), 1)

    def _made(self, opened: Opened) -> Outcome:
        """The values with the noisy mean change: it has its noise, and is charged all the same."""
        made, wide = self.mechanism, self.agreement.masking.wide
        sums = {
            key: words if wide else widened(words)
            for key in made.shared
            if (words := opened.numbers.get(VALUE + key)) is not None
        }
        like = {k: torch.empty(made.shared[k][0], dtype=torch.float64, device="meta") for k in sums}
        total = sum_of(sums, opened, like)
        changes = self.guard.opened(made, total, self.number, about_round(self.number))
        return Outcome({key: self.base[key] + change for key, change in changes.items()})


def mechanism_of(
    guard: Guard, agreement: Agreement, shared: Mapping[str, Tensor], sites: int
) -> Mechanism:
    """The mechanism of a round among so many sites, each end's own; all that it holds is public.

    What no sum of them may reach is refused here: whether a number fits follows from no client.
    """
    made = guard.mechanism(shared, sites, parts=agreement.masking.honest(sites))
    most = sites * (made.bound + 20 * made.part) / GRID
    if not agreement.masking.wide and most >= 2.0**63:
        raise FedplanError(
            f"changes up to {made.bound:g}, with noise of {made.part:.3g}, of {sites} sites do not "
            "fit one word: say aggregation.wide, or a smaller privacy.clip"
        )
    return made


def change_of(values: Tensors, base: Tensors) -> Change:
    """What a client has changed; where that is no number, nothing: that it is none is not told."""
    found = {key: value.double() - base[key].double() for key, value in values.items()}
    return found if all(map(all_finite, found.values())) else {}


def noised_numbers(own: ExactSum, *, wide: bool) -> dict[str, Words]:
    """One client's clipped change with its share of noise, as the numbers that it masks."""
    words = words_in(own).items()
    numbers = {VALUE + key: each if wide else narrowed(key, each) for key, each in words}
    return {ALL: np.zeros(0, np.uint64), **numbers}
