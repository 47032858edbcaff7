# SPDX-License-Identifier: Apache-2.0
"""The weighted mean of a round's updates, exact in any order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from fedplan.federation.aggregation.drift import Drift
from fedplan.federation.aggregation.lora_products import ProductSum
from fedplan.federation.aggregation.protocol import (
    AggregationResult,
    Aggregator,
    TensorsAndJson,
    merge_sums,
    sums_state,
)
from fedplan.federation.agreement import Agreement
from fedplan.federation.ledger.records import DefenceRecord
from fedplan.federation.messages import UpdateRejected
from fedplan.tensors.chunks import ChunkedTensors, chunk_tensors
from fedplan.tensors.named import Tensors, aux_names
from fedplan.tensors.sums import ExactSum, SumError, peak_steps_and_squared_distances

MEAN_KIND = "mean"
"""The "kind" of a partial sum of a MeanAggregator."""


class _UpdateStats(NamedTuple):
    """An update's values in chunks, its peaks in grid steps, and squared distances from the base.

    The last two are by key.
    """

    values: Tensors
    chunked: ChunkedTensors
    peaks: dict[str, int]
    squares: dict[str, float]


@dataclass
class MeanAggregator(Aggregator):
    """Aggregator of one round by exact weighted means, independent of the order of updates.

    Give `agreement`, `base` (global values before the round) and `roster` (number of all clients).
    The other fields are running totals: `values` (weighted sum of params), `aux` (unweighted sum of
    auxiliary tensors), `drift` (squared changes), `weight` (sum of all weights), `products` (LoRA
    products), `capped` (by client, reported and capped weight, if above `defence.max_weight`).
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
    _last: _UpdateStats | None = field(default=None, init=False)
    _base: ChunkedTensors | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        agreed = self.agreement
        self.products = ProductSum(agreed.layers, agreed.method.lora_aggregation, self.base)

    def require(self, values: Tensors, aux: Tensors, weight: int) -> None:
        """Raise an error if an update cannot be added; change no sum. Call before `add`.

        SumError: `weight` is not an int from 1 to MAX_WEIGHT, a dtype is no float, a value is not
        finite or above MAX_VALUE, a dtype or shape differs from earlier updates, or a sum of
        `values` or `aux` could overflow. UpdateRejected: the new value of an auxiliary tensor would
        not be finite, or the method aggregates LoRA products and only one factor of a layer was
        sent. All keys must be in `base`.
        """
        self.values.validate(values, weight, self._stats(values).peaks)
        self.products.require_both_sides(values)
        self.aux.validate(aux, 1)
        _require_addable(self.base, aux)

    def add(self, client: str, values: Tensors, aux: Tensors, weight: int) -> None:
        """Add one client's update, with a weight of at most `defence.max_weight`.

        Raises SumError, and adds nothing, if a sum of LoRA products could overflow.
        """
        reported, weight = weight, min(weight, self.agreement.defence.max_weight or weight)
        products = self.products.client_products(values)
        self.products.total.validate(products, weight)
        stats, self._last = self._stats(values), None
        self.values.add(values, weight, stats.peaks, stats.chunked)
        self.products.total.add(products, weight)
        self.drift.add(stats.squares, weight)
        if aux:
            self.aux.add(aux, 1)
        self.weight += weight
        self.capped |= {client: (reported, weight)} if weight < reported else {}

    def _stats(self, values: Tensors) -> _UpdateStats:
        """Return peaks and squared distances of an update; of the last one from the cache."""
        if self._last is None or self._last.values is not values:
            # Finding the chunks of many small tensors takes as long as a pass over them.
            base = self._base if self._base and self._base.fits(values) else None
            chunked = chunk_tensors(values, base)
            self._base = base or chunk_tensors(self.base, chunked)
            peaks, squares = peak_steps_and_squared_distances(values, chunked, self._base)
            self._last = _UpdateStats(values, chunked, peaks, squares)
        return self._last

    def describe(self) -> dict[str, Any]:
        return {"kind": MEAN_KIND, "roster": self.roster}

    def empty(self) -> MeanAggregator:
        return MeanAggregator(self.agreement, self.base, self.roster)

    def state(self) -> TensorsAndJson:
        facts = {"squares": self.drift.squares, "weight": self.weight, "capped": self.capped}
        return sums_state(MEAN_KIND, self._sums, facts)

    def merge(self, tensors: Tensors, fields: Mapping[str, Any]) -> None:
        self._require_kind(MEAN_KIND, fields)
        merge_sums(self._sums, tensors, fields)
        self.drift.merge(Drift(fields["squares"]))
        self.weight += fields["weight"]
        self.capped |= {name: (weight, cap) for name, (weight, cap) in fields["capped"].items()}

    def merge_reported(
        self, tensors: Tensors, fields: Mapping[str, Any], turns: Mapping[str, tuple[set[str], int]]
    ) -> None:
        """Add a `state` of another party, if it agrees with the turns that it claims to contain.

        `turns`: by client, the keys that it shares and its weight. Raises SumError or
        UpdateRejected, and adds nothing, for another state, or if a sum could overflow.
        """
        cap, aux_kinds = self.agreement.defence.max_weight, self.agreement.method.aux
        weights = {name: min(weight, cap or weight) for name, (_, weight) in turns.items()}
        like = {key: value.to("meta") for key, value in self.base.items()}
        expected = {kind: dict[str, tuple[Tensor, int, int]]() for kind in self._sums}
        for name, (keys, _) in turns.items():
            values = {key: like[key] for key in keys}
            added = {
                "values": (values, weights[name]),
                "aux": ({key: like[key] for key in aux_names(keys, aux_kinds)}, 1),
                "products": (self.products.client_products(values), weights[name]),
            }
            for kind, (parts, weight) in added.items():
                for key, part in parts.items():
                    _, before, senders = expected[kind].get(key, (part, 0, 0))
                    expected[kind][key] = part, before + weight, senders + 1
        facts, squares = fields.get("sums"), fields.get("squares")
        if (
            fields.get("kind") != MEAN_KIND
            or not isinstance(facts, dict)
            or facts.keys() != expected.keys()
        ):
            raise SumError("the sum is of another kind than the round's")
        if not isinstance(squares, dict) or squares.keys() != expected["values"].keys():
            raise SumError("the squared distances are not those of the summed params")
        drift = Drift(cast("dict[str, int]", squares))
        if any(type(n) is not int or not 0 <= n < 2**300 for n in drift.squares.values()):
            raise SumError("a squared distance is out of range")
        sums = dict[str, ExactSum]()
        for kind, total in self._sums.items():
            raw = {
                k.removeprefix(f"{kind}/"): v
                for k, v in tensors.items()
                if k.startswith(f"{kind}/")
            }
            sums[kind] = ExactSum.read_raw(raw, facts[kind], expected[kind])
            total.require_mergeable(sums[kind])
        _require_addable(self.base, sums["aux"].mean())
        for kind, total in self._sums.items():
            total.merge(sums[kind])
        self.drift.merge(drift)
        self.weight += sum(weights.values())
        both = {name: (weight, weights[name]) for name, (_, weight) in turns.items()}
        self.capped |= {name: pair for name, pair in both.items() if pair[1] < pair[0]}

    @property
    def _sums(self) -> dict[str, ExactSum]:
        return {"values": self.values, "aux": self.aux, "products": self.products.total}

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
        fractions = {key: count / self.roster for key, count in weights.items()}
        return AggregationResult(
            means,
            self.aux.mean(divisors),
            drift,
            products=errors,
            defence=record,
            fractions=fractions if agreed.method.equal_weights else {},
        )


def _require_addable(base: Tensors, aux: Tensors) -> None:
    """Raise UpdateRejected if a change of an auxiliary tensor gives a value that is not finite."""
    for key, change in aux.items():
        if not bool((base[key] + change).isfinite().all()):
            raise UpdateRejected(f"{key!r} is too large to be added to its present value")
