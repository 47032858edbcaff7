# SPDX-License-Identifier: Apache-2.0
"""Aggregation: what becomes of all updates of a round: begun, added to one by one, closed once.

A way of aggregating is one class here, with its open sum: `Plain` sums updates as they are, and
`Private` clips and hides each of them. A round does not know which it is, and a server asks only
whether it hides who was there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import fsum
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from fedplan.federation.agreement import Agreement
from fedplan.federation.drift import Drift
from fedplan.federation.messages import Rejected
from fedplan.federation.participation import Participation
from fedplan.federation.products import Errors, ProductSum
from fedplan.federation.record import LARGEST_SCORE
from fedplan.federation.world import World
from fedplan.models.params import Block
from fedplan.privacy.guard import ServerGuard
from fedplan.privacy.mechanisms.clipping import capped
from fedplan.privacy.mechanisms.gaussian import Mechanism
from fedplan.tensors.named import Tensors
from fedplan.tensors.sums import ExactSum

Polled = Mapping[str, Mapping[Block, float]]
"""What each client would choose."""


@dataclass(frozen=True)
class Outcome:
    """What a round has made: each param's mean, the changes of riders, and how far all were apart.

    `clip` is the bound of the next round, where one follows the clients' changes; `products` how
    far the product of LoRA's mean sides was from the mean product, where clients share both.
    """

    means: dict[str, Tensor]
    riders: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    drift: dict[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])
    clip: float = 0.0
    products: Errors | None = None


class OpenSum(Protocol):
    """The sum of one round, while it is open."""

    def require(self, values: Tensors, riders: Tensors, weight: int) -> None:
        """Refuse what cannot be added, and change nothing."""

    def add(self, values: Tensors, riders: Tensors, weight: int) -> None:
        """Add one update: all of it, or none of it and an error."""

    def close(self) -> Outcome:
        """What the round has made."""
        ...


class Aggregation(Protocol):
    """One way of aggregating, as a server holds it for a whole run.

    If it `hides` clients, nothing that a server releases may follow from who was there.
    """

    hides: ClassVar[bool]

    @property
    def guard(self) -> ServerGuard | None:
        """What pays for what is released, if anything is hidden here."""
        ...

    def saved(self) -> dict[str, Any]:
        """What a committed world says of it, as JSON."""
        ...

    def cohort(self, number: int, roster: Sequence[str]) -> list[str]:
        """Who is asked in a round; refuses a round that cannot be paid for."""
        ...

    def chosen(self, number: int, polled: Polled) -> dict[Block, float]:
        """The scores that all choose by, of what was polled."""
        ...

    def begin(self, world: World, shared: Callable[[], Tensors], roster: int) -> OpenSum:
        """Open the sum of a round; `shared` is all that anybody may share in it."""
        ...


@dataclass(frozen=True)
class Plain:
    """Updates are summed as they are, weighted by rows: each param is the mean over its senders."""

    agreement: Agreement
    participation: Participation
    hides: ClassVar[bool] = False

    @property
    def guard(self) -> None:
        """Nothing is hidden here."""
        return None

    def saved(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def cohort(self, number: int, roster: Sequence[str]) -> list[str]:
        """A share of the roster, drawn for the round."""
        return self.participation.cohort(self.agreement.experiment, number, list(roster))

    def chosen(self, number: int, polled: Polled) -> dict[Block, float]:
        """The sum of what was polled."""
        return summed(polled)

    def begin(self, world: World, shared: Callable[[], Tensors], roster: int) -> PlainSum:
        """Open the sum of a round."""
        return PlainSum(self.agreement, world.values, roster)


@dataclass
class PlainSum:
    """A round's exact sums of values, weighted, and of riders, each client's alike."""

    agreement: Agreement
    base: Tensors
    roster: int
    values: ExactSum = field(default_factory=ExactSum)
    riders: ExactSum = field(default_factory=ExactSum)
    drift: Drift = field(default_factory=Drift)
    weight: int = 0
    products: ProductSum = field(init=False)

    def __post_init__(self) -> None:
        agreed = self.agreement
        self.products = ProductSum(agreed.layers, agreed.method.product, self.base)

    def require(self, values: Tensors, riders: Tensors, weight: int) -> None:
        """Refuse what cannot be summed, or would make a rider of the world that is no number."""
        self.values.require(values, weight)
        self.products.require(values)
        self.riders.require(riders, 1)
        for key, change in riders.items():
            if not bool((self.base[key] + change).isfinite().all()):
                raise Rejected(f"{key!r} is too large to be added to what it was")

    def add(self, values: Tensors, riders: Tensors, weight: int) -> None:
        """Add values, products and riders: only the first of the additions can refuse anything."""
        products = self.products.of(values)
        self.products.total.require(products, weight)
        self.values.add(values, weight)
        self.products.total.add(products, weight)
        self.drift.add(values, self.base, weight)
        if riders:
            self.riders.add(riders, 1)
        self.weight += weight

    def close(self) -> Outcome:
        """The mean of each param; of riders, the sum of the changes over the whole roster."""
        means, weights = self.values.mean(), self.values.weights()
        drift = self.drift.by_kind(self.agreement.params, self.base, means, weights)
        made, errors = self.products.close(means, weights)
        means |= made
        for key in means if self.agreement.method.absent else ():
            # Those who did not send it count as not having changed it.
            if weights[key] < self.weight:
                part = weights[key] / self.weight
                means[key] = torch.lerp(self.base[key], means[key], part)
        over = dict.fromkeys(self.riders.weights(), self.roster)
        return Outcome(means, self.riders.mean(over), drift, products=errors)


@dataclass(frozen=True)
class Private:
    """Each client is hidden: changes are clipped and summed alike, and the sum is noisy."""

    agreement: Agreement
    guard: ServerGuard
    hides: ClassVar[bool] = True

    def saved(self) -> dict[str, Any]:
        """How many charges there are: with fewer nobody knows what was spent."""
        return {"charges": len(self.guard.budget.charges)}

    def cohort(self, number: int, roster: Sequence[str]) -> list[str]:
        """Those drawn by the guard's secret, each apart."""
        self.guard.require_room(number, _about(number))
        return self.guard.cohort(roster, number)

    def chosen(self, number: int, polled: Polled) -> dict[Block, float]:
        """The noisy counts of a vote."""
        ballots = [{block for block, named in each.items() if named} for each in polled.values()]
        agreed = self.agreement
        return self.guard.vote(ballots, agreed.blocks, agreed.most, _about(number))

    def begin(self, world: World, shared: Callable[[], Tensors], roster: int) -> PrivateSum:
        """Open the sum of a round over all that anybody may share in it."""
        made = self.guard.mechanism(shared(), roster, world.clip)
        return PrivateSum(self.guard, made, world.values, world.round + 1)


