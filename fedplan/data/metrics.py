# SPDX-License-Identifier: Apache-2.0
"""Metrics: scores of many clients, put together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from math import ceil, fsum, isnan, sqrt

from fedplan.errors import FedplanError


def spread(scores: Mapping[str, float]) -> dict[str, float]:
    """How a score lies over the clients, where higher is better.

    `worst_decile` is the mean of the lowest tenth, at least one client. A client whose score is
    not a number has diverged and counts as the worst.
    """
    if not scores:
        raise FedplanError("there is no score to spread: give at least one client's")
    ordered = sorted(scores.values(), key=lambda score: (not isnan(score), score))
    mean = _mean(ordered)
    return {
        "mean": mean,
        "std": sqrt(_mean([(score - mean) ** 2 for score in ordered])),
        "worst": ordered[0],
        "worst_decile": _mean(ordered[: ceil(len(ordered) / 10)]),
        "best": ordered[-1],
        "count": float(len(ordered)),
    }


def macro_f1(truth: Sequence[int], guess: Sequence[int]) -> float:
    """The mean over labels of each one's F1; labels that neither side has do not count."""
    right = Counter(t for t, g in zip(truth, guess, strict=True) if t == g)
    had, named = Counter(truth), Counter(guess)
    labels = had.keys() | named.keys()
    return _mean([2 * right[label] / (had[label] + named[label]) for label in labels])


def _mean(numbers: Sequence[float]) -> float:
    return fsum(numbers) / len(numbers) if numbers else 0.0
