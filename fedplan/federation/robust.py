# SPDX-License-Identifier: Apache-2.0
"""Robust aggregation rules: trimmed mean, median, Krum, weight caps and norm clipping.

Clients are processed in the order of their names, so that the order of arrival changes no bit. Each
param is aggregated over the clients that sent it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations
from math import fsum, sqrt

import torch
from torch import Tensor

from fedplan.federation.defence import KRUM, MULTI_KRUM, Defence
from fedplan.federation.drift import Squares
from fedplan.tensors.named import Tensors

OUTLIER_RATIO = 4.0
"""A client is an outlier if its distance from the aggregate exceeds this many references."""
NORM_DIGITS = 6
"""Significant digits of a recorded norm."""
_CHUNK_NUMEL = 2**14
"""Numbers that torch sums on one thread, so that a norm does not depend on the thread count."""
_SORT_COLUMNS = 2**18
"""Numbers of each client that are sorted at a time."""

Values = Mapping[str, Tensors]
"""The values of each client, by its name."""


@dataclass(frozen=True)
class RobustResult:
    """Result of a robust rule.

    `means`: aggregate of each param. `left`: by client, the number of params for which it was
    excluded. `far`: distance ratio of each outlier. `thin`: number of params with fewer senders
    than the rule needs. `squares`: squared distances of clients from the aggregate, by client and
    param.
    """

    means: dict[str, Tensor]
    left: dict[str, int]
    far: dict[str, float]
    thin: int
    squares: Squares


def apply_robust_rule(defence: Defence, values: Values) -> RobustResult:
    """Aggregate each param over its senders by the defence's rule; all clients weigh the same."""
    means, left, thin = dict[str, Tensor](), dict[str, int](), 0
    for group, keys in params_by_senders(values).items():
        selected = _select_clients(defence, {client: values[client] for client in group}, keys)
        trim = defence.trim_count(len(selected))
        for key in keys:
            means[key] = trimmed_mean([values[client][key] for client in selected], trim)
        left |= {c: left.get(c, 0) + len(keys) for c in group if c not in selected}
        thin += len(keys) if len(group) < defence.min_clients else 0
    squares = squared_distances_by_client(values, means)
    return RobustResult(means, dict(sorted(left.items())), _outliers(squares), thin, squares)


def _select_clients(defence: Defence, values: Values, keys: Sequence[str]) -> list[str]:
    """Return the clients to aggregate: those that Krum selects by these params, else all."""
    liars = defence.malicious_clients
    count = {KRUM: 1, MULTI_KRUM: len(values) - liars}.get(defence.rule)
    return sorted(values) if count is None else select_by_krum(values, keys, liars, count)


def _outliers(squares: Squares) -> dict[str, float]:
    """Return by client the ratio of distance to reference distance, if over OUTLIER_RATIO."""
    references, norms = reference_norms(squares), update_norms(squares)
    ratios = {c: norms[c] / references[c] for c in squares if references[c]}
    return {
        client: round_digits(ratio) for client, ratio in ratios.items() if ratio > OUTLIER_RATIO
    }


def params_by_senders(sent: Mapping[str, Iterable[str]]) -> dict[tuple[str, ...], list[str]]:
    """Group params by the clients that sent them.

    `sent` has the params of each client. Returns sorted params by the sorted tuple of senders.
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
    """Cap integer weights so that none exceeds `share` of their sum; 0 caps nothing.

    The cap is the largest integer c with c <= share * sum of min(weight, c). With fewer clients
    than 1 / share there is none, and all get weight 1.
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
    """Return the capped weights of each group of senders, from the reported weights.

    With `absent`, clients that did not send a param count too: the share cap is over all clients.
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
    """Return the reported weight and the smallest used weight of each client that was capped.

    `used` has the weights of each group of senders.
    """
    smallest = _limit_weights(defence, reported)
    for weights in used:
        smallest |= {c: min(smallest[c], weights[c]) for c in weights}
    return {c: (w, smallest[c]) for c, w in sorted(reported.items()) if smallest[c] < w}


def clip_updates(
    values: Values, base: Tensors, times: float
) -> tuple[Values, dict[str, tuple[float, float]]]:
    """Clip each client's change to `times` its reference norm; 0 clips nothing.

    Returns the clipped values, and for each clipped client its norm before and after.
    """
    if not times:
        return values, {}
    squares = squared_distances_by_client(values, base)
    limits = {client: times * norm for client, norm in reference_norms(squares).items()}
    norms = {c: (norm, limits[c]) for c, norm in update_norms(squares).items() if norm > limits[c]}
    clipped = {c: scale_change(values[c], base, limit / norm) for c, (norm, limit) in norms.items()}
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
    """Return the reference norm of each client.

    It is the square root of the sum, over the params that the client sent, of the lower median over
    clients of the squared change. So clients that send different params are comparable.
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


def round_digits(number: float) -> float:
    """Round a number to NORM_DIGITS significant digits."""
    return float(f"{number:.{NORM_DIGITS}g}")


def scale_change(values: Tensors, base: Tensors, factor: float) -> dict[str, Tensor]:
    """Return base + factor * (value - base) for each value, in its dtype."""
    return {
        key: base[key].double().lerp(value.double(), factor).to(value.dtype)
        for key, value in values.items()
    }


def trimmed_mean(tensors: Sequence[Tensor], trim: int) -> Tensor:
    """Return the elementwise mean without the `trim` largest and `trim` smallest numbers."""
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
    """Return the `count` clients with the lowest Krum scores, sorted by name; at least one.

    Blanchard et al., Machine Learning with Adversaries, 2017: the score of a client is the sum of
    its squared distances to its n - liars - 2 nearest clients, over the params `keys`, which all
    clients sent.
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
