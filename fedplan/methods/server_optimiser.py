# SPDX-License-Identifier: Apache-2.0
"""Server optimisers: what the server does with the clients' mean before it is the world's value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

Memory = dict[str, Tensor]
"""What a server's optimiser remembers of one param, by name."""
ServerOptimiser = Callable[[Tensor, Tensor, Memory], tuple[Tensor, Memory]]
"""From a param's old value, the clients' mean and a memory: the world's next value, and a memory.

Any function of this shape will do. Memory is held per param, so a part that rests keeps it. Those
below take the mean change as a gradient (Reddi et al. 2021), and tell themselves apart by `text`.
"""
Move = Callable[[Tensor, Memory], tuple[Tensor, Memory]]
"""From the clients' mean change and a memory, both in float64: a move, and what to remember."""


@dataclass(frozen=True)
class Mean:
    """The mean itself at rate 1, otherwise a part of the way to it."""

    rate: float

    @property
    def text(self) -> str:
        """It with its rate."""
        return f"mean(rate={self.rate!r})"

    def __call__(self, old: Tensor, mean: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
        if self.rate == 1.0:
            return mean, {}
        return _stepped(old, mean.double() - old.double(), self.rate), {}


@dataclass(frozen=True)
class Moving:
    """A rule that remembers: `text` says it with all its settings, and tells two apart."""

    text: str
    rate: float
    move: Move = field(compare=False, repr=False)

    def __call__(self, old: Tensor, mean: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
        change = mean.double() - old.double()
        moved, kept = self.move(change, {name: held.double() for name, held in memory.items()})
        return _stepped(old, moved, self.rate), {name: held.float() for name, held in kept.items()}


def _stepped(old: Tensor, moved: Tensor, rate: float) -> Tensor:
    return (old.double() + rate * moved).to(old.dtype)


def mean(rate: float = 1.0) -> Mean:
    """FedAvg: the mean as it is, or at another rate than 1 so much of the way to it."""
    return Mean(float(rate))


def momentum(rate: float = 1.0, momentum: float = 0.9) -> Moving:
    """FedAvgM: changes add up, and old ones fade by `momentum` a round."""

    def move(change: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
        first = momentum * memory.get("first", torch.zeros_like(change)) + change
        return first, {"first": first}

    return Moving(_text("momentum", rate=rate, momentum=momentum), rate, move)


def adam(
    rate: float = 1.0, momentum: float = 0.9, second: float = 0.99, floor: float = 1e-3
) -> Moving:
    """FedAdam: each coordinate moves by its mean change over the root of its mean square.

    `second` is how the squares fade and `floor` what is added to the root. There is no correction
    of bias.
    """

    def grown(held: Tensor, square: Tensor) -> Tensor:
        return second * held + (1 - second) * square

    text = _text("adam", rate=rate, momentum=momentum, second=second, floor=floor)
    return Moving(text, rate, _scaled(momentum, floor, grown))


def yogi(
    rate: float = 1.0, momentum: float = 0.9, second: float = 0.99, floor: float = 1e-3
) -> Moving:
    """FedYogi: Adam whose squares change by no more than the new square."""

    def grown(held: Tensor, square: Tensor) -> Tensor:
        return held - (1 - second) * square * torch.sign(held - square)

    text = _text("yogi", rate=rate, momentum=momentum, second=second, floor=floor)
    return Moving(text, rate, _scaled(momentum, floor, grown))


def adagrad(rate: float = 1.0, momentum: float = 0.9, floor: float = 1e-3) -> Moving:
    """FedAdagrad: the squares add up, and fade never."""
    text = _text("adagrad", rate=rate, momentum=momentum, floor=floor)
    return Moving(text, rate, _scaled(momentum, floor, torch.add))


def _scaled(momentum: float, floor: float, grown: Callable[[Tensor, Tensor], Tensor]) -> Move:
    """The move by a mean change over the root of squares, which grow as a rule says."""

    def move(change: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
        zero = torch.zeros_like(change)
        first = momentum * memory.get("first", zero) + (1 - momentum) * change
        second = grown(memory.get("second", zero + floor**2), change**2)
        return first / (second.sqrt() + floor), {"first": first, "second": second}

    return move


def _text(name: str, **settings: float) -> str:
    return f"{name}({', '.join(f'{key}={float(value)!r}' for key, value in settings.items())})"
