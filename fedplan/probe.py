# SPDX-License-Identifier: Apache-2.0
"""Probes: a look at a client's own rows that gives each block a score, for `best` to choose by."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from fedplan import streams
from fedplan.fit import Examples
from fedplan.params import Block


@dataclass(frozen=True)
class Look:
    """What a probe may use: the model as the turn begins, the rows, the blocks, and a seed."""

    model: nn.Module
    rows: Examples
    blocks: tuple[Block, ...]
    seed: int


Probe = Callable[[Look], Mapping[Block, float]]


def at_random(look: Look) -> dict[Block, float]:
    """Scores that look at nothing: the control that a probe must beat."""
    drawn = torch.rand(len(look.blocks), generator=streams.generator("probe", look.seed))
    return {block: float(score) for block, score in zip(look.blocks, drawn, strict=True)}


def from_the_top(look: Look) -> dict[Block, float]:
    """The later a block, the higher its score: `best(k)` is then the last k blocks."""
    return {block: float(block.number) for block in look.blocks}
