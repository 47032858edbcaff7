# SPDX-License-Identifier: Apache-2.0
"""Aggregation of updates: plain means and robust rules.

An `Aggregation` is the strategy of a run; its `open_round` returns the `Aggregator` of one round.
Other strategies: `client_dp`, and under secure aggregation `secagg_aggregator`, `distributed_dp`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import fsum
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from fedplan.federation.agreement import Agreement
from fedplan.federation.defence import MEAN
from fedplan.federation.drift import Drift, drift_around
from fedplan.federation.global_state import GlobalState
from fedplan.federation.lora_product_sum import Errors, ProductSum
from fedplan.federation.messages import UpdateRejected
from fedplan.federation.participation import Participation
from fedplan.federation.record import MAX_SCORE, DefenceRecord, SecAggRecord
from fedplan.federation.robust import (
    Values,
    apply_robust_rule,
    clip_updates,
    find_capped_weights,
    group_weights,
    params_by_senders,
)
from fedplan.models.params import Block
from fedplan.privacy.guard import ServerGuard
from fedplan.privacy.mechanisms.clipping import capped_weight
from fedplan.tensors.named import Tensors
from fedplan.tensors.sums import MAX_SUM_STEPS, ExactSum, peak_steps_and_squared_distances

PollScores = Mapping[str, Mapping[Block, float]]
"""Scores of blocks by client, from a poll."""


@dataclass(frozen=True)
class AggregationResult:
    """Result of aggregating one round.

    `means`: aggregated value of each param. `aux`: change of each auxiliary tensor.
    `drift`: by kind of param, the mean squared distance of updates from their mean, and the squared
    step of the mean.
    `clipping_norm`: norm for the next round, if it adapts. `products`: errors of averaging LoRA
    factors instead of products. `defence`: actions of the defence. `masked`: record of secure
    aggregation.
    """

    means: dict[str, Tensor]
    aux: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    drift: dict[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])
    clipping_norm: float = 0.0
    products: Errors | None = None
    defence: DefenceRecord | None = None
    masked: SecAggRecord | None = None


class Aggregator(Protocol):
    """Aggregates the updates of one round: `require` and `add` each update, then `close` once."""

    def require(self, values: Tensors, aux: Tensors, weight: int) -> None:
        """Raise UpdateRejected or FedplanError if an update cannot be added; change nothing."""

    def add(self, client: str, values: Tensors, aux: Tensors, weight: int) -> None:
        """Add one client's update; if this raises, nothing of the update is added."""

    def close(self) -> AggregationResult:
        """Return the aggregated result."""
        ...


class Aggregation(Protocol):
    """Aggregation strategy of a whole run.

    `hides_clients`: client-level DP; then no output of the server may depend on which clients took
    part, except through noise.
    """

    hides_clients: ClassVar[bool]

    @property
    def guard(self) -> ServerGuard | None:
        """The server's privacy guard with its budget; None without client-level DP there."""
        ...

    def checkpoint_meta(self) -> dict[str, Any]:
        """Return fields for the metadata of the server's checkpoint."""
        ...

    def sample_clients(self, number: int, roster: Sequence[str]) -> list[str]:
        """Return the clients of a round, drawn from all names in `roster`.

        Raises PrivacyError if the privacy budget does not suffice for the round.
        """
        ...

    def joint_scores(self, number: int, polled: PollScores) -> dict[Block, float]:
        """Return the scores by which all clients choose blocks, from the scores of a poll."""
        ...

    def open_round(
        self, global_state: GlobalState, shared: Callable[[], Tensors], roster: int
    ) -> Aggregator:
        """Return the aggregator of the next round.

        `shared`: returns the values of all params that any client may share in the round.
        `roster`: number of all clients.
        """
        ...


@dataclass(frozen=True)
class PlainAggregation:
    """Means of updates, weighted by examples, over the clients that sent a param; or a defence."""

    agreement: Agreement
    participation: Participation
    hides_clients: ClassVar[bool] = False

    @property
    def guard(self) -> None:
        """None: there is no privacy budget."""
        return None

    def checkpoint_meta(self) -> dict[str, Any]:
        """Return an empty dict."""
        return {}

    def sample_clients(self, number: int, roster: Sequence[str]) -> list[str]:
        """Return the clients drawn by the study's participation settings."""
        return self.participation.cohort(self.agreement.experiment, number, list(roster))

    def joint_scores(self, number: int, polled: PollScores) -> dict[Block, float]:
        """Return the sums of all clients' scores."""
        return sum_poll_scores(polled)

    def open_round(
        self, global_state: GlobalState, shared: Callable[[], Tensors], roster: int
    ) -> MeanAggregator | BufferedAggregator:
        """Return a MeanAggregator, or a BufferedAggregator if the defence needs all updates."""
        kind = BufferedAggregator if self.agreement.defence.buffers_updates else MeanAggregator
        return kind(self.agreement, global_state.values, roster)


