# SPDX-License-Identifier: Apache-2.0
"""Guards: what stands between a server's sums and the world, and between a site's steps and them.

Each has a folder with its secret and the file of its charges: what is charged there is on disk
before anything that it pays for leaves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from fedplan.fit import Fit
from fedplan.privacy.accountant import epsilon
from fedplan.privacy.aggregate import Mechanism
from fedplan.privacy.budget import Budget
from fedplan.privacy.dpsgd import Privately, dp_sgd
from fedplan.privacy.errors import PrivacyError
from fedplan.privacy.noise import Noise
from fedplan.privacy.promise import Promise
from fedplan.privacy.sampling import cohort
from fedplan.privacy.secret import secret_of
from fedplan.sums import ExactSum

SECRET, CHARGES = "secret", "charges.jsonl"


class Guard:
    """A promise with the secret and the charges that keep it."""

    def __init__(self, promise: Promise, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.promise, self._secret = promise, secret_of(folder / SECRET)
        self.budget = Budget(
            folder / CHARGES, delta=promise.delta, limit=promise.epsilon, unit=promise.unit
        )

    def require_room(self, about: str) -> None:
        """Refuse what the budget no longer pays for, before any work is done for it."""
        charges = self.budget.charges
        if any(charge.about == about for charge in charges):
            return
        events = [charge.event for charge in charges]
        after = epsilon([*events, self.promise.event], self.promise.delta)
        if after > self.promise.epsilon:
            raise PrivacyError(
                f"{about} would make epsilon {after:.4g}, and {self.promise.epsilon:g} was "
                f"promised: the run ends here, with epsilon {self.budget.spent():.4g} spent"
            )


class Veil(Guard):
    """The server's guard: it hides each client in the sum of a round."""

    def cohort(self, roster: Iterable[str], number: int) -> list[str]:
        """The clients of a round: all, or those drawn with the promised chance."""
        rate = self.promise.rate
        return list(roster) if rate is None else cohort(roster, rate, self._secret, number)

    def mechanism(self, shared: Mapping[str, Tensor], clients: int) -> Mechanism:
        """The mechanism of a round over what any client may share in it."""
        promise = self.promise
        public = {key: (tuple(v.shape), v.dtype) for key, v in shared.items()}
        over = clients * (promise.rate or 1.0)
        return Mechanism(public, promise.clip, promise.noise, over, promise.rate)

    def release(self, mechanism: Mechanism, total: ExactSum, about: str) -> dict[str, Tensor]:
        """The mean change with its noise, charged first."""
        digest = mechanism.digest(total, self._secret, about)
        self.budget.charge(mechanism.event, about, digest=digest)
        return mechanism.release(total, self._secret, about)


class Cloak(Guard):
    """A site's guard: it hides each example in every step."""

    def fit(self, about: str) -> Fit:
        """The fit of one turn, charged first. The same turn again draws the same noise."""
        promise = self.promise
        self.require_room(about)
        self.budget.charge(promise.event, about)
        noise = Noise.for_release(self._secret, about)

        def normal(shape: tuple[int, ...]) -> Tensor:
            return noise.gaussian(shape, 1.0)

        def uniform(count: int) -> Tensor:
            return noise.uniform(count) if count else torch.empty(0, dtype=torch.float64)

        privately = Privately(
            clip=promise.clip,
            noise=promise.noise,
            expected_batch=promise.batch,
            rate=promise.rate or 1.0,
            steps=promise.steps,
        )
        return dp_sgd(privately, normal=normal, uniform=uniform)
