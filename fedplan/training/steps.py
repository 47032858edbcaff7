# SPDX-License-Identifier: Apache-2.0
"""Steps: the optimiser of one turn at the rates of its schedule, and the scaler of float16."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fedplan.errors import FedplanError


class Stepper:
    """The steps of one turn: `factor` says what each step's rate is multiplied by.

    A step whose gradients are not finite in float16 is left out: its scaler tries a smaller scale.
    `taken` counts the others, and `factors` is the sum of theirs.
    """

    def __init__(
        self,
        optimiser: torch.optim.Optimizer,
        factor: Callable[[int], float],
        scaler: torch.amp.GradScaler,
    ) -> None:
        self._optimiser, self._factor, self._scaler = optimiser, factor, scaler
        self._rates = [group.get("lr") for group in optimiser.param_groups]
        self._last, self._tried, self.taken, self.factors = 1.0, 0, 0, 0.0

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a loss to those there are."""
        self._scaler.scale(loss).backward()

    def step(self, adjust: Callable[[], None]) -> None:
        """Change the gradients as asked, take a step at its rate, and forget them."""
        self._scaler.unscale_(self._optimiser)
        adjust()
        factor, scale = self._factor(self._tried), self._scaler.get_scale()
        if factor != self._last:
            self._set(factor)
        self._scaler.step(self._optimiser)
        self._scaler.update()
        self._optimiser.zero_grad()
        self._tried += 1
        if self._scaler.get_scale() >= scale:
            self.taken, self.factors = self.taken + 1, self.factors + factor

    def _set(self, factor: float) -> None:
        for group, rate in zip(self._optimiser.param_groups, self._rates, strict=True):
            if rate is None:
                kind = type(self._optimiser).__name__
                raise FedplanError(f"{kind} keeps no lr in its groups, so no schedule can set it")
            group["lr"] = rate * factor
        self._last = factor
