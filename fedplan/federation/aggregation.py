# SPDX-License-Identifier: Apache-2.0
"""Aggregation: what becomes of all updates of a round: begun, added to one by one, closed once.

A way of aggregating is one class, with its open sums: `Plain` sums updates as they are, or holds
all of them where a defence asks for that, and `Private` clips and hides each of them; `masked.py`
has the third, and `noised.py` the fourth. A round does not know which it is, and a server asks only
whether it hides clients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import fsum
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from fedplan.errors import FedplanError
from fedplan.federation.agreement import Agreement
from fedplan.federation.defence import MEAN
from fedplan.federation.drift import Drift, around
from fedplan.federation.messages import Rejected
from fedplan.federation.participation import Participation
from fedplan.federation.products import Errors, ProductSum
from fedplan.federation.record import LARGEST_SCORE, Defended, MaskedRecord
from fedplan.federation.robust import Values, bounded, by_senders, caps_of, cut, made_by
from fedplan.federation.world import World
from fedplan.models.params import Block
from fedplan.privacy.guard import ServerGuard
from fedplan.privacy.mechanisms.clipping import capped
from fedplan.privacy.mechanisms.gaussian import Mechanism
from fedplan.tensors.named import Tensors
from fedplan.tensors.sums import LARGEST_SUM, ExactSum, looked_at

Polled = Mapping[str, Mapping[Block, float]]
"""What each client would choose."""


@dataclass(frozen=True)
class Outcome:
    """What a round has made: each param's mean, the changes of riders, and how far all were apart.

    `clip` is the bound of the next round, where one follows the clients' changes; `products` how
    far the product of LoRA's mean sides was from the mean product, where clients share both;
    `defence` what was done against bad weights and values, if there is a defence; `masked` who was
    in a masked sum, and what of it stayed closed.
    """

    means: dict[str, Tensor]
    riders: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    drift: dict[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])
    clip: float = 0.0
    products: Errors | None = None
    defence: Defended | None = None
    masked: MaskedRecord | None = None


class OpenSum(Protocol):
    """The sum of one round, while it is open."""

    def require(self, values: Tensors, riders: Tensors, weight: int) -> None:
        """Refuse what cannot be added, and change nothing."""

    def add(self, client: str, values: Tensors, riders: Tensors, weight: int) -> None:
        """Add one client's update: all of it, or none of it and an error."""

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

    def begin(self, world: World, shared: Callable[[], Tensors], roster: int) -> PlainSum | HeldSum:
        """Open the sum of a round; where a defence needs all updates at once, they are held."""
        kind = HeldSum if self.agreement.defence.holds else PlainSum
        return kind(self.agreement, world.values, roster)


@dataclass(frozen=True)
class Looked:
    """What was seen of some values: the peak of each, and how far each lies from the base."""

    values: Tensors
    peaks: dict[str, int]
    squares: dict[str, float]


