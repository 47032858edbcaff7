# SPDX-License-Identifier: Apache-2.0
"""Train section: what a study says of a client's turn, and the pace that follows from it."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Literal

from pydantic import Field, model_validator

from fedplan.studies.sections import Section
from fedplan.studies.words import Count, OptimiserName, Positive, Scalar, as_fault
from fedplan.training.features import ROOM, Features
from fedplan.training.fit import Pace
from fedplan.training.optimisers import DECAY, MOMENTUM, ClientOptimiser, optimiser_named
from fedplan.training.schedules import Schedule, schedule_named

_PLAIN = tuple(f.name for f in fields(Pace) if f.name not in ("optimiser", "schedule"))
"""What a pace and its section say in the same words."""


class TrainSection(Section):
    """How each client trains in its turn."""

    rounds: Positive = 10
    """How many rounds the run has."""
    optimiser: OptimiserName = Pace.optimiser.name
    """The client's optimiser: a class of torch in small letters, or one of your own."""
    optimiser_settings: dict[str, Scalar | list[Scalar]] = Field(
        default_factory=dict[str, Scalar | list[Scalar]]
    )
    """What else the optimiser takes, by the names of its class."""
    rate: Annotated[float, Field(gt=0)] = Pace.rate
    """The learning rate, before its schedule."""
    schedule: str = Pace.schedule.name
    """How the rate goes, by a name of transformers."""
    schedule_settings: dict[str, str | float] = Field(default_factory=dict[str, str | float])
    """What else the schedule takes, by its names in transformers."""
    warmup: Annotated[float, Field(ge=0)] = Schedule.warmup
    """How long the rate rises: below 1 a share of the schedule, else rounds or steps."""
    over: Literal["run", "turn"] = "run"
    """Whether the schedule goes over the whole run or over each turn anew."""
    decay: Annotated[float, Field(ge=0)] = DECAY
    """Weight decay, where the optimiser has it."""
    decay_all: bool = Pace.decay_all
    """Whether norms and biases decay too."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = MOMENTUM
    """Momentum, where the optimiser has it."""
    epochs: Positive = Pace.epochs
    """How often a turn goes over the client's rows."""
    steps: Count = Pace.steps
    """How many steps a turn has, whatever the rows; 0 leaves it to the epochs."""
    batch: Positive = Pace.batch
    """How many rows run at a time."""
    accumulate: Positive = Pace.accumulate
    """How many batches make one step."""
    clip: Annotated[float, Field(ge=0)] = Pace.clip
    """The longest that the gradient of a step may be; 0 is any length."""
    precision: str = Pace.precision
    """What forward passes compute in where that is safe: float32, bf16 or fp16."""
    checkpointing: bool = Pace.checkpointing
    """Whether blocks are worked out again for their gradients, to save memory."""
    compile: str = Pace.compile
    """A backend of torch.compile, such as inductor; without it, nothing is compiled."""
    by_length: bool = Pace.by_length
    """Whether texts of similar length come into one batch."""
    workers: Count = Pace.workers
    """How many threads make the next batches meanwhile."""
    reuse: bool = Pace.reuse
    """Whether the output of what is frozen below all that is trained is kept for each row."""
    cache: Count = ROOM
    """How many megabytes of such outputs each machine keeps; it changes no bit."""

    @property
    def pace(self) -> Pace:
        """The same as a value, the optimiser and the schedule by their names."""
        said = {name: getattr(self, name) for name in _PLAIN}
        return Pace(self._optimiser, schedule=self._schedule, **said)

    @property
    def features(self) -> Features | None:
        """Where a process keeps frozen outputs, if they are to be used again."""
        return Features(self.cache) if self.reuse else None

    @property
    def _optimiser(self) -> ClientOptimiser:
        settings = {w: v for w in ("decay", "momentum") if (v := getattr(self, w))}
        return optimiser_named(self.optimiser, {**self.optimiser_settings, **settings})

    @property
    def _schedule(self) -> Schedule:
        # One that stays the same does not follow from the rounds: these may be added later.
        over = self.rounds if self.over == "run" and self.schedule != Pace.schedule.name else 0
        settings, warm = self.schedule_settings, self.warmup
        return schedule_named(self.schedule, settings, warmup=warm, rounds=over)

    @model_validator(mode="after")
    def _makes_steps(self) -> TrainSection:
        with as_fault():
            self.pace.schedule.factor(self.rate, 1, 1)
        if not self.decay_all and not self.decay:
            raise ValueError("decay_all = false spares norms and biases: say the decay of the rest")
        return self