@dataclass
class PrivateSum:
    """A round's exact sum of clipped changes; `within` are those that were short enough.

    How far clients were apart would be a release of its own, that nobody has paid for.
    """

    guard: ServerGuard
    mechanism: Mechanism
    base: Tensors
    number: int
    changes: ExactSum = field(default_factory=ExactSum)
    count: int = 0
    within: int = 0

    def require(self, values: Tensors, riders: Tensors, weight: int) -> None:
        """A change of any length can be clipped; what rides beside it cannot be hidden."""
        if riders:
            raise Rejected(f"{min(riders)!r} cannot be hidden")

    def add(self, values: Tensors, riders: Tensors, weight: int) -> None:
        """Add one clipped change: all clients weigh alike."""
        change = {k: value.double() - self.base[k].double() for k, value in values.items()}
        self.within += self.mechanism.add(self.changes, change)
        self.count += 1

    def close(self) -> Outcome:
        """The values with the noisy mean change, which is charged before it is released."""
        about, within = _about(self.number), f"{self.within} of {self.count}"
        made = self.mechanism
        released = self.guard.release(made, self.changes, self.number, about, within)
        clip = self.guard.moved(made, self.within, self.count, about)
        return Outcome({k: self.base[k] + change for k, change in released.items()}, clip=clip)


def aggregation_of(
    agreement: Agreement, folder: Path, participation: Participation, saved: Mapping[str, Any]
) -> Aggregation:
    """How a run aggregates; `saved` is what its last world said of it."""
    guarantee = agreement.guarantee
    if guarantee is None or guarantee.unit != "client":
        return Plain(agreement, participation)
    guard = ServerGuard(guarantee, folder)
    guard.require_paid(saved["charges"] if saved else 0)
    return Private(agreement, guard)


def contributed(
    agreement: Agreement, rows: int, before: Tensors, after: Tensors
) -> tuple[dict[str, Tensor], int]:
    """At a client: what it sends of what it has trained, and the weight that it says.

    Under a guarantee no weight is said; up to a public cap, rows weigh by how much is sent.
    """
    if agreement.guarantee is None:
        return dict(after), rows
    if not agreement.guarantee.cap:
        return dict(after), 1
    part = capped(rows, agreement.guarantee.cap)
    return {key: torch.lerp(before[key], value, part) for key, value in after.items()}, 1


def summed(polled: Polled) -> dict[Block, float]:
    """The sum of clients' scores; those that are not numbers, or too large to add, are left out."""
    sound = [s for s in polled.values() if all(abs(x) <= LARGEST_SCORE for x in s.values())]
    blocks = dict.fromkeys(block for scores in sound for block in scores)
    return {block: fsum(s[block] for s in sound if block in s) for block in blocks}


def _about(number: int) -> str:
    return f"round {number}"