@dataclass
class PlainSum:
    """A round's exact sums of values, weighted, and of riders, each client's alike.

    A cap that is a number needs nothing but the update at hand: `capped` are those above it. What
    was looked at last is known when it is added: an update is read twice, not four times.
    """

    agreement: Agreement
    base: Tensors
    roster: int
    values: ExactSum = field(default_factory=ExactSum)
    riders: ExactSum = field(default_factory=ExactSum)
    drift: Drift = field(default_factory=Drift)
    weight: int = 0
    capped: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])
    products: ProductSum = field(init=False)
    looked: Looked | None = None

    def __post_init__(self) -> None:
        agreed = self.agreement
        self.products = ProductSum(agreed.layers, agreed.method.product, self.base)

    def require(self, values: Tensors, riders: Tensors, weight: int) -> None:
        """Refuse what cannot be summed, or would make a rider of the world that is no number."""
        self.looked = Looked(values, *looked_at(values, self.base))
        self.values.require(values, weight, self.looked.peaks)
        self.products.require(values)
        self.riders.require(riders, 1)
        for key, change in riders.items():
            if not bool((self.base[key] + change).isfinite().all()):
                raise Rejected(f"{key!r} is too large to be added to what it was")

    def add(self, client: str, values: Tensors, riders: Tensors, weight: int) -> None:
        """Add values, products and riders: only the first of the additions can refuse anything."""
        said, weight = weight, min(weight, self.agreement.defence.weight_cap or weight)
        products = self.products.of(values)
        self.products.total.require(products, weight)
        known, self.looked = self.looked, None
        if known is None or known.values is not values:
            known = Looked(values, *looked_at(values, self.base))
        self.values.add(values, weight, known.peaks)
        self.products.total.add(products, weight)
        self.drift.count(known.squares, weight)
        if riders:
            self.riders.add(riders, 1)
        self.weight += weight
        self.capped |= {client: (said, weight)} if weight < said else {}

    def merge(self, other: PlainSum) -> None:
        """Add all that another sum of the same round holds, as if its updates had come here."""
        self.values.merge(other.values)
        self.riders.merge(other.riders)
        self.products.total.merge(other.products.total)
        self.drift.merge(other.drift)
        self.weight += other.weight
        self.capped |= other.capped

    def close(self) -> Outcome:
        """The mean of each param; of riders, the sum of the changes over the whole roster."""
        means, weights, agreed = self.values.mean(), self.values.weights(), self.agreement
        self.values = ExactSum()  # a round is closed once: what it took is free for its world
        drift = self.drift.by_kind(agreed.params, self.base, means, weights)
        made, errors = self.products.close(means, weights)
        means |= made
        for key in means if agreed.method.absent else ():
            # Those who did not send it count as not having changed it.
            if weights[key] < self.weight:
                part = weights[key] / self.weight
                means[key] = torch.lerp(self.base[key], means[key], part)
        over = dict.fromkeys(self.riders.weights(), self.roster)
        done = Defended(dict(sorted(self.capped.items()))) if agreed.defence.active else None
        return Outcome(means, self.riders.mean(over), drift, products=errors, defence=done)


@dataclass
class HeldSum:
    """All updates of a round until it closes: what a defence does with one follows from the others.

    So its memory is that of every update at once. All are taken in the order of the clients' names.
    """

    agreement: Agreement
    base: Tensors
    roster: int
    values: dict[str, Tensors] = field(default_factory=dict[str, Tensors])
    riders: dict[str, Tensors] = field(default_factory=dict[str, Tensors])
    weights: dict[str, int] = field(default_factory=dict[str, int])

    def require(self, values: Tensors, riders: Tensors, weight: int) -> None:
        """Refuse what cannot be summed, also if all others were as large: in any order the same."""
        plain = self._plain()
        plain.require(values, riders, weight)
        products = plain.products.of(values) if self.agreement.defence.rule == MEAN else {}
        for tensors, times in ((values, weight), (riders, 1), (products, weight)):
            for key, peak in ExactSum().require(tensors, times).items():
                if peak * times * self.roster >= LARGEST_SUM:
                    raise Rejected(f"{key!r} is too large to be added to what others may send")

    def add(self, client: str, values: Tensors, riders: Tensors, weight: int) -> None:
        """Hold one client's update: a copy, for the values may be lent."""
        self.values[client], self.riders[client] = _copied(values), _copied(riders)
        self.weights[client] = weight

    def merge(self, other: HeldSum) -> None:
        """Hold what another sum of the same round holds, too."""
        self.values |= other.values
        self.riders |= other.riders
        self.weights |= other.weights

    def close(self) -> Outcome:
        """Shorten what is too long, and have the rule make one value of all."""
        defence = self.agreement.defence
        values, clipped = bounded(self.values, self.base, defence.change_bound)
        outcome, done = self._mean(values) if defence.rule == MEAN else self._ruled(values)
        return replace(outcome, defence=replace(done, clipped=clipped))

    def _plain(self) -> PlainSum:
        return PlainSum(self.agreement, self.base, self.roster)

    def _mean(self, values: Values) -> tuple[Outcome, Defended]:
        """The exact mean, by weights that were capped among those who sent the same."""
        total, groups, absent = self._plain(), by_senders(values), self.agreement.method.absent
        caps = caps_of(self.agreement.defence, self.weights, groups, absent=absent)
        for group, keys in groups.items():
            for client in group:
                part = {key: values[client][key] for key in keys}
                total.add(client, part, {}, caps[group][client])
        for riders in filter(None, self.riders.values()):
            total.riders.add(riders, 1)
        total.weight = sum(next(iter(caps.values()), {}).values()) if absent else 0
        return total.close(), Defended(cut(self.agreement.defence, self.weights, caps.values()))

    def _ruled(self, values: Values) -> tuple[Outcome, Defended]:
        """What a rule makes of all, each client alike."""
        agreed, made = self.agreement, made_by(self.agreement.defence, values)
        drift, means = around(agreed.params, self.base, made.means, made.squares), dict(made.means)
        for group, keys in by_senders(values).items() if agreed.method.absent else ():
            part = len(group) / len(values)
            means |= {k: torch.lerp(self.base[k], means[k], part) for k in keys if part < 1}
        done = Defended(left=made.left, far=made.far, thin=made.thin)
        return Outcome(means, drift=drift), done


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
        self.guard.require_room(number, about_round(number))
        return self.guard.cohort(roster, number)

    def chosen(self, number: int, polled: Polled) -> dict[Block, float]:
        """The noisy counts of a vote."""
        ballots = [{block for block, named in each.items() if named} for each in polled.values()]
        agreed = self.agreement
        return self.guard.vote(ballots, agreed.blocks, agreed.most, about_round(number))

    def begin(self, world: World, shared: Callable[[], Tensors], roster: int) -> PrivateSum:
        """Open the sum of a round over all that anybody may share in it."""
        made = self.guard.mechanism(shared(), roster, world.clip)
        return PrivateSum(self.guard, made, world.values, world.round + 1)


