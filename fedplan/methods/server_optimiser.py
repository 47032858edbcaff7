# SPDX-License-Identifier: Apache-2.0
"""Serves: what the server does with the clients' mean before it becomes the world's value."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedplan.errors import FedplanError
from fedplan.language.wording import spelled_out

Memory = dict[str, Tensor]
"""What a server's optimiser remembers of one param, by name."""


@dataclass(frozen=True)
class Serve:
    """A server's optimiser: it takes the clients' mean change as a gradient (Reddi et al. 2021).

    `plain` at rate 1 is the mean itself, FedAvg; `momentum` is FedAvgM; `adam`, `yogi` and
    `adagrad` are FedAdam, FedYogi and FedAdagrad. Memory is held per param, so a part that rests
    keeps it.
    """

    rule: str = "plain"
    rate: float = 1.0
    momentum: float = 0.9
    second: float = 0.99
    floor: float = 1e-3

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise FedplanError(f"there is no serve {self.rule!r}; there are {', '.join(RULES)}")

    @property
    def text(self) -> str:
        """It in one line, for both ends to compare."""
        return spelled_out("serve", self)

    def step(self, old: Tensor, mean: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
        """The world's next value of one param, and what to remember of it."""
        if self.rule == "plain" and self.rate == 1.0:
            return mean, {}
        change = mean.double() - old.double()
        moved, kept = self._moved(change, {k: v.double() for k, v in memory.items()})
        fresh = old.double() + self.rate * moved
        return fresh.to(old.dtype), {k: v.float() for k, v in kept.items()}

    def _moved(self, change: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
        if self.rule == "plain":
            return change, {}
        zero = torch.zeros_like(change)
        first = memory.get("first", zero)
        if self.rule == "momentum":
            first = self.momentum * first + change
            return first, {"first": first}
        first = self.momentum * first + (1 - self.momentum) * change
        second = self._second(memory.get("second", zero + self.floor**2), change**2)
        return first / (second.sqrt() + self.floor), {"first": first, "second": second}

    def _second(self, second: Tensor, square: Tensor) -> Tensor:
        if self.rule == "adagrad":
            return second + square
        if self.rule == "yogi":
            return second - (1 - self.second) * square * torch.sign(second - square)
        return self.second * second + (1 - self.second) * square


RULES = ("plain", "momentum", "adam", "yogi", "adagrad")
