# SPDX-License-Identifier: Apache-2.0
"""Optimizer steps of one turn, with the learning rate schedule and float16 gradient scaling."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fedplan.errors import FedplanError


class Stepper:
    """Takes the optimizer steps of one turn: call `backward` for each batch, then `step`.

    `factor`: maps the number of a step, from 0, to the factor of the learning rate. `scaler`: the
    gradient scaler, disabled except under float16, which skips steps with overflowing gradients.
    `steps_taken`: steps so far, without skipped ones. `factor_sum`: sum of the factors of these.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        factor: Callable[[int], float],
        scaler: torch.amp.GradScaler,
    ) -> None:
        self._optimizer, self._factor, self._scaler = optimizer, factor, scaler
        self._base_lrs = [group.get("lr") for group in optimizer.param_groups]
        self._last_factor, self._attempts = 1.0, 0
        self.steps_taken, self.factor_sum = 0, 0.0

    def backward(self, loss: Tensor) -> None:
        """Backpropagate a loss; gradients accumulate until `step`."""
        self._scaler.scale(loss).backward()

    def step(self, adjust: Callable[[], None]) -> None:
        """Unscale the gradients, call `adjust`, set the learning rate, step, zero the gradients.

        Raises FedplanError if the rate changes and a param group of the optimizer has no `lr`.
        """
        self._scaler.unscale_(self._optimizer)
        adjust()
        factor, scale = self._factor(self._attempts), self._scaler.get_scale()
        if factor != self._last_factor:
            for group, base_lr in zip(self._optimizer.param_groups, self._base_lrs, strict=True):
                if base_lr is None:
                    kind = type(self._optimizer).__name__
                    raise FedplanError(
                        f"{kind} keeps no lr in its groups, so no schedule can set it"
                    )
                group["lr"] = base_lr * factor
            self._last_factor = factor
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._optimizer.zero_grad()
        self._attempts += 1
        if self._scaler.get_scale() >= scale:
            self.steps_taken, self.factor_sum = self.steps_taken + 1, self.factor_sum + factor