@dataclass
class PrivateSum:
    """A round's exact sum of clipped changes; `within` are those that were short enough.

    How far clients were apart would be a release of its own, that nobody has paid for. Without a
    `guard` it is a worker's part of the sum, which is merged and never released.
    """

    guard: ServerGuard | None
    mechanism: Mechanism
    base: Tensors
    number: int
    changes: ExactSum = field(default_factory=ExactSum)
    count: int = 0
    within: int = 0

    def require(self, values: Tensors, riders: Tensors, weight: int) -> None:
        """A change of any length can be clipped; what rides beside it cannot be hidden."""
        require_no_riders(riders)

    def add(self, client: str, values: Tensors, riders: Tensors, weight: int) -> None:
        """Add one clipped change: all clients weigh alike."""
        change = {k: value.double() - self.base[k].double() for k, value in values.items()}
        self.within += self.mechanism.add(self.changes, change)
        self.count += 1

    def merge(self, other: PrivateSum) -> None:
        """Add all that another sum of the same round holds, as if its updates had come here."""
        self.changes.merge(other.changes)
        self.count, self.within = self.count + other.count, self.within + other.within

    def close(self) -> Outcome:
        """The values with the noisy mean change, which is charged before it is released."""
        if self.guard is None:
            raise FedplanError("a part of a private sum is not released: merge it into the round's")
        about, within = about_round(self.number), f"{self.within} of {self.count}"
        made = self.mechanism
        released = self.guard.release(made, self.changes, self.number, about, within)
        clip = self.guard.moved(made, self.within, self.count, about)
        return Outcome({k: self.base[k] + change for k, change in released.items()}, clip=clip)


def contributed(
    agreement: Agreement, rows: int, before: Tensors, after: Tensors
) -> tuple[dict[str, Tensor], int]:
    """At a client: what it sends of what it has trained, and the weight that it says.

    Under a guarantee, or where all count alike, no weight is said; up to a public cap, rows weigh
    by how much is sent.
    """
    if agreement.guarantee is None:
        return dict(after), 1 if agreement.masking.alike else rows
    if not agreement.guarantee.cap:
        return dict(after), 1
    part = capped(rows, agreement.guarantee.cap)
    return {key: torch.lerp(before[key], value, part) for key, value in after.items()}, 1


def summed(polled: Polled) -> dict[Block, float]:
    """The sum of clients' scores; those that are not numbers, or too large to add, are left out."""
    sound = [s for s in polled.values() if all(abs(x) <= LARGEST_SCORE for x in s.values())]
    blocks = dict.fromkeys(block for scores in sound for block in scores)
    return {block: fsum(s[block] for s in sound if block in s) for block in blocks}


def _copied(values: Tensors) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in values.items()}


def require_no_riders(riders: Tensors) -> None:
    """Refuse what rides beside a change: nobody hides it."""
    if riders:
        raise Rejected(f"{min(riders)!r} cannot be hidden")


def about_round(number: int) -> str:
    """What a round's release is charged by."""
    return f"round {number}"
