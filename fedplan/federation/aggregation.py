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
    """Result of aggregating the updates of one round.

    `means`: aggregated value of each param that some client sent, and of base weights that a LoRA
    rule changes, before the server optimizer. `aux`: change to add to the global value of each
    auxiliary tensor. `drift`: by kind of param (mean squared distance of updates from their mean,
    squared step of the mean). `clipping_norm`: norm for the next round if the norm adapts, else 0.
    `products`: relative errors of LoRA products (`lora_product_sum.Errors`); None if not measured.
    `defence`: actions of the robust defence; None if off. `secagg`: secure aggregation's entry for
    the ledger; None if off.
    """

    means: dict[str, Tensor]
    aux: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    drift: dict[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])
    clipping_norm: float = 0.0
    products: Errors | None = None
    defence: DefenceRecord | None = None
    secagg: SecAggRecord | None = None


class Aggregator(Protocol):
    """Aggregates the updates of one round: `require` and `add` each update, then `close` once.

    An update has `values` (trained params by key), `aux` (changes of auxiliary tensors by key) and
    a `weight` (number of examples, 1 or more).
    """

    def require(self, values: Tensors, aux: Tensors, weight: int) -> None:
        """Raise UpdateRejected or FedplanError if an update cannot be added; add nothing."""

    def add(self, client: str, values: Tensors, aux: Tensors, weight: int) -> None:
        """Add one client's update; if this raises, nothing of the update is added."""

    def close(self) -> AggregationResult:
        """Return the aggregate of all added updates; the aggregator cannot be used afterwards."""
        ...


