# SPDX-License-Identifier: Apache-2.0
"""Inference: what an observer reads off an update, or off a choice of blocks.

None of them is the best there is. What they find is a floor of what leaks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import partial
from math import sqrt
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from fedplan.tensors.devices import at_rest

FLOOR = 1e-5
"""Directions in which a change is shorter than this, as a share of its longest, count as empty."""


def touched(change: Tensor) -> Tensor:
    """How far each row of an embedding moved: rows of tokens that a client lacks hardly do."""
    return change.double().square().sum(1).sqrt()


def fit_in(change: Tensor, inputs: Tensor) -> Tensor:
    """How well inputs of length one, the last dimension, lie in the span of a layer's change.

    The gradient of a layer is a sum of outer products, each with one of the layer's inputs: so its
    rows span them, and no other vector while they are fewer than the layer is wide (Petrov et al.,
    DAGER, 2024). A direction counts against an input by how short the change is along it.
    """
    lengths, directions = _spanned(change.double())
    every = torch.zeros(len(directions), dtype=torch.float64)
    every[: len(lengths)] = lengths / lengths[0].clamp(min=1e-300)
    against = 1 / (every.square() + FLOOR**2)
    return -((inputs.double() @ directions.T).square() @ against)


def _spanned(change: Tensor) -> tuple[Tensor, Tensor]:
    """How long a change is along each of its directions, and these, one in each row."""
    found = cast("tuple[Tensor, ...]", torch.linalg.svd(change, full_matrices=True))
    return found[1], found[2]


def lone_inputs(
    model: nn.Module, layers: Iterable[str], tokens: Tensor, positions: int
) -> dict[str, Tensor]:
    """What each layer is given for a token that stands alone: positions, tokens, and the input.

    Before the first block's attention this is what the layer is given in any text. Behind it the
    other tokens of a text have a part in it, and a token alone is a guess. Inputs are made of
    length one.
    """
    found: dict[str, list[Tensor]] = {name: [] for name in layers}
    hooks = [
        model.get_submodule(name).register_forward_pre_hook(partial(_note, heard))
        for name, heard in found.items()
    ]
    try:
        with at_rest(model), torch.no_grad():
            for place in range(positions):
                at = torch.full((len(tokens), 1), place)
                model(input_ids=tokens[:, None], position_ids=at)
    finally:
        for hook in hooks:
            hook.remove()
    inputs = {name: torch.stack(heard).double() for name, heard in found.items()}
    return {name: normalize(each, dim=-1) for name, each in inputs.items()}


def _note(heard: list[Tensor], layer: nn.Module, args: tuple[Any, ...]) -> None:
    heard.append(args[0].detach().flatten(1).clone())


def named(scores: Tensor, held: Collection[int]) -> float:
    """The share of a client's tokens among as many of the highest scores.

    Chance finds as large a share of them as they are of all tokens.
    """
    guessed = cast("list[int]", scores.topk(len(held)).indices.tolist())
    return len(set(guessed) & set(held)) / len(held)


def told_apart(one: Tensor, other: Tensor) -> float:
    """The AUC of who must tell two populations apart by rows of zeros and ones.

    Each half of the rows is judged by the odds that the other half shows (naive Bayes).
    """
    halves = (slice(0, None, 2), slice(1, None, 2))
    found = [
        auc(*(rows[judged].double() @ _odds(one[shown], other[shown]) for rows in (one, other)))
        for shown, judged in (halves, halves[::-1])
    ]
    return sum(found) / len(found)


def auc(likely: Tensor, rare: Tensor) -> float:
    """The chance that a draw of the first is above one of the second; a tie counts half."""
    ordered = rare.sort().values
    below = torch.searchsorted(ordered, likely)
    up_to = torch.searchsorted(ordered, likely, right=True)
    return float((below + up_to).double().mean()) / (2 * len(rare))


def auc_error(one: int, other: int) -> float:
    """The standard error of an AUC of rows that nobody can tell apart (Mann and Whitney)."""
    return sqrt((one + other + 1) / (12 * one * other))


def _odds(one: Tensor, other: Tensor) -> Tensor:
    chances = [(rows.double().sum(0) + 1) / (len(rows) + 2) for rows in (one, other)]
    return chances[0].logit() - chances[1].logit()
