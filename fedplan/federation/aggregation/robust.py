# SPDX-License-Identifier: Apache-2.0
"""Robust aggregation: trimmed mean, median, Krum, weight caps and norm clipping.

Clients are processed in the order of their names, so that the order of arrival changes no bit. Each
param is aggregated over the clients that sent it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import combinations
from math import fsum, sqrt
from typing import Any

import torch
from torch import Tensor

from fedplan.federation.aggregation.defence import KRUM, MEAN, MULTI_KRUM, Defence
from fedplan.federation.aggregation.drift import Squares, drift_around, round_digits
from fedplan.federation.aggregation.mean import MeanAggregator
from fedplan.federation.aggregation.protocol import AggregationResult, Aggregator, TensorsAndJson
from fedplan.federation.agreement import Agreement
from fedplan.federation.ledger.records import DefenceRecord
from fedplan.federation.messages import UpdateRejected
from fedplan.tensors.named import Tensors
from fedplan.tensors.sums import MAX_SUM_STEPS, ExactSum

BUFFERED_KIND = "buffered"
"""The "kind" of a partial sum of a BufferedAggregator."""

OUTLIER_RATIO = 4.0
"""A client is an outlier if its distance from the aggregate exceeds this many references."""
_CHUNK_NUMEL = 2**14
"""Numbers that torch sums on one thread, so that a norm does not depend on the thread count."""
_SORT_COLUMNS = 2**18
"""Numbers of each client that are sorted at a time."""

Values = Mapping[str, Tensors]
"""The values of each client, by its name."""


@dataclass
class BufferedAggregator(Aggregator):
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

    def describe(self) -> dict[str, Any]:
        return {"kind": BUFFERED_KIND, "roster": self.roster}

    def empty(self) -> BufferedAggregator:
        return BufferedAggregator(self.agreement, self.base, self.roster)

    def state(self) -> TensorsAndJson:
        # Clients have numbers, because a client's name may contain any character.
        tensors = dict[str, Tensor]()
        for number, client in enumerate(self.values):
            tensors |= {f"{number}/value/{k}": v for k, v in self.values[client].items()}
            tensors |= {f"{number}/aux/{k}": v for k, v in self.aux[client].items()}
        clients, weights = list(self.values), [self.weights[client] for client in self.values]
        return tensors, {"kind": BUFFERED_KIND, "clients": clients, "weights": weights}

    def merge(self, tensors: Tensors, fields: Mapping[str, Any]) -> None:
        self._require_kind(BUFFERED_KIND, fields)
        clients: list[str] = fields["clients"]
        groups = {group: [dict[str, Tensor]() for _ in clients] for group in ("value", "aux")}
        for name, tensor in tensors.items():
            number, group, key = name.split("/", 2)
            groups[group][int(number)][key] = tensor
        self.values |= zip(clients, groups["value"], strict=True)
        self.aux |= zip(clients, groups["aux"], strict=True)
        self.weights |= zip(clients, fields["weights"], strict=True)

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


@dataclass(frozen=True)
class RobustResult:
    """Result of a robust aggregation rule.

    `means`: aggregate of each param. `excluded`: by client, the number of params for which the rule
    excluded the client. `distance`: by outlier client, the distance from the aggregate, divided by
    the reference distance. `undefended`: number of params with fewer senders than the rule needs.
    `squares`: squared distances of clients from the aggregate, by client and param.
    """

    means: dict[str, Tensor]
    excluded: dict[str, int]
    distance: dict[str, float]
    undefended: int
    squares: Squares


def apply_robust_rule(defence: Defence, values: Values) -> RobustResult:
    """Aggregate each param over its senders by the defence's rule, without weights.

    `values`: by client, the values by param. A param with fewer senders than
    `defence.min_clients` is aggregated too, and counted in the result's `undefended`. The rules of
    Krum leave out clients, counted in `excluded`. Outliers are only reported, in `distance`: the
    clients whose distance from the aggregate is over OUTLIER_RATIO times their reference
    (`reference_norms`).
    """
    means, excluded, undefended = dict[str, Tensor](), dict[str, int](), 0
    liars = defence.malicious_clients
    for group, keys in params_by_senders(values).items():
        selected = list(group)
        count = {KRUM: 1, MULTI_KRUM: len(group) - liars}.get(defence.rule)
        if count is not None:
            selected = select_by_krum({c: values[c] for c in group}, keys, liars, count)
        trim = defence.trim_count(len(selected))
        for key in keys:
            means[key] = trimmed_mean([values[client][key] for client in selected], trim)
        excluded |= {c: excluded.get(c, 0) + len(keys) for c in group if c not in selected}
        undefended += len(keys) if len(group) < defence.min_clients else 0
    squares = squared_distances_by_client(values, means)
    references, norms = reference_norms(squares), update_norms(squares)
    ratios = {c: norms[c] / references[c] for c in squares if references[c]}
    distance = {c: round_digits(ratio) for c, ratio in ratios.items() if ratio > OUTLIER_RATIO}
    return RobustResult(means, dict(sorted(excluded.items())), distance, undefended, squares)


def params_by_senders(sent: Mapping[str, Iterable[str]]) -> dict[tuple[str, ...], list[str]]:
    """Group params with the same senders.

    `sent`: param keys by client. Returns the sorted keys by the sorted tuple of their senders.
    """
    senders = dict[str, list[str]]()
    for client in sorted(sent):
        for key in sent[client]:
            senders.setdefault(key, []).append(client)
    groups = dict[tuple[str, ...], list[str]]()
    for key in sorted(senders):
        groups.setdefault(tuple(senders[key]), []).append(key)
    return groups


def cap_weights(weights: Mapping[str, int], share: float) -> dict[str, int]:
    """Return the integer weights, capped so that none exceeds `share` of their sum.

    A `share` of 0 caps nothing. The cap is the largest integer c with c <= share * sum of
    min(weight, c). With fewer clients than 1 / share no c exists, and all get weight 1.
    """
    if not share:
        return dict(weights)
    part, low, high = Fraction(share), 1, max(weights.values(), default=1)
    while low < high:  # binary search: all integers up to the cap satisfy the condition
        middle = (low + high + 1) // 2
        fits = middle <= part * sum(min(weight, middle) for weight in weights.values())
        low, high = (middle, high) if fits else (low, middle - 1)
    return {client: min(weight, low) for client, weight in weights.items()}


def group_weights(
    defence: Defence,
    reported: Mapping[str, int],
    groups: Iterable[tuple[str, ...]],
    *,
    absent: bool,
) -> dict[tuple[str, ...], dict[str, int]]:
    """Return by group (the clients that sent the same params) the capped weight of each client.

    `reported`: weight by client. Weights above `defence.max_weight` are lowered to that; then
    `cap_weights` limits them to `defence.max_weight_fraction` of a sum. The sum is over the group.
    With `absent`, the sum is over all clients, and each group has the weights of all clients.
    """
    limited = _limit_weights(defence, reported)
    share = defence.max_weight_fraction
    capped = cap_weights(limited, share)
    return {
        group: capped if absent else cap_weights({c: limited[c] for c in group}, share)
        for group in groups
    }


def _limit_weights(defence: Defence, reported: Mapping[str, int]) -> dict[str, int]:
    """Return the weights limited to the defence's absolute cap."""
    return {client: min(w, defence.max_weight or w) for client, w in sorted(reported.items())}


