# SPDX-License-Identifier: Apache-2.0
"""Robust rules: the arithmetic of a defence, over all that the clients of a round sent.

Clients are taken in the order of their names: who came first changes no bit. Each param is of those
who sent it.
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

FAR = 4.0
"""A client is far if it lies more than so many times as far from a rule's values as is usual."""
DIGITS = 6
"""Significant digits of a length that are told."""
_PIECE = 2**14
"""Numbers that torch sums on one thread, so that no number of threads changes a length."""
_COLUMNS = 2**18
"""Numbers of each client that are ranked at a time."""

Values = Mapping[str, Tensors]
"""What each client sent, by its name."""


@dataclass(frozen=True)
class Made:
    """What a rule made of all that came: each param, whom it left out, and who lay how far off.

    `squares` are the squared distances of what each client sent from what was made.
    """

    means: dict[str, Tensor]
    left: dict[str, int]
    far: dict[str, float]
    thin: int
    squares: Squares


def made_by(defence: Defence, values: Values) -> Made:
    """Each param over those who sent it, by a rule that counts all of them alike."""
    means, left, thin = dict[str, Tensor](), dict[str, int](), 0
    for group, keys in by_senders(values).items():
        taken = _taken(defence, {client: values[client] for client in group}, keys)
        trim = defence.trim(len(taken))
        means |= {key: trimmed([values[client][key] for client in taken], trim) for key in keys}
        left |= {c: left.get(c, 0) + len(keys) for c in group if c not in taken}
        thin += len(keys) if len(group) < defence.least else 0
    squares = squares_of(values, means)
    return Made(means, dict(sorted(left.items())), _far(squares), thin, squares)


def _taken(defence: Defence, values: Values, keys: Sequence[str]) -> list[str]:
    """The clients of whom some params are taken, all of whom sent these."""
    liars = defence.liars
    count = {KRUM: 1, MULTI_KRUM: len(values) - liars}.get(defence.rule)
    return sorted(values) if count is None else krum(values, keys, liars, count)


def _far(squares: Squares) -> dict[str, float]:
    """Who lies much further from what was made than is usual, and how many times as far."""
    near, found = usual(squares), lengths(squares)
    times = {client: found[client] / near[client] for client in squares if near[client]}
    return {client: short(each) for client, each in times.items() if each > FAR}


def by_senders(sent: Mapping[str, Iterable[str]]) -> dict[tuple[str, ...], list[str]]:
    """The params that came from the same clients, by these, all in the order of their names."""
    senders = dict[str, list[str]]()
    for client in sorted(sent):
        for key in sent[client]:
            senders.setdefault(key, []).append(client)
    found = dict[tuple[str, ...], list[str]]()
    for key in sorted(senders):
        found.setdefault(tuple(senders[key]), []).append(key)
    return found


def capped(weights: Mapping[str, int], share: float) -> dict[str, int]:
    """Weights of which none is more than a share of all: larger ones are cut, and stay whole.

    They are cut to the largest whole number c with c <= share * sum of min(weight, c). Of fewer
    clients than 1 / share no cut does it: then all weigh alike.
    """
    if not share:
        return dict(weights)
    part, low, high = Fraction(share), 1, max(weights.values(), default=1)
    while low < high:  # the numbers that do are those up to the largest
        middle = (low + high + 1) // 2
        fits = middle <= part * sum(min(weight, middle) for weight in weights.values())
        low, high = (middle, high) if fits else (low, middle - 1)
    return {client: min(weight, low) for client, weight in weights.items()}


def caps_of(
    defence: Defence, said: Mapping[str, int], groups: Iterable[tuple[str, ...]], *, absent: bool
) -> dict[tuple[str, ...], dict[str, int]]:
    """The weights of each group of senders. If who is `absent` counts, all are one crowd."""
    least = _below(defence, said)
    whole = capped(least, defence.share_cap)
    return {
        group: whole if absent else capped({c: least[c] for c in group}, defence.share_cap)
        for group in groups
    }


def _below(defence: Defence, said: Mapping[str, int]) -> dict[str, int]:
    """Weights up to the number that none may pass."""
    return {client: min(w, defence.weight_cap or w) for client, w in sorted(said.items())}