@dataclass(frozen=True)
class UpdateStats:
    """Statistics of one update by key.

    `peaks`: largest absolute values, in steps of the exact sum.
    `squares`: squared distances from the base.
    """

    values: Tensors
    peaks: dict[str, int]
    squares: dict[str, float]


@dataclass
class MeanAggregator:
    """Exact weighted means of values, and unweighted sums of auxiliary tensors.

    `base`: global values before the round. `roster`: number of all clients. `weight`: total weight.
    `capped`: clients above the defence's weight cap, with their reported and capped weights.
    `products`: sums of LoRA products. `last_stats`: statistics of the update that `require` saw
    last, so that `add` need not compute them again.
    """

    agreement: Agreement
    base: Tensors
    roster: int
    values: ExactSum = field(default_factory=ExactSum)
    aux: ExactSum = field(default_factory=ExactSum)
    drift: Drift = field(default_factory=Drift)
    weight: int = 0
    capped: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])
    products: ProductSum = field(init=False)
    last_stats: UpdateStats | None = None

    def __post_init__(self) -> None:
        agreed = self.agreement
        self.products = ProductSum(agreed.layers, agreed.method.lora_aggregation, self.base)

    def require(self, values: Tensors, aux: Tensors, weight: int) -> None:
        """Raise an error if the update overflows a sum or makes an aux tensor not finite."""
        self.last_stats = UpdateStats(values, *peak_steps_and_squared_distances(values, self.base))
        self.values.validate(values, weight, self.last_stats.peaks)
        self.products.require_both_sides(values)
        self.aux.validate(aux, 1)
        for key, change in aux.items():
            if not bool((self.base[key] + change).isfinite().all()):
                raise UpdateRejected(f"{key!r} is too large to be added to its present value")

    def add(self, client: str, values: Tensors, aux: Tensors, weight: int) -> None:
        """Add values, LoRA products and aux tensors, with the weight capped by the defence."""
        reported, weight = weight, min(weight, self.agreement.defence.max_weight or weight)
        products = self.products.client_products(values)
        self.products.total.validate(products, weight)
        stats, self.last_stats = self.last_stats, None
        if stats is None or stats.values is not values:
            stats = UpdateStats(values, *peak_steps_and_squared_distances(values, self.base))
        self.values.add(values, weight, stats.peaks)
        self.products.total.add(products, weight)
        self.drift.add_squares(stats.squares, weight)
        if aux:
            self.aux.add(aux, 1)
        self.weight += weight
        self.capped |= {client: (reported, weight)} if weight < reported else {}

    def merge(self, other: MeanAggregator) -> None:
        """Add all updates of another aggregator of the same round."""
        self.values.merge(other.values)
        self.aux.merge(other.aux)
        self.products.total.merge(other.products.total)
        self.drift.merge(other.drift)
        self.weight += other.weight
        self.capped |= other.capped

    def close(self) -> AggregationResult:
        """Return the means; of auxiliary tensors, the sum of changes divided by the roster.

        With `method.absent`, clients that did not send a param count as unchanged. The sums are
        released, so this can be called only once.
        """
        means, weights, agreed = self.values.mean(), self.values.weights(), self.agreement
        self.values = ExactSum()  # frees memory for the new global state
        drift = self.drift.by_kind(agreed.params, self.base, means, weights)
        merged, errors = self.products.close(means, weights)
        means |= merged
        for key in means if agreed.method.absent else ():
            # Clients that did not send the param count as not having changed it.
            if weights[key] < self.weight:
                fraction = weights[key] / self.weight
                means[key] = torch.lerp(self.base[key], means[key], fraction)
        divisors = dict.fromkeys(self.aux.weights(), self.roster)
        record = DefenceRecord(dict(sorted(self.capped.items()))) if agreed.defence.active else None
        return AggregationResult(
            means, self.aux.mean(divisors), drift, products=errors, defence=record
        )


