# SPDX-License-Identifier: Apache-2.0
"""Label counts: how many examples of each class a client has, from its update."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import cast

import torch
from torch import Tensor

from attacks.shadows import Seen


def counts_from_bias(change: Tensor, probabilities: Tensor, lr: float, examples: int) -> Tensor:
    """Label counts from the change of the last layer's bias after one step of SGD.

    change: [classes]; probabilities: of each class, the mean that the model predicts for any
    texts; examples: of the client. The gradient of the bias is the mean of probabilities minus the
    mean of labels, whatever the other layers are.
    """
    return round_counts(examples * (probabilities.double() + change.double() / lr), examples)


def round_counts(counts: Tensor, examples: int) -> Tensor:
    """Whole counts, 0 or more, that sum to `examples` and are closest to `counts` [classes]."""
    whole = counts.clamp(min=0).floor()
    while int(whole.sum()) != examples:
        step = 1 if int(whole.sum()) < examples else -1
        gain = torch.where(whole + step < 0, -torch.inf, step * (counts - whole))
        whole[int(gain.argmax())] += step
    return whole.long()


def fit_counts(
    attacked: Seen, shadows: Seen, variance: float = 0.0, group: int = 1
) -> tuple[Tensor, float]:
    """Predict the label counts of attacked updates by a linear regression on shadows.

    group: the attacked are sums of so many updates; shadows are single ones, as a linear rule for
    updates is one for sums. variance: that of known noise on each number of `attacked`, which
    shadows do not have. The penalty is the one with the least error on a shadow that is left out.
    Returns whole counts [rows, classes], with the true number of examples of each row, and that
    error (mean square), by which a server chooses among several parts.
    """
    mean, mean_counts = shadows.updates.mean(0), shadows.counts.double().mean(0)
    centred, targets = shadows.updates - mean, shadows.counts.double() - mean_counts
    gram = centred @ centred.T
    scale, unit = float(gram.diagonal().mean()) + 1e-300, torch.eye(len(gram)).double()
    gram += scale  # a constant beside the numbers: without it a left-out row is not left out
    noise = variance * len(gram) / group
    best, residuals = torch.zeros_like(targets), torch.full_like(targets, torch.inf)
    for power in range(-9, 3):
        inverse = torch.linalg.inv(gram + (10.0**power * scale + noise) * unit)
        solution = inverse @ targets
        left_out = solution / inverse.diagonal()[:, None]
        if left_out.square().sum() < residuals.square().sum():
            best, residuals = solution, left_out
    numbers = (attacked.updates - group * mean) @ centred.T + group * scale
    predicted = numbers @ best + group * mean_counts
    examples = cast("list[int]", attacked.counts.sum(1).tolist())
    rows = [round_counts(row, n) for row, n in zip(predicted, examples, strict=True)]
    return torch.stack(rows), float(residuals.square().mean())


@dataclass(frozen=True)
class CountsLeak:
    """Result of an attack on label counts.

    exact: clients with all counts right, as (fraction, lower, upper) of 95 % confidence (Wilson);
    chance: the fraction with the most likely counts as a guess; smallest: the power, the smallest
    fraction that four of five such studies would tell from chance. error: mean distance of a count
    from the truth; chance_error: the same of the guess. clients: attacked updates.
    """

    exact: tuple[float, float, float]
    chance: float
    smallest: float
    error: float
    chance_error: float
    clients: int


def measure_counts(predicted: Tensor, counts: Tensor) -> CountsLeak:
    """Compare predicted counts [clients, classes] with the true ones.

    Both are whole numbers; the guess of chance has each client's number of examples, and its
    classes as equal as possible.
    """
    examples = counts.sum(1)
    classes = counts.shape[1]
    guess = examples[:, None] // classes + (torch.arange(classes) < (examples % classes)[:, None])
    n = len(counts)
    right = float((predicted == counts).all(1).double().mean())
    chance = float((guess == counts).all(1).double().mean())
    centre, radius = _wilson(right, n)
    return CountsLeak(
        (right, max(0.0, centre - radius), min(1.0, centre + radius)),
        chance,
        chance + 2.8 * sqrt(max(chance * (1 - chance), 1 / n) / n),
        float((predicted - counts).abs().double().mean()),
        float((guess - counts).abs().double().mean()),
        n,
    )


def _wilson(rate: float, n: int) -> tuple[float, float]:
    z2 = 1.96**2
    centre = (rate + z2 / (2 * n)) / (1 + z2 / n)
    return centre, 1.96 * sqrt(rate * (1 - rate) / n + z2 / (4 * n * n)) / (1 + z2 / n)
