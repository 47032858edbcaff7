# SPDX-License-Identifier: Apache-2.0
"""Fits: local training in one turn, a plain loop and the ways in which methods change it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import reduce
from itertools import islice
from math import ceil, nan
from operator import add

import torch
from torch import Tensor, nn

from fedplan.data.examples import Examples, Loss, Seeded
from fedplan.errors import FedplanError
from fedplan.language.plan import Roles
from fedplan.language.wording import spelled_out, stated
from fedplan.models.params import Param
from fedplan.tensors.devices import autocast, brought, device_of, forked, numbers, scaler
from fedplan.tensors.named import Tensors
from fedplan.training.batches import Weighed, ahead, epoch, lengths_of, weighed
from fedplan.training.features import Features
from fedplan.training.freezing import Marked, mark
from fedplan.training.optimisers import ClientOptimiser, adamw
from fedplan.training.passes import PRECISIONS, checkpointed, compiled
from fedplan.training.prefix import prefix_of
from fedplan.training.schedules import Schedule
from fedplan.training.steps import Stepper

_USUAL = adamw()
_STEADY = Schedule()


@dataclass(frozen=True)
class Pace:
    """How a client trains: the optimiser and its rate, how long, and in batches of what size.

    A step takes `accumulate` batches, one after the other, and counts as one of `steps`. With
    `decay_all` off, neither norms nor biases decay. `precision` is what forward passes compute in
    where that is safe (bf16, fp16); values, gradients and steps stay as they are. `compile` names a
    backend of torch.compile. `by_length` puts texts of similar length into one batch. `workers` are
    threads that make batches ahead. With `reuse` the output of what is frozen below all that is
    trained is worked out row by row, and kept for later steps and turns.
    """

    optimiser: ClientOptimiser = _USUAL
    rate: float = 1e-3
    epochs: int = 1
    steps: int = 0
    batch: int = 32
    clip: float = 0.0
    schedule: Schedule = _STEADY
    accumulate: int = 1
    decay_all: bool = True
    precision: str = "float32"
    checkpointing: bool = False
    compile: str = ""
    by_length: bool = False
    workers: int = 0
    reuse: bool = False

    def __post_init__(self) -> None:
        if self.accumulate < 1 or self.workers < 0:
            wrong = "accumulate" if self.accumulate < 1 else "workers"
            raise FedplanError(f"{wrong} is {getattr(self, wrong)}: give a larger whole number")
        if self.precision not in PRECISIONS:
            known = ", ".join(PRECISIONS)
            raise FedplanError(f"there is no precision {self.precision!r}; there are {known}")
        if self.reuse and self.compile:
            raise FedplanError(
                f"reuse does not go together with compile = {self.compile!r}, which runs the whole "
                "model: leave one of them out"
            )

    @property
    def text(self) -> str:
        """All of it in one line, for both ends to compare."""
        return spelled_out("pace", self)

    @property
    def dtype(self) -> torch.dtype | None:
        """What forward passes compute in, if it is not the model's own."""
        return PRECISIONS[self.precision]

    def steps_of(self, rows: int) -> int:
        """How many steps a turn on so many rows has."""
        return (self.steps or self.epochs * ceil(rows / self._rows)) if rows else 0

    @property
    def _rows(self) -> int:
        return self.batch * self.accumulate

    def draw(self, rows: Examples, seed: int) -> Iterator[Tensor]:
        """The rows of each step: epochs in fresh orders, or a number of steps if it says so."""
        generator, left = torch.Generator().manual_seed(seed), self.steps_of(len(rows))
        lengths = lengths_of(rows) if self.by_length else None
        while left:
            for indices in islice(epoch(len(rows), self._rows, generator, lengths), left):
                left -= 1
                yield indices

    def start(self, marked: Marked) -> torch.optim.Optimizer:
        """The optimiser of one turn: it starts without memory."""
        return self.optimiser.start(marked, self.rate, decay_all=self.decay_all)


Adjust = Callable[[Param, Tensor, Tensor], None]
"""Changes one param's gradient in place, given its value, before each step."""


@dataclass(frozen=True)
class Job:
    """All that a fit may use: the marked roles, the rows, and what came with the world.

    `start` holds the values as they were before the turn; `riders` what else came down with them;
    `memory` what the client itself remembers from its last turn; `traits` what it says of itself.
    `round` counts from 1. `features` is where outputs of what is frozen are kept, by `mark`, which
    tells the rows from all others; without it, by the object that they are.
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
    traits: Mapping[str, str] = field(default_factory=dict[str, str])
    round: int = 1
    features: Features | None = None
    mark: str = ""

    def stepper(self, marked: Marked, steps: int) -> Stepper:
        """What takes the steps of this turn, which has so many."""
        pace, device = self.pace, device_of(self.model)
        _require_scaling(pace, marked)
        factor = pace.schedule.factor(pace.rate, self.round, steps)
        return Stepper(pace.start(marked), factor, scaler(device, pace.dtype))


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
"""Trains a client's model in one turn."""

Wrap = Callable[[Fit], Fit]
"""Makes another fit of a fit: how a method changes local training."""


@stated("plain")
def plain(job: Job) -> Done:
    """Train every SHARE and KEEP param on the client's rows."""
    pace, device, losses = job.pace, device_of(job.model), list[Tensor]()
    with (
        forked(device, job.seed),
        mark(job.model, job.roles) as marked,
        checkpointed(job.model, pace.checkpointing),
    ):
        if not list(marked.parameters()):
            return Done(loss=nan, steps=0)
        rows = job.rows.seeded(job.seed) if isinstance(job.rows, Seeded) else job.rows
        stepper = job.stepper(marked, pace.steps_of(len(rows)))
        model = compiled(job.model, pace.compile)
        job.model.train()
        with prefix_of(job, rows) as prefix:
            for batches in _steps(prefix.rows if prefix else rows, pace, job.seed):
                for batch, share, which in batches:
                    if prefix:
                        prefix.enter(batch, which)
                    with autocast(device, pace.dtype):
                        loss = job.loss(model, brought(batch, device))
                    stepper.backward(loss * share)
                    losses.append(loss.detach().reshape(()) * share)
                stepper.step(lambda: adjust(marked, job))
        job.model.eval()
    mean = reduce(add, numbers(losses), 0.0) / max(pace.steps_of(len(job.rows)), 1)
    return Done(mean, stepper.taken, distance=pace.rate * stepper.factors)


def _steps(rows: Examples, pace: Pace, seed: int) -> Iterator[list[Weighed]]:
    """The batches of each step."""
    return ahead(lambda of: weighed(rows, of, pace.batch), pace.draw(rows, seed), pace.workers)


def _require_scaling(pace: Pace, marked: Marked) -> None:
    """Refuse to scale the gradients of values that are as coarse as they are."""
    for key, tensor in marked.named_parameters() if pace.dtype is torch.float16 else ():
        if tensor.dtype is torch.float16:
            raise FedplanError(
                f"{key} is in float16, and precision fp16 needs values that are finer than what it "
                "computes in: load the model in float32"
            )


@torch.no_grad()
def adjust(marked: Marked, job: Job) -> None:
    """Change gradients as the job says, then clip them as its pace does."""
    for param, value, gradient in marked.gradients() if job.adjust else ():
        for change in job.adjust:
            change(param, value, gradient)
    if job.pace.clip:
        nn.utils.clip_grad_norm_(list(marked.parameters()), job.pace.clip)
