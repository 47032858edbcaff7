# SPDX-License-Identifier: Apache-2.0
"""Readings of SAFL's score: for each block a number that a client could choose by.

Formula 1 of the paper sums attention over heads, over the tokens that look and over the tokens that
are looked at. Here `real` are all tokens but padding, `words` all of these but [CLS] and [SEP].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd import grad

from research.scores.oracle import Encoder
from research.scores.tasks import NONE, Rows, loss_of

Scores = dict[str, list[float]]
"""By reading, a number for each block."""


@dataclass(frozen=True)
class Who:
    """Which tokens of rows are which, each as (rows, tokens)."""

    real: Tensor
    first: Tensor
    last: Tensor
    words: Tensor
    labelled: Tensor


def who_of(rows: Rows) -> Who:
    """The tokens of rows; what is labelled is all real tokens, where texts are."""
    real = rows.mask.bool()
    first = real & (real.cumsum(1) == 1)
    last = real & (real.cumsum(1) == real.sum(1, keepdim=True))
    held = rows.labels != NONE if rows.labels.ndim == 2 else real
    return Who(real, first, last, real & ~first & ~last, held)


def seen(maps: Tensor, by: Tensor, to: Tensor) -> Tensor:
    """Each row's attention from some tokens to some, summed over heads: formula 1."""
    pairs = by[:, None, :, None] & to[:, None, None, :]
    return (maps.double() * pairs).sum((1, 2, 3))


def share(maps: Tensor, by: Tensor, to: Tensor) -> Tensor:
    """The same, as a share of all that these tokens look at: it does not grow with the text."""
    return seen(maps, by, to) / (maps.shape[1] * by.sum(1))


def within(maps: Tensor, who: Who) -> Tensor:
    """Of what words look at, the part that is not themselves, special tokens left out."""
    among = seen(maps, who.words, who.words)
    own = (maps.double().diagonal(dim1=2, dim2=3) * who.words[:, None]).sum((1, 2))
    return 1 - own / among


def entropy(maps: Tensor, who: Who) -> Tensor:
    """How evenly a token looks, from 0 to 1."""
    held = maps.double()
    each = -(held * held.clamp(min=1e-30).log()).sum(-1)
    mean = (each * who.real[:, None]).sum((1, 2)) / (maps.shape[1] * who.real.sum(1))
    return mean / who.real.sum(1).double().log()


OF_MAPS: dict[str, Callable[[Tensor, Who], Tensor]] = {
    "all to all": lambda maps, who: seen(maps, who.real, who.real),
    "all to [CLS]": lambda maps, who: seen(maps, who.real, who.first),
    "all to [CLS], by length": lambda maps, who: share(maps, who.real, who.first),
    "words to [CLS], by length": lambda maps, who: share(maps, who.words, who.first),
    "all to [SEP], by length": lambda maps, who: share(maps, who.real, who.last),
    "all to words, by length": lambda maps, who: share(maps, who.real, who.words),
    "[CLS] to words": lambda maps, who: share(maps, who.first, who.words),
    "words to other words": within,
    "all to labelled, by length": lambda maps, who: share(maps, who.real, who.labelled),
    "entropy": entropy,
}


def of_maps(encoder: Encoder, rows: Rows) -> Scores:
    """What attention says, as the mean over rows."""
    found = {name: list[float]() for name in OF_MAPS}
    who = who_of(rows)
    for maps in every_map(encoder, rows):
        for name, reading in OF_MAPS.items():
            found[name].append(float(reading(maps, who).mean()))
    return found


def every_map(encoder: Encoder, rows: Rows) -> Iterator[Tensor]:
    """The attention of each block, as (rows, heads, tokens, tokens)."""
    encoder.bert.set_attn_implementation("eager")
    with torch.no_grad():
        found = encoder.bert(input_ids=rows.ids, attention_mask=rows.mask, output_attentions=True)
    encoder.bert.set_attn_implementation("sdpa")
    yield from found.attentions


def of_change(before: Encoder, after: Encoder, rows: Rows) -> Scores:
    """What a few steps of training everything did to a block: to its map, and to its weights."""
    who = who_of(rows)
    maps, more, moved = list[float](), list[float](), list[float]()
    for old, new in zip(every_map(before, rows), every_map(after, rows), strict=True):
        apart = (old - new).abs().sum(-1) / 2 * who.real[:, None]
        maps.append(float(apart.sum() / (old.shape[1] * who.real.sum())))
        more.append(
            float((share(new, who.real, who.first) - share(old, who.real, who.first)).mean())
        )
    for old, new in zip(before.blocks, after.blocks, strict=True):
        pairs = [
            (a.detach(), b.detach())
            for a, b in zip(old.parameters(), new.parameters(), strict=True)
        ]
        far = sum(float((a - b).square().sum()) for a, b in pairs)
        moved.append((far / sum(float(a.square().sum()) for a, _ in pairs)) ** 0.5)
    return {
        "change of map": maps,
        "more to [CLS] than pretrained": more,
        "change of weights": moved,
    }


def of_gradients(encoder: Encoder, rows: Rows) -> Scores:
    """The norm of each block's gradient, and its Fisher: the mean of each row's squared gradient."""
    whole = [0.0] * len(encoder.blocks)
    sums = [[torch.zeros_like(w) for w in block.parameters()] for block in encoder.blocks]
    for place in range(len(rows)):
        for block, found in enumerate(_gradients(encoder, rows.some(torch.tensor([place])))):
            whole[block] += sum(float(each.square().sum()) for each in found) / len(rows)
            for total, each in zip(sums[block], found, strict=True):
                total += each / len(rows)
    norms = [sum(float(each.square().sum()) for each in block) ** 0.5 for block in sums]
    return {"gradient": norms, "Fisher": whole}


def _gradients(encoder: Encoder, rows: Rows) -> list[list[Tensor]]:
    weights = [list(block.parameters()) for block in encoder.blocks]
    flat = [w for block in weights for w in block]
    for weight in flat:
        weight.requires_grad_(True)
    told = encoder.told(encoder.go(encoder.enter(rows), rows.mask))
    found = iter(grad(loss_of(told, rows.labels), flat))
    for weight in flat:
        weight.requires_grad_(False)
    return [[next(found) for _ in block] for block in weights]