@dataclass
class BufferedAggregator:
    """Keeps all updates of a round until it closes, for defences that compare updates.

    `base`, `roster`: as in MeanAggregator. `values`, `aux`, `weights`: updates by client.
    """

    agreement: Agreement
    base: Tensors
    roster: int
    values: dict[str, Tensors] = field(default_factory=dict[str, Tensors])
    aux: dict[str, Tensors] = field(default_factory=dict[str, Tensors])
    weights: dict[str, int] = field(default_factory=dict[str, int])

    def require(self, values: Tensors, aux: Tensors, weight: int) -> None:
        """Raise an error if the update would overflow a sum of `roster` updates as large.

        So whether an update is rejected does not depend on the order of the updates.
        """
        aggregator = MeanAggregator(self.agreement, self.base, self.roster)
        aggregator.require(values, aux, weight)
        is_mean = self.agreement.defence.rule == MEAN
        products = aggregator.products.client_products(values) if is_mean else {}
        for tensors, times in ((values, weight), (aux, 1), (products, weight)):
            for key, peak in ExactSum().validate(tensors, times).items():
                if peak * times * self.roster >= MAX_SUM_STEPS:
                    raise UpdateRejected(f"{key!r} is too large to be summed with other updates")

    def add(self, client: str, values: Tensors, aux: Tensors, weight: int) -> None:
        """Store a copy of one client's update, since the tensors may be the live model's."""
        self.values[client] = {key: value.clone() for key, value in values.items()}
        self.aux[client] = {key: value.clone() for key, value in aux.items()}
        self.weights[client] = weight

    def merge(self, other: BufferedAggregator) -> None:
        """Add all updates of another aggregator of the same round."""
        self.values |= other.values
        self.aux |= other.aux
        self.weights |= other.weights

    def close(self) -> AggregationResult:
        """Clip long updates, aggregate all by the defence's rule, and return the result."""
        defence = self.agreement.defence
        values, clipped = clip_updates(self.values, self.base, defence.max_norm_ratio)
        aggregate = self._capped_mean if defence.rule == MEAN else self._robust_aggregate
        result, record = aggregate(values)
        return replace(result, defence=replace(record, clipped=clipped))

    def _capped_mean(self, values: Values) -> tuple[AggregationResult, DefenceRecord]:
        """Return the exact mean of clipped updates, with weights capped among a param's senders."""
        defence, absent = self.agreement.defence, self.agreement.method.absent
        total = MeanAggregator(self.agreement, self.base, self.roster)
        groups = params_by_senders(values)
        caps = group_weights(defence, self.weights, groups, absent=absent)
        for group, keys in groups.items():
            for client in group:
                update = {key: values[client][key] for key in keys}
                total.add(client, update, {}, caps[group][client])
        for aux in filter(None, self.aux.values()):
            total.aux.add(aux, 1)
        total.weight = sum(next(iter(caps.values()), {}).values()) if absent else 0
        capped = find_capped_weights(defence, self.weights, caps.values())
        return total.close(), DefenceRecord(capped)

    def _robust_aggregate(self, values: Values) -> tuple[AggregationResult, DefenceRecord]:
        """Return the result of a robust rule over clipped updates, without weights."""
        agreed, robust = self.agreement, apply_robust_rule(self.agreement.defence, values)
        drift = drift_around(agreed.params, self.base, robust.means, robust.squares)
        means = dict(robust.means)
        for group, keys in params_by_senders(values).items() if agreed.method.absent else ():
            fraction = len(group) / len(values)
            if fraction < 1:
                means |= {k: torch.lerp(self.base[k], means[k], fraction) for k in keys}
        record = DefenceRecord(left=robust.left, far=robust.far, thin=robust.thin)
        return AggregationResult(means, drift=drift), record


def make_contribution(
    agreement: Agreement, example_count: int, before: Tensors, after: Tensors
) -> tuple[dict[str, Tensor], int]:
    """Return the values that a client sends, and its weight.

    `before`, `after`: values before and after training. The weight is the number of examples; it is
    1 under differential privacy or with equal weights. With a public cap under privacy, the values
    are moved only by the fraction min(examples, cap) / cap of the change.
    """
    if agreement.guarantee is None:
        return dict(after), 1 if agreement.secagg.equal_weights else example_count
    if not agreement.guarantee.max_weight:
        return dict(after), 1
    fraction = capped_weight(example_count, agreement.guarantee.max_weight)
    return {key: torch.lerp(before[key], value, fraction) for key, value in after.items()}, 1


def sum_poll_scores(polled: PollScores) -> dict[Block, float]:
    """Return the sum of clients' scores by block.

    A client with a score that is not finite, or larger than MAX_SCORE, is left out.
    """
    valid = [s for s in polled.values() if all(abs(x) <= MAX_SCORE for x in s.values())]
    blocks = dict.fromkeys(block for scores in valid for block in scores)
    return {block: fsum(s[block] for s in valid if block in s) for block in blocks}
