# SPDX-License-Identifier: Apache-2.0
"""The oracle: what training a block is worth, in the loss of rows that nobody trained on."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import AdamW
from transformers import AutoModel

from research.scores.question import Training
from research.scores.tasks import Rows, Task, loss_of, score_of

AT_ONCE = 64
DECAY, CLIP = 0.01, 1.0


class Encoder(nn.Module):
    """A BERT with a linear head that begins at 0: on `[CLS]` for texts, on each token for tags."""

    def __init__(self, folder: Path, task: Task) -> None:
        super().__init__()
        made: Any = AutoModel.from_pretrained(folder, add_pooling_layer=False, dtype=torch.float32)
        made.requires_grad_(False)
        self.bert = made.eval()  # no dropout: runs differ by what they train alone
        self.blocks = cast("nn.ModuleList", made.encoder.layer)
        self.head = nn.Linear(made.config.hidden_size, task.classes)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.tags = task.tags

    def enter(self, rows: Rows) -> Tensor:
        """What goes into the first block."""
        return self.bert.embeddings(input_ids=rows.ids)

    def go(self, hidden: Tensor, mask: Tensor, first: int = 0, last: int | None = None) -> Tensor:
        """Through some of the blocks."""
        gaps = (1.0 - mask[:, None, None, :].float()) * torch.finfo(torch.float32).min
        for block in self.blocks[first:last]:
            hidden = block(hidden, gaps)
        return hidden

    def told(self, hidden: Tensor) -> Tensor:
        """The logits of what comes out of the last block."""
        return self.head(hidden if self.tags else hidden[:, 0])


@dataclass(frozen=True)
class Prefix:
    """The features below a block, of both halves of a task: nothing below it is trained."""

    block: int
    train: Tensor
    test: Tensor


def prefixes(encoder: Encoder, task: Task) -> Iterator[Prefix]:
    """The features below each block, and at last those above all."""
    train, test = _entered(encoder, task.train), _entered(encoder, task.test)
    for block in range(len(encoder.blocks)):
        yield Prefix(block, train, test)
        train = _through(encoder, train, task.train.mask, block, block + 1)
        test = _through(encoder, test, task.test.mask, block, block + 1)
    yield Prefix(len(encoder.blocks), train, test)


# Not around the loop above: what it yields to would then run without gradients, too.
@torch.no_grad()
def _entered(encoder: Encoder, rows: Rows) -> Tensor:
    return encoder.enter(rows)


@torch.no_grad()
def _through(
    encoder: Encoder, hidden: Tensor, mask: Tensor, first: int, last: int | None = None
) -> Tensor:
    parts = zip(hidden.split(AT_ONCE), mask.split(AT_ONCE), strict=True)
    return torch.cat([encoder.go(each, real, first, last) for each, real in parts])


def trained(
    encoder: Encoder, blocks: frozenset[int], task: Task, prefix: Prefix, how: Training, seed: int
) -> Encoder:
    """A copy in which some blocks and the head are trained, from the features below the first."""
    made = deepcopy(encoder)
    weights = [w for block in sorted(blocks) for w in made.blocks[block].parameters()]
    for weight in weights:
        weight.requires_grad_(True)
    groups: list[dict[str, Any]] = [{"params": list(made.head.parameters()), "lr": how.head_rate}]
    groups += [{"params": weights, "lr": how.rate}] if weights else []
    steps = AdamW(groups, weight_decay=DECAY)
    for places in batches(len(task.train), how, seed):
        rows = task.train.some(places)
        hidden = made.go(prefix.train[places], rows.mask, prefix.block)
        loss_of(made.told(hidden), rows.labels).backward()
        for each in groups:
            torch.nn.utils.clip_grad_norm_(each["params"], CLIP)
        steps.step()
        steps.zero_grad()
    return made


def batches(rows: int, how: Training, seed: int) -> Iterator[Tensor]:
    """Places of the rows of each step: one pass after another, each in an order of its own."""
    random, left = torch.Generator().manual_seed(seed), torch.zeros(0, dtype=torch.long)
    for _ in range(how.steps):
        if len(left) < how.batch:
            left = torch.cat([left, torch.randperm(rows, generator=random)])
        yield left[: how.batch]
        left = left[how.batch :]


def held_out(made: Encoder, task: Task, prefix: Prefix) -> tuple[float, float]:
    """Loss and score of the rows to test on."""
    with torch.no_grad():
        logits = made.told(_through(made, prefix.test, task.test.mask, prefix.block))
        labels = task.test.labels
        return float(loss_of(logits, labels)), score_of(logits, labels, tags=task.tags)