def find_capped_weights(
    defence: Defence, reported: Mapping[str, int], used: Iterable[Mapping[str, int]]
) -> dict[str, tuple[int, int]]:
    """Return (reported weight, smallest used weight) of each client that the defence capped.

    `used`: the weights by client of each group of senders, as `group_weights` returns.
    """
    smallest = _limit_weights(defence, reported)
    for weights in used:
        smallest |= {c: min(smallest[c], weights[c]) for c in weights}
    return {c: (w, smallest[c]) for c, w in sorted(reported.items()) if smallest[c] < w}


def clip_updates(
    values: Values, base: Tensors, times: float
) -> tuple[Values, dict[str, tuple[float, float]]]:
    """Clip each client's change from `base` to `times` the client's reference norm.

    Returns (values with clipped ones replaced, by clipped client the norm before and after). With
    0 `times` nothing is clipped. See `reference_norms`; changes no tensor.
    """
    if not times:
        return values, {}
    squares = squared_distances_by_client(values, base)
    limits = {client: times * norm for client, norm in reference_norms(squares).items()}
    norms = {c: (norm, limits[c]) for c, norm in update_norms(squares).items() if norm > limits[c]}
    clipped = {
        client: {
            key: base[key].double().lerp(value.double(), limit / norm).to(value.dtype)
            for key, value in values[client].items()
        }
        for client, (norm, limit) in norms.items()
    }
    rounded = {c: (round_digits(norm), round_digits(limit)) for c, (norm, limit) in norms.items()}
    return {**values, **clipped}, rounded


