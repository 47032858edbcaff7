# SPDX-License-Identifier: Apache-2.0
"""Schedules: the rate of each step as a share of the pace's, over a turn or over a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any, cast

import torch

from fedplan.errors import FedplanError
from fedplan.language.wording import spelled_out
from fedplan.naming import unknown

CONSTANT = "constant"
SCHEDULES = (
    *(CONSTANT, "constant_with_warmup", "linear", "cosine", "cosine_with_restarts"),
    *("polynomial", "inverse_sqrt", "cosine_with_min_lr", "cosine_warmup_with_min_lr"),
)
"""The names of transformers.get_scheduler that a pace can have."""
UNFIT = {
    "reduce_lr_on_plateau": "it follows the losses, so that a rate is no function of its step",
    "greedy": "it follows the losses, so that a rate is no function of its step",
    "warmup_stable_decay": "it counts its decay in steps, and no two clients have as many",
}
"""Those that it cannot, and why."""


@dataclass(frozen=True)
class Schedule:
    """How the rate goes, by a name of transformers.get_scheduler; `constant` leaves it as it is.

    With `rounds` it goes over a run of so many; without, over each turn anew. A `warmup` below 1 is
    a share of that; from 1 on it counts rounds of a run, or steps of a turn. `settings` are what
    else the name takes, as in `schedule_named`.
    """

    name: str = CONSTANT
    warmup: float = 0.0
    rounds: int = 0
    settings: tuple[tuple[str, str | float], ...] = ()

    def __post_init__(self) -> None:
        if self.name not in SCHEDULES:
            raise FedplanError(_no_schedule(self.name))
        if self.name == CONSTANT and (self.warmup or self.rounds or self.settings):
            raise FedplanError(
                "the schedule constant has no warmup, rounds or settings: say constant_with_warmup"
            )
        if not self.warmup >= 0 or (self.warmup > 1 and self.warmup % 1):
            raise FedplanError(
                f"warmup is {self.warmup!r}: give a share below 1, or a whole number of "
                f"{'rounds' if self.rounds else 'steps'}"
            )
        if self.rounds and self.warmup > self.rounds:
            raise FedplanError(f"warmup is {self.warmup:g} rounds of {self.rounds}: give fewer")

    @property
    def text(self) -> str:
        """All of it in one line, for both ends to compare."""
        return spelled_out("schedule", self)

    def factor(self, rate: float, round: int, steps: int) -> Callable[[int], float]:
        """What the rate of each step of a turn is multiplied by.

        It follows from these numbers alone. So there is no state to keep between turns, and none to
        lose when a process is killed.
        """
        if self.name == CONSTANT:
            return lambda _: 1.0
        if self.rounds and round > self.rounds:
            raise FedplanError(
                f"round {round} lies beyond the {self.rounds} that the schedule {self.name} goes "
                "over: begin another run with more rounds, or let it go over each turn"
            )
        before = (round - 1) * steps if self.rounds else 0
        curve = self._curve(rate, steps)
        return lambda step: curve(before + step)

    def _curve(self, rate: float, steps: int) -> Callable[[int], float]:
        """The function of a step that transformers makes, of a run or a turn as long as this."""
        from transformers import optimization

        whole = steps * (self.rounds or 1)
        counted = int(self.warmup) * (steps if self.rounds else 1)
        warm = ceil(self.warmup * whole) if self.warmup < 1 else counted
        # Some have an end of their own, which is a share of the rate that an optimiser begins with.
        held = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=rate)
        make: Any = cast("Any", optimization).get_scheduler
        try:
            made = make(self.name, held, warm, whole, dict(self.settings))
        except (TypeError, ValueError) as error:
            raise FedplanError(f"the schedule {self.text} cannot be made: {error}") from error
        return made.lr_lambdas[0]


def schedule_named(
    name: str,
    settings: Mapping[str, str | float] | None = None,
    *,
    warmup: float = Schedule.warmup,
    rounds: int = Schedule.rounds,
) -> Schedule:
    """A schedule with what its name takes beside a warmup, such as `min_lr_rate`.

    >>> schedule_named("cosine_with_min_lr", {"min_lr_rate": 0.1}, warmup=2, rounds=20).text
    'schedule(name="cosine_with_min_lr", warmup=2, rounds=20, settings=[["min_lr_rate", 0.1]])'
    """
    return Schedule(name, warmup, rounds, tuple(sorted((settings or {}).items())))


def _no_schedule(name: str) -> str:
    if name in UNFIT:
        return f"{name} cannot be a client's schedule: {UNFIT[name]}"
    return unknown("schedule", name, SCHEDULES)
