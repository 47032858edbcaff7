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
    """Norm of each row of an embedding's change: large for tokens that the client has."""
    return change.double().square().sum(1).sqrt()


def span_scores(change: Tensor, inputs: Tensor) -> Tensor:
    """Score of each input vector by how well it lies in the row span of a layer's change.

    inputs: candidates of norm one, in the last dimension. Higher scores fit better. The gradient of
    a layer is a sum of outer products with its inputs: so its rows span the inputs of the client,
    and no other vector while they are fewer than the layer is wide (Petrov et al., DAGER, 2024).
    """
    singular_values, directions = _row_directions(change.double())
    relative = torch.zeros(len(directions), dtype=torch.float64)
    relative[: len(singular_values)] = singular_values / singular_values[0].clamp(min=1e-300)
    penalties = 1 / (relative.square() + FLOOR**2)
    return -((inputs.double() @ directions.T).square() @ penalties)


def _row_directions(change: Tensor) -> tuple[Tensor, Tensor]:
    """Singular values of a change, and all right singular vectors as rows."""
    svd = cast("tuple[Tensor, ...]", torch.linalg.svd(change, full_matrices=True))
    return svd[1], svd[2]


def single_token_inputs(
    model: nn.Module, layers: Iterable[str], tokens: Tensor, positions: int
) -> dict[str, Tensor]:
    """Input of each layer for each single token at each position, [positions, tokens, width].

    Normalized to norm one, by layer name. Before the first block's attention this is the input in
    any text; behind it other tokens contribute, and this is a guess.
    """
    recorded: dict[str, list[Tensor]] = {name: [] for name in layers}
    hooks = [
        model.get_submodule(name).register_forward_pre_hook(partial(_record_input, inputs))
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


def _record_input(inputs: list[Tensor], layer: nn.Module, args: tuple[Any, ...]) -> None:
    inputs.append(args[0].detach().flatten(1).clone())


def top_scores_recall(scores: Tensor, tokens: Collection[int]) -> float:
    """Fraction of a client's tokens among as many highest scores.

    Random scores find len(tokens) / len(scores) of them on average.
    """
    guesses = cast("list[int]", scores.topk(len(tokens)).indices.tolist())
    return len(set(guesses) & set(tokens)) / len(tokens)


def distinguishing_auc(one: Tensor, other: Tensor) -> float:
    """AUC of distinguishing two populations by rows of zeros and ones, by naive Bayes.

    Trained on each half of the rows and tested on the other; the mean of both.
    """
    halves = (slice(0, None, 2), slice(1, None, 2))
    results = [
        auc(*(rows[test].double() @ _log_odds(one[train], other[train]) for rows in (one, other)))
        for train, test in (halves, halves[::-1])
    ]
    return sum(results) / len(results)


def auc(likely: Tensor, rare: Tensor) -> float:
    """Probability that a value of the first sample exceeds one of the second; ties count half."""
    ordered = rare.sort().values
    below = torch.searchsorted(ordered, likely)
    up_to = torch.searchsorted(ordered, likely, right=True)
    return float((below + up_to).double().mean()) / (2 * len(rare))


def auc_error(one: int, other: int) -> float:
    """Standard error of the AUC of two such samples from one distribution (Mann-Whitney)."""
    return sqrt((one + other + 1) / (12 * one * other))


def _log_odds(one: Tensor, other: Tensor) -> Tensor:
    """Log odds ratio of each column, of smoothed frequencies."""
    frequencies = [(rows.double().sum(0) + 1) / (len(rows) + 2) for rows in (one, other)]
    return frequencies[0].logit() - frequencies[1].logit()