def squared_distances_by_client(values: Values, others: Tensors) -> dict[str, dict[str, float]]:
    """Return the squared distance of each client's params from `others`, by client and param."""
    return {
        client: {key: squared_distance(value, others[key]) for key, value in sorted(sent.items())}
        for client, sent in sorted(values.items())
    }


def squared_distance(one: Tensor, other: Tensor) -> float:
    """Return the squared L2 distance of two tensors, independent of the thread count."""
    chunks = zip(
        one.flatten().split(_CHUNK_NUMEL), other.flatten().split(_CHUNK_NUMEL), strict=True
    )
    return fsum(float((a.double() - b.double()).square().sum()) for a, b in chunks)


def reference_norms(squares: Squares) -> dict[str, float]:
    """Return the usual norm of each client's change, given the params that the client sent.

    That is the square root of the sum, over these params, of the lower median over clients of the
    squared change. So clients that send different params are comparable.
    """
    by_param = dict[str, list[float]]()
    for client_squares in squares.values():
        for key, square in client_squares.items():
            by_param.setdefault(key, []).append(square)
    # The lower median: of two clients that differ, the shorter is believed.
    medians = {key: sorted(each)[(len(each) - 1) // 2] for key, each in by_param.items()}
    return {client: sqrt(fsum(medians[key] for key in sent)) for client, sent in squares.items()}


def update_norms(squares: Squares) -> dict[str, float]:
    """Return the L2 norm of each client's change over all params that it sent."""
    return {client: sqrt(fsum(sent.values())) for client, sent in squares.items()}


def trimmed_mean(tensors: Sequence[Tensor], trim: int) -> Tensor:
    """Return the elementwise mean of equal-shaped tensors, in their dtype.

    Leaves out the `trim` largest and `trim` smallest of each element's numbers; there must be more
    than 2 * `trim` tensors.
    """
    first, middle = tensors[0], slice(trim, len(tensors) - trim)
    result, flat = torch.empty(first.numel(), dtype=first.dtype), [t.flatten() for t in tensors]
    for start in range(0, first.numel(), _SORT_COLUMNS):
        columns = slice(start, start + _SORT_COLUMNS)
        ranked = torch.stack([t[columns] for t in flat]).sort(dim=0).values[middle]
        mean = ranked.double().sum(dim=0) / len(ranked)
        # Rounding must not leave the range of the kept numbers.
        result[columns] = mean.to(first.dtype).clamp(ranked[0], ranked[-1])
    return result.view(first.shape)


def select_by_krum(values: Values, keys: Sequence[str], liars: int, count: int) -> list[str]:
    """Return the `count` clients with the lowest Krum scores, sorted by name; one if `count` < 1.

    `values`: by client, the values by param. `liars`: number of malicious clients to tolerate.
    Blanchard et al., Machine Learning with Adversaries, 2017: the score of a client is the sum of
    squared distances to the n - liars - 2 nearest of n clients (at least one), over the params
    `keys`, which all clients sent.
    """
    names = sorted(values)
    nearest = max(1, len(names) - liars - 2)
    distances: dict[str, list[float]] = {name: [] for name in names}
    for one, other in combinations(names, 2):
        distance = fsum(squared_distance(values[one][key], values[other][key]) for key in keys)
        distances[one].append(distance)
        distances[other].append(distance)
    scores = {name: fsum(sorted(distances[name])[:nearest]) for name in names}
    return sorted(sorted(names, key=lambda name: (scores[name], name))[: max(1, count)])
