# SPDX-License-Identifier: Apache-2.0
"""Fits: local training in one turn, a plain loop and the ways in which methods change it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, nn

from fedplan.data.examples import Examples, Loss, Seeded
from fedplan.language.plan import Roles
from fedplan.language.wording import spelled_out, stated
from fedplan.models.params import Param
from fedplan.tensors.named import Tensors
from fedplan.training.freezing import Marked, mark
from fedplan.training.optimisers import ClientOptimiser, adamw

_USUAL = adamw()


@dataclass(frozen=True)
class Pace:
    """How a client trains: the optimiser and its rate, how long, and in batches of what size.

    `bf16` computes in bfloat16 where that is safe; values, gradients and steps stay as they are.
    """

    optimiser: ClientOptimiser = _USUAL
    rate: float = 1e-3
    epochs: int = 1
    steps: int = 0
    batch: int = 32
    clip: float = 0.0
    bf16: bool = False

    @property
    def text(self) -> str:
        """All of it in one line, for both ends to compare."""
        return spelled_out("pace", self)

    def start(self, marked: Marked) -> torch.optim.Optimizer:
        """The optimiser of one turn: it starts without memory."""
        return self.optimiser.start(marked, self.rate)


Adjust = Callable[[Param, Tensor, Tensor], None]
"""Changes one param's gradient in place, given its value, before each step."""


@dataclass(frozen=True)
class Job:
    """All that a fit may use: the marked roles, the rows, and what came with the world.

    `start` holds the shared values as they came down; `riders` what else came down with them;
    `memory` what the client itself remembers from its last turn.
    """

    model: nn.Module
    roles: Roles
    rows: Examples
    loss: Loss
    pace: Pace
    seed: int
    start: Tensors
    riders: Tensors = field(default_factory=dict[str, Tensor])
    memory: Tensors = field(default_factory=dict[str, Tensor])
    adjust: tuple[Adjust, ...] = ()


@dataclass(frozen=True)
class Done:
    """What a fit leaves: its mean loss and steps, what rides up, and what the client remembers.

    `distance` is the sum of the rates of its steps, where they were not all the pace's.
    """

    loss: float
    steps: int
    riders: Tensors = field(default_factory=dict[str, Tensor])
    memory: Tensors = field(default_factory=dict[str, Tensor])
    distance: float | None = None


Fit = Callable[[Job], Done]

Wrap = Callable[[Fit], Fit]


@stated("plain")
def plain(job: Job) -> Done:
    """Train every SHARE and KEEP param on the client's rows."""
    total, steps = 0.0, 0
    with torch.random.fork_rng(devices=[]), mark(job.model, job.roles) as marked:
        torch.manual_seed(job.seed)
        trained = [tensor for _, tensor in marked.named_parameters()]
        if not trained:
            return Done(loss=float("nan"), steps=0)
        optimiser, device = job.pace.start(marked), trained[0].device.type
        rows = job.rows.seeded(job.seed) if isinstance(job.rows, Seeded) else job.rows
        job.model.train()
        for indices in batches(len(job.rows), job.pace, job.seed):
            batch = rows.batch(indices)
            with torch.autocast(device, torch.bfloat16, enabled=job.pace.bf16):
                loss = job.loss(job.model, batch)
            loss.backward()
            adjust(marked, job)
            optimiser.step()
            optimiser.zero_grad()
            total, steps = total + loss.item(), steps + 1
        job.model.eval()
    return Done(loss=total / max(steps, 1), steps=steps)


def batches(count: int, pace: Pace, seed: int) -> Iterator[Tensor]:
    """Indices of each batch: epochs in fresh orders, or a number of steps if the pace says so."""
    generator = torch.Generator().manual_seed(seed)
    done, times = 0, pace.steps or pace.epochs
    # Where rows are hidden a client may have none: then there is no batch, and not an empty one.
    for _ in range(times if count else 0):
        order = torch.randperm(count, generator=generator)
        for indices in cast("tuple[Tensor, ...]", order.split(pace.batch)):
            if pace.steps and done == pace.steps:
                return
            yield indices
            done += 1


@torch.no_grad()
def adjust(marked: Marked, job: Job) -> None:
    """Change gradients as the job says, then clip them as its pace does."""
    for param, value, gradient in marked.gradients() if job.adjust else ():
        for change in job.adjust:
            change(param, value, gradient)
    if job.pace.clip:
        nn.utils.clip_grad_norm_(list(marked.parameters()), job.pace.clip)
