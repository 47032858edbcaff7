# SPDX-License-Identifier: Apache-2.0
"""The pace of a study: how it says that each client trains in its turn."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Literal

from pydantic import Field, model_validator

from fedplan.studies.words import (
    Count,
    OptimiserName,
    Positive,
    Scalar,
    Section,
    as_fault,
)
from fedplan.training.fit import Pace
from fedplan.training.optimisers import DECAY, MOMENTUM, ClientOptimiser, optimiser_named
from fedplan.training.schedules import Schedule, schedule_named

_PLAIN = tuple(f.name for f in fields(Pace) if f.name not in ("optimiser", "schedule"))
"""What a pace and its section say in the same words."""


class TrainSection(Section):
    """How each client trains in its turn.

    `schedule` goes over all rounds, or over each turn anew; `warmup` is a share of that below 1,
    and else a number of rounds, or of a turn's steps. `optimiser_settings` and `schedule_settings`
    are what else these two take by their names.
    """

    rounds: Positive = 10
    optimiser: OptimiserName = Pace.optimiser.name
    optimiser_settings: dict[str, Scalar | list[Scalar]] = {}
    rate: Annotated[float, Field(gt=0)] = Pace.rate
    schedule: str = Pace.schedule.name
    schedule_settings: dict[str, str | float] = {}
    warmup: Annotated[float, Field(ge=0)] = Schedule.warmup
    over: Literal["run", "turn"] = "run"
    decay: Annotated[float, Field(ge=0)] = DECAY
    decay_all: bool = Pace.decay_all
    momentum: Annotated[float, Field(ge=0, lt=1)] = MOMENTUM
    epochs: Positive = Pace.epochs
    steps: Count = Pace.steps
    batch: Positive = Pace.batch
    accumulate: Positive = Pace.accumulate
    clip: Annotated[float, Field(ge=0)] = Pace.clip
    precision: str = Pace.precision
    checkpointing: bool = Pace.checkpointing
    compile: str = Pace.compile
    by_length: bool = Pace.by_length
    workers: Count = Pace.workers

    @property
    def pace(self) -> Pace:
        """The same as a value, the optimiser and the schedule by their names."""
        said = {name: getattr(self, name) for name in _PLAIN}
        return Pace(self._optimiser, schedule=self._schedule, **said)

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
