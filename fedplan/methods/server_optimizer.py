# SPDX-License-Identifier: Apache-2.0
"""Server optimizers: from the mean of the clients to the next global value of a param."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

OptimizerState = dict[str, Tensor]
"""State of a server optimizer for one param: tensors by name."""
ServerOptimizer = Callable[[Tensor, Tensor, OptimizerState], tuple[Tensor, OptimizerState]]
"""Any function (old value, mean of the clients, state) -> (next global value, next state).

The state is kept per param, so a param that is frozen for some rounds keeps its state. The
optimizers below use the mean change as a gradient (Reddi et al. 2021); `text` is their canonical
text.
"""
StepRule = Callable[[Tensor, OptimizerState], tuple[Tensor, OptimizerState]]
"""From the mean change of the clients and a state, both float64: the step, and the next state."""


@dataclass(frozen=True)
class Mean:
    """ServerOptimizer: old value + `lr` x (mean of the clients - old value); without state."""

    lr: float

    @property
    def text(self) -> str:
        return f"mean(lr={self.lr!r})"

    def __call__(
        self, old: Tensor, mean: Tensor, state: OptimizerState
    ) -> tuple[Tensor, OptimizerState]:
        if self.lr == 1.0:
            return mean, {}
        return _apply_step(old, mean.double() - old.double(), self.lr), {}


@dataclass(frozen=True)
class StatefulOptimizer:
    """ServerOptimizer with state: next value = old value + `lr` x step, computed in float64.

    `move`: function (mean change, state) to (step, next state). A call returns (next value in the
    old dtype, next state in float32) and changes no argument.
    """

    text: str
    lr: float
    move: StepRule = field(compare=False, repr=False)

    def __call__(
        self, old: Tensor, mean: Tensor, state: OptimizerState
    ) -> tuple[Tensor, OptimizerState]:
        change = mean.double() - old.double()
        step, state = self.move(change, {name: each.double() for name, each in state.items()})
        return _apply_step(old, step, self.lr), {n: each.float() for n, each in state.items()}


def _apply_step(old: Tensor, step: Tensor, rate: float) -> Tensor:
    return (old.double() + rate * step).to(old.dtype)


@dataclass(frozen=True)
class Dynamic:
    """FedDyn's ServerOptimizer: mean of the clients + the sum of all changes so far, over clients.

    The sum is of `fraction` x (mean - old value) over rounds. `fraction`: how many of all clients
    sent the param in this round; the server calls `at` before each step.
    """

    fraction: float = 1.0

    @property
    def text(self) -> str:
        return "dynamic()"

    def at(self, fraction: float) -> Dynamic:
        """Return the optimizer of a round in which this fraction of all clients sent the param."""
        return Dynamic(fraction)

    def __call__(
        self, old: Tensor, mean: Tensor, state: OptimizerState
    ) -> tuple[Tensor, OptimizerState]:
        change = mean.double() - old.double()
        total = state.get("changes", torch.zeros_like(change)).double() + self.fraction * change
        return _apply_step(mean, total, 1.0), {"changes": total.float()}


def mean(lr: float = 1.0) -> Mean:
    """Return FedAvg's optimizer: the mean of the clients; `lr` below 1 goes a part of the way."""
    return Mean(float(lr))


def momentum(lr: float = 1.0, momentum: float = 0.9) -> StatefulOptimizer:
    """Return FedAvgM's optimizer: the step is the sum of mean changes, decayed by `momentum`.

    `lr`: the server's learning rate.
    """

    def move(change: Tensor, state: OptimizerState) -> tuple[Tensor, OptimizerState]:
        first = momentum * state.get("first_moment", torch.zeros_like(change)) + change
        return first, {"first_moment": first}

    return StatefulOptimizer(_text("momentum", lr=lr, momentum=momentum), lr, move)


def nesterov(lr: float = 0.7, momentum: float = 0.9) -> StatefulOptimizer:
    """Return DiLoCo's optimizer: FedAvgM's with Nesterov momentum, as torch.optim.SGD has it.

    The step is the mean change plus `momentum` times the decayed sum of all mean changes, with this
    one. `lr`: the server's learning rate.
    """

    def move(change: Tensor, state: OptimizerState) -> tuple[Tensor, OptimizerState]:
        first = momentum * state.get("first_moment", torch.zeros_like(change)) + change
        return change + momentum * first, {"first_moment": first}

    return StatefulOptimizer(_text("nesterov", lr=lr, momentum=momentum), lr, move)


def adam(
    lr: float = 1.0, beta1: float = 0.9, beta2: float = 0.99, eps: float = 1e-3
) -> StatefulOptimizer:
    """Return FedAdam's optimizer: first moment / (root of second moment + eps), not bias-corrected.

    `lr`: the server's learning rate. `beta1`, `beta2`: decay rates of the moments. `eps`: tau,
    added to the root; the second moment starts at eps squared.
    """

    def update_second(moment: Tensor, square: Tensor) -> Tensor:
        return beta2 * moment + (1 - beta2) * square

    text = _text("adam", lr=lr, beta1=beta1, beta2=beta2, eps=eps)
    return StatefulOptimizer(text, lr, _adaptive_step(beta1, eps, update_second))


def yogi(
    lr: float = 1.0, beta1: float = 0.9, beta2: float = 0.99, eps: float = 1e-3
) -> StatefulOptimizer:
    """Return FedYogi's optimizer: `adam` with a second moment that changes in bounded steps.

    Each round moves the second moment toward the squared change, by (1 - beta2) x that square.
    `lr`, `beta1`, `beta2`, `eps`: as in `adam`.
    """

    def update_second(moment: Tensor, square: Tensor) -> Tensor:
        return moment - (1 - beta2) * square * torch.sign(moment - square)

    text = _text("yogi", lr=lr, beta1=beta1, beta2=beta2, eps=eps)
    return StatefulOptimizer(text, lr, _adaptive_step(beta1, eps, update_second))


def adagrad(lr: float = 1.0, beta1: float = 0.9, eps: float = 1e-3) -> StatefulOptimizer:
    """Return FedAdagrad's optimizer: `adam` with the sum of all squares as second moment."""
    text = _text("adagrad", lr=lr, beta1=beta1, eps=eps)
    return StatefulOptimizer(text, lr, _adaptive_step(beta1, eps, torch.add))


def _adaptive_step(
    beta1: float, eps: float, update_second: Callable[[Tensor, Tensor], Tensor]
) -> StepRule:

    def move(change: Tensor, state: OptimizerState) -> tuple[Tensor, OptimizerState]:
        zero = torch.zeros_like(change)
        first = beta1 * state.get("first_moment", zero) + (1 - beta1) * change
        second = update_second(state.get("second_moment", zero + eps**2), change**2)
        return first / (second.sqrt() + eps), {"first_moment": first, "second_moment": second}

    return move


def _text(name: str, **settings: float) -> str:
    return f"{name}({', '.join(f'{key}={float(value)!r}' for key, value in settings.items())})"