class Aggregation(Protocol):
    """Aggregation strategy of a whole run: draws the clients and aggregates each round's updates.

    `hides_clients`: client-level DP; then no output of the server may depend on which clients took
    part, except through noise. In each round call `sample_clients`, then `open_round`.
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
        """Return the clients of round `number`, drawn from all client names in `roster`.

        Raises PrivacyError if the privacy budget does not suffice for the round.
        """
        ...

    def joint_scores(self, number: int, polled: PollScores) -> dict[Block, float]:
        """Return one score per block for all clients of round `number`, from all clients' scores.

        `polled`: block scores by client; see `score_layers`.
        """
        ...

    def open_round(
        self, global_state: GlobalState, shared: Callable[[], Tensors], roster: int
    ) -> Aggregator:
        """Return an empty Aggregator for round `global_state.round + 1`.

        `shared`: returns the global values of all params that any client may share in the round.
        `roster`: number of all clients of the run.
        """
        ...


@dataclass(frozen=True)
class PlainAggregation:
    """Aggregation without privacy: the mean of a param over its senders, weighted by examples.

    `agreement`: settings of the run; `agreement.defence` may replace the mean by a robust rule.
    `participation`: settings by which the clients of a round are drawn.
    """

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
        """Return the sum of the clients' scores in `polled` by block; `number` is not used.

        A client with any score that is NaN, or above MAX_SCORE in magnitude, is left out entirely;
        {} if no client remains.
        """
        valid = [s for s in polled.values() if all(abs(x) <= MAX_SCORE for x in s.values())]
        blocks = dict.fromkeys(block for scores in valid for block in scores)
        return {block: fsum(s[block] for s in valid if block in s) for block in blocks}

    def open_round(
        self, global_state: GlobalState, shared: Callable[[], Tensors], roster: int
    ) -> MeanAggregator | BufferedAggregator:
        """Return a MeanAggregator, or a BufferedAggregator if the defence needs all updates."""
        kind = BufferedAggregator if self.agreement.defence.buffers_updates else MeanAggregator
        return kind(self.agreement, global_state.values, roster)


@dataclass
class MeanAggregator:
    """Aggregator of one round by exact weighted means, independent of the order of updates.

    Give `agreement`, `base` (global values before the round) and `roster` (number of all clients).
    The other fields are running totals: `values` (weighted sum of params), `aux` (unweighted sum of
    auxiliary tensors), `drift` (squared changes), `weight` (sum of all weights), `products` (LoRA
    products), `capped` (by client, reported and capped weight, if above `defence.max_weight`).
    `last_stats`: values, peaks and squared distances of the update that `require` saw last, reused
    by `add`. Call `require` and `add` per update, or `merge` a part of the round, then `close`.
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
    last_stats: tuple[Tensors, dict[str, int], dict[str, float]] | None = None

    def __post_init__(self) -> None:
        agreed = self.agreement
        self.products = ProductSum(agreed.layers, agreed.method.lora_aggregation, self.base)

    def require(self, values: Tensors, aux: Tensors, weight: int) -> None:
        """Raise an error if an update cannot be added; change no sum.

        SumError: `weight` is not an int from 1 to MAX_WEIGHT, a dtype is no float, a value is not
        finite or above MAX_VALUE, a dtype or shape differs from earlier updates, or a sum of
        `values` or `aux` could overflow. UpdateRejected: the new value of an auxiliary tensor would
        not be finite, or the method aggregates LoRA products and only one factor of a layer was
        sent. All keys must be in `base`. Keeps statistics of `values` in `last_stats`, for `add`.
        """
        peaks, squares = peak_steps_and_squared_distances(values, self.base)
        self.last_stats = values, peaks, squares
        self.values.validate(values, weight, peaks)
        self.products.require_both_sides(values)
        self.aux.validate(aux, 1)
        for key, change in aux.items():
            if not bool((self.base[key] + change).isfinite().all()):
                raise UpdateRejected(f"{key!r} is too large to be added to its present value")

    def add(self, client: str, values: Tensors, aux: Tensors, weight: int) -> None:
        """Add the values, LoRA products and aux tensors of one client's update.

        Call `require` with the same update before. A weight above `defence.max_weight` is lowered
        to that, and both weights are noted in `capped` under `client`. Raises SumError, and adds
        nothing, if a sum of LoRA products could overflow.
        """
        reported, weight = weight, min(weight, self.agreement.defence.max_weight or weight)
        products = self.products.client_products(values)
        self.products.total.validate(products, weight)
        checked, self.last_stats = self.last_stats, None
        if checked is not None and checked[0] is values:
            _, peaks, squares = checked
        else:
            peaks, squares = peak_steps_and_squared_distances(values, self.base)
        self.values.add(values, weight, peaks)
        self.products.total.add(products, weight)
        self.drift.add_squares(squares, weight)
        if aux:
            self.aux.add(aux, 1)
        self.weight += weight
        self.capped |= {client: (reported, weight)} if weight < reported else {}

    def merge(self, other: MeanAggregator) -> None:
        """Add all updates of `other`, an aggregator of other clients of the same round.

        The sums of `other` keep their values. Raises SumError if a sum could overflow.
        """
        self.values.merge(other.values)
        self.aux.merge(other.aux)
        self.products.total.merge(other.products.total)
        self.drift.merge(other.drift)
        self.weight += other.weight
        self.capped |= other.capped

    def close(self) -> AggregationResult:
        """Return the weighted means of params, and of aux tensors the sum of changes / `roster`.

        The mean of a param is over the senders; with `method.absent`, over all clients of the
        round, where clients that did not send the param count as unchanged. If the method has a
        rule for LoRA products, the rule's values replace the means of the factors. The result also
        has drift, errors of products and, if a defence is on, the capped weights. Frees the sum of
        params: call once.
        """
        means, weights, agreed = self.values.mean(), self.values.weights(), self.agreement
        self.values = ExactSum()  # frees memory for the new global state
        drift = self.drift.by_kind(agreed.params, self.base, means, weights)
        merged, errors = self.products.close(means, weights)
        means |= merged
        for key in means if agreed.method.absent else ():
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
    """Aggregator that keeps all updates until `close`, for defences that compare updates.

    Give `agreement`, `base` (global values before the round) and `roster` (number of all clients).
    `values`, `aux`, `weights` hold copies of the updates by client, filled by `add` and `merge`.
    """

    agreement: Agreement
    base: Tensors
    roster: int
    values: dict[str, Tensors] = field(default_factory=dict[str, Tensors])
    aux: dict[str, Tensors] = field(default_factory=dict[str, Tensors])
    weights: dict[str, int] = field(default_factory=dict[str, int])

    def require(self, values: Tensors, aux: Tensors, weight: int) -> None:
        """Raise an error if an update (values, aux tensors, weight) cannot be aggregated.

        Raises as `MeanAggregator.require`, and UpdateRejected if a sum of `roster` updates of this
        size would overflow. The result does not depend on the updates added before.
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
        """Add all updates of `other`, an aggregator of other clients of the same round."""
        self.values |= other.values
        self.aux |= other.aux
        self.weights |= other.weights

    def close(self) -> AggregationResult:
        """Scale down long updates, aggregate all by the defence's rule, and return the result.

        An update longer than `defence.max_norm_ratio` times the client's reference norm is scaled
        down to that norm (`clip_updates`). The rule "mean" weighs clients by capped weights
        (`group_weights`); other rules ignore weights. With `method.absent`, clients that did not
        send a param count as unchanged. Changes no stored update.
        """
        defence, absent = self.agreement.defence, self.agreement.method.absent
        values, clipped = clip_updates(self.values, self.base, defence.max_norm_ratio)
        groups = params_by_senders(values)
        if defence.rule == MEAN:
            total = MeanAggregator(self.agreement, self.base, self.roster)
            caps = group_weights(defence, self.weights, groups, absent=absent)
            for group, keys in groups.items():
                for client in group:
                    update = {key: values[client][key] for key in keys}
                    total.add(client, update, {}, caps[group][client])
            for aux in filter(None, self.aux.values()):
                total.aux.add(aux, 1)
            total.weight = sum(next(iter(caps.values()), {}).values()) if absent else 0
            capped = find_capped_weights(defence, self.weights, caps.values())
            return replace(total.close(), defence=DefenceRecord(capped, clipped=clipped))
        robust = apply_robust_rule(defence, values)
        means = dict(robust.means)
        drift = drift_around(self.agreement.params, self.base, means, robust.squares)
        for group, keys in groups.items() if absent else ():
            fraction = len(group) / len(values)
            if fraction < 1:
                means |= {k: torch.lerp(self.base[k], means[k], fraction) for k in keys}
        record = DefenceRecord(
            clipped=clipped,
            excluded=robust.excluded,
            distance=robust.distance,
            undefended=robust.undefended,
        )
        return AggregationResult(means, drift=drift, defence=record)


def make_contribution(
    agreement: Agreement, example_count: int, before: Tensors, after: Tensors
) -> tuple[dict[str, Tensor], int]:
    """Return the (values, weight) that a client sends after training.

    `before`, `after`: values by key before and after training. The weight is `example_count`, or 1
    under the agreement's differential privacy or equal weights. The values are the tensors of
    `after`, not copied; if the privacy guarantee has a `max_weight` (cap), new tensors
    before + (after - before) * min(example_count, cap) / cap.
    """
    if agreement.guarantee is None:
        return dict(after), 1 if agreement.secagg.equal_weights else example_count
    if not agreement.guarantee.max_weight:
        return dict(after), 1
    fraction = capped_weight(example_count, agreement.guarantee.max_weight)
    return {key: torch.lerp(before[key], value, fraction) for key, value in after.items()}, 1