def cut(
    defence: Defence, said: Mapping[str, int], caps: Iterable[Mapping[str, int]]
) -> dict[str, tuple[int, int]]:
    """Who was capped: the weight as it was said, and the least that it counted with."""
    least = _below(defence, said)
    for weights in caps:
        least |= {c: min(least[c], weights[c]) for c in weights}
    return {c: (w, least[c]) for c, w in sorted(said.items()) if least[c] < w}


def bounded(
    values: Values, base: Tensors, times: float
) -> tuple[Values, dict[str, tuple[float, float]]]:
    """Values with no change longer than so many times what is usual; who was longer, and by what.

    The direction of a change stays: only its length is what nobody else would have sent.
    """
    if not times:
        return values, {}
    squares = squares_of(values, base)
    most = {client: times * length for client, length in usual(squares).items()}
    long = {c: (found, most[c]) for c, found in lengths(squares).items() if found > most[c]}
    cut = {c: shortened(values[c], base, least / found) for c, (found, least) in long.items()}
    return {**values, **cut}, {c: (short(a), short(b)) for c, (a, b) in long.items()}


def squares_of(values: Values, others: Tensors) -> dict[str, dict[str, float]]:
    """The squared distance of each client's params from some others."""
    return {
        client: {key: square(value, others[key]) for key, value in sorted(sent.items())}
        for client, sent in sorted(values.items())
    }


def square(one: Tensor, other: Tensor) -> float:
    """The squared distance of two tensors: the same, however many threads there are."""
    pieces = zip(one.flatten().split(_PIECE), other.flatten().split(_PIECE), strict=True)
    return fsum(float((a.double() - b.double()).square().sum()) for a, b in pieces)


def usual(squares: Squares) -> dict[str, float]:
    """The length that is usual for each client: that of the medians of all that it sent.

    Clients that send different parts have no length in common; each part has its median. Of an
    even number it is the lower one, so that of two who differ the shorter is believed.
    """
    found = dict[str, list[float]]()
    for each in squares.values():
        for key, number in each.items():
            found.setdefault(key, []).append(number)
    middle = {key: sorted(numbers)[(len(numbers) - 1) // 2] for key, numbers in found.items()}
    return {client: sqrt(fsum(middle[key] for key in each)) for client, each in squares.items()}


def lengths(squares: Squares) -> dict[str, float]:
    """The length of each client over all that it sent."""
    return {client: sqrt(fsum(each.values())) for client, each in squares.items()}


def short(number: float) -> float:
    """A number in the digits that are told of it."""
    return float(f"{number:.{DIGITS}g}")


def shortened(values: Tensors, base: Tensors, factor: float) -> dict[str, Tensor]:
    """Values of which the change from a base is so many times as long."""
    return {
        key: base[key].double().lerp(value.double(), factor).to(value.dtype)
        for key, value in values.items()
    }


def trimmed(tensors: Sequence[Tensor], trim: int) -> Tensor:
    """Number by number, the mean of all but so many of the largest and of the smallest."""
    first, kept = tensors[0], slice(trim, len(tensors) - trim)
    made, flat = torch.empty(first.numel(), dtype=first.dtype), [t.flatten() for t in tensors]
    for at in range(0, first.numel(), _COLUMNS):
        piece = slice(at, at + _COLUMNS)
        ranked = torch.stack([t[piece] for t in flat]).sort(dim=0).values[kept]
        mean = ranked.double().sum(dim=0) / len(ranked)
        # Rounding must not lead out of what was kept.
        made[piece] = mean.to(first.dtype).clamp(ranked[0], ranked[-1])
    return made.view(first.shape)


def krum(values: Values, keys: Sequence[str], liars: int, take: int) -> list[str]:
    """The clients that lie nearest to those around them, over some params that all of them sent.

    Blanchard et al., Machine Learning with Adversaries, 2017: the score of a client is the sum of
    its squared distances to its n - liars - 2 nearest. As many as are to be taken have the lowest.
    """
    names = sorted(values)
    near = max(1, len(names) - liars - 2)
    apart: dict[str, list[float]] = {name: [] for name in names}
    for one, other in combinations(names, 2):
        far = fsum(square(values[one][key], values[other][key]) for key in keys)
        apart[one].append(far)
        apart[other].append(far)
    scores = {name: fsum(sorted(apart[name])[:near]) for name in names}
    return sorted(sorted(names, key=lambda name: (scores[name], name))[: max(1, take)])
