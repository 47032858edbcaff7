# SPDX-License-Identifier: Apache-2.0
"""Inference attacks: token recovery from an update, and distinguishing two populations.

Stronger attacks exist: the results are lower bounds of what leaks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import partial
from math import sqrt
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from fedplan.tensors.devices import eval_mode

FLOOR = 1e-5
"""Singular values of a change below this, relative to the largest, count as zero."""


def row_norms(change: Tensor) -> Tensor:
    """L2 norm of each row of an embedding's change, in float64: large for the client's tokens."""
    return change.double().square().sum(1).sqrt()


def span_scores(change: Tensor, inputs: Tensor) -> Tensor:
    """Score candidate inputs of a linear layer: high for vectors in the row span of a change.

    change: the update of the layer's weight, [outputs, width]; inputs: candidates of norm one,
    [..., width]. Returns scores of shape [...], float64, at most 0.
    """
    # A layer's gradient is a sum of outer products with inputs: its rows span the client's inputs,
    # and no other vector while inputs are fewer than the width (Petrov et al., DAGER, 2024).
    svd = cast("tuple[Tensor, ...]", torch.linalg.svd(change.double(), full_matrices=True))
    singular_values, directions = svd[1], svd[2]
    relative = torch.zeros(len(directions), dtype=torch.float64)
    relative[: len(singular_values)] = singular_values / singular_values[0].clamp(min=1e-300)
    penalties = 1 / (relative.square() + FLOOR**2)
    return -((inputs.double() @ directions.T).square() @ penalties)


def single_token_inputs(
    model: nn.Module, layers: Iterable[str], tokens: Tensor, positions: int
) -> dict[str, Tensor]:
    """Run the model on texts of one token; return each layer's inputs, normalized to norm one.

    layers: module names. The result has, by layer name, a float64 tensor [positions, tokens,
    width]: the input for each of `tokens` alone at each of the first `positions` positions. In a
    longer text, the query, key and value layers of the first block have the same inputs; the inputs
    of all layers behind them depend on the other tokens too.
    """
    recorded: dict[str, list[Tensor]] = {name: [] for name in layers}

    def record(inputs: list[Tensor], layer: nn.Module, args: tuple[Any, ...]) -> None:
        inputs.append(args[0].detach().flatten(1).clone())

    hooks = [
        model.get_submodule(name).register_forward_pre_hook(partial(record, inputs))
        for name, inputs in recorded.items()
    ]
    try:
        with eval_mode(model), torch.no_grad():
            for position in range(positions):
                position_ids = torch.full((len(tokens), 1), position)
                model(input_ids=tokens[:, None], position_ids=position_ids)
    finally:
        for hook in hooks:
            hook.remove()
    stacked = {name: torch.stack(inputs).double() for name, inputs in recorded.items()}
    return {name: normalize(inputs, dim=-1) for name, inputs in stacked.items()}


def top_scores_recall(scores: Tensor, tokens: Collection[int]) -> float:
    """Fraction of `tokens` (indices of `scores`) found among the len(tokens) highest scores.

    Random scores find len(tokens) / len(scores) on average.
    """
    guesses = cast("list[int]", scores.topk(len(tokens)).indices.tolist())
    return len(set(guesses) & set(tokens)) / len(tokens)


def distinguishing_auc(one: Tensor, other: Tensor) -> float:
    """AUC of a naive Bayes classifier that distinguishes two populations.

    one, other: a row of zeros and ones per member of each population. Even rows train and odd rows
    test, then the reverse; returns the mean of both AUCs.
    """
    results, halves = list[float](), (slice(0, None, 2), slice(1, None, 2))
    for train, test in (halves, halves[::-1]):
        samples = (one[train], other[train])
        smoothed = [(rows.double().sum(0) + 1) / (len(rows) + 2) for rows in samples]
        log_odds = smoothed[0].logit() - smoothed[1].logit()
        results.append(auc(one[test].double() @ log_odds, other[test].double() @ log_odds))
    return sum(results) / len(results)


def auc(likely: Tensor, rare: Tensor) -> float:
    """Probability that a value of the first sample exceeds one of the second; ties count half."""
    ordered = rare.sort().values
    below = torch.searchsorted(ordered, likely)
    up_to = torch.searchsorted(ordered, likely, right=True)
    return float((below + up_to).double().mean()) / (2 * len(rare))


def auc_error(one: int, other: int) -> float:
    """Standard error of the AUC of two samples of one distribution, of these sizes."""
    return sqrt((one + other + 1) / (12 * one * other))  # Mann and Whitney
