# SPDX-License-Identifier: Apache-2.0
"""Learning rate schedules of transformers, over one turn or over a whole run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any, cast

import torch

from fedplan.errors import FedplanError
from fedplan.language.canonical import format_dataclass
from fedplan.naming import unknown_name_message

CONSTANT = "constant"
SCHEDULES = (
    *(CONSTANT, "constant_with_warmup", "linear", "cosine", "cosine_with_restarts"),
    *("polynomial", "inverse_sqrt", "cosine_with_min_lr", "cosine_warmup_with_min_lr"),
)
"""Names of transformers.get_scheduler that are supported."""
UNSUPPORTED = {
    "reduce_lr_on_plateau": "its rates depend on the losses, not on the step alone",
    "greedy": "its rates depend on the losses, not on the step alone",
    "warmup_stable_decay": "it counts its decay in steps, and clients differ in their steps",
}
"""Names that are not supported, with the reason."""


@dataclass(frozen=True)
class LRSchedule:
    """A learning rate schedule, as a value without state; `factor` gives the rates of a turn.

    `name`: one of SCHEDULES, names of transformers.get_scheduler; `constant` keeps the rate.
    `rounds`: the schedule covers a run of so many rounds; 0 restarts the schedule in each turn.
    `warmup`: below 1, a fraction of the schedule; else rounds of the run, or steps of the turn.
    `settings`: further arguments of the scheduler, as sorted pairs of name and value.
    Raises FedplanError for an unsupported name, for a warmup that is negative, longer than `rounds`
    or above 1 and not whole, and for `constant` with any warmup, rounds or settings.
    """

    name: str = CONSTANT
    warmup: float = 0.0
    rounds: int = 0
    settings: tuple[tuple[str, str | float], ...] = ()

    def __post_init__(self) -> None:
        if self.name in UNSUPPORTED:
            reason = UNSUPPORTED[self.name]
            raise FedplanError(f"{self.name} cannot be a client's schedule: {reason}")
        if self.name not in SCHEDULES:
            raise FedplanError(unknown_name_message("schedule", self.name, SCHEDULES))
        if self.name == CONSTANT and (self.warmup or self.rounds or self.settings):
            raise FedplanError(
                "the schedule constant has no warmup, rounds or settings: use constant_with_warmup"
            )
        if not self.warmup >= 0 or (self.warmup > 1 and self.warmup % 1):
            raise FedplanError(
                f"warmup is {self.warmup!r}: give a fraction below 1, or a whole number of "
                f"{'rounds' if self.rounds else 'steps'}"
            )
        if self.rounds and self.warmup > self.rounds:
            raise FedplanError(f"warmup is {self.warmup:g} rounds of {self.rounds}: give fewer")

    @property
    def text(self) -> str:
        """All settings in one line; part of the text that server and clients compare."""
        return format_dataclass("schedule", self)

    def factor(self, lr: float, round: int, steps: int) -> Callable[[int], float]:
        """Return a function from the number of a step in a turn, from 0, to a factor of `lr`.

        `lr`: the optimizer's learning rate. `round`: number of the round, from 1. `steps`: steps of
        the turn. Raises FedplanError if the round is beyond the schedule, or if transformers
        rejects the settings.
        """
        # A pure function: there is no scheduler state to store between turns.
        if self.name == CONSTANT:
            return lambda _: 1.0
        if self.rounds and round > self.rounds:
            raise FedplanError(
                f"round {round} is beyond the {self.rounds} rounds of the schedule {self.name}: "
                "start another run with more rounds, or let the schedule cover each turn"
            )
        from transformers import optimization

        first = (round - 1) * steps if self.rounds else 0
        total_steps = steps * (self.rounds or 1)
        if self.warmup < 1:
            warmup_steps = ceil(self.warmup * total_steps)
        else:
            warmup_steps = int(self.warmup) * (steps if self.rounds else 1)
        # Some schedules end at a fraction of the optimizer's initial rate, so they need one.
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=lr)
        get_scheduler: Any = cast("Any", optimization).get_scheduler
        settings = dict(self.settings)
        try:
            scheduler = get_scheduler(self.name, optimizer, warmup_steps, total_steps, settings)
        except (TypeError, ValueError) as error:
            raise FedplanError(f"the schedule {self.text} cannot be created: {error}") from error
        lr_lambda = scheduler.lr_lambdas[0]
        return lambda step: lr_lambda(first + step)


def make_lr_schedule(
    name: str,
    settings: Mapping[str, str | float] | None = None,
    *,
    warmup: float = LRSchedule.warmup,
    rounds: int = LRSchedule.rounds,
) -> LRSchedule:
    """Return the LRSchedule of a name; `settings` are arguments of the schedule, as `min_lr_rate`.

    Raises FedplanError as LRSchedule does.

    >>> make_lr_schedule("cosine_with_min_lr", {"min_lr_rate": 0.1}, warmup=2, rounds=20).text
    'schedule(name="cosine_with_min_lr", warmup=2, rounds=20, settings=[["min_lr_rate", 0.1]])'
    """
    return LRSchedule(name, warmup, rounds, tuple(sorted((settings or {}).items())))
