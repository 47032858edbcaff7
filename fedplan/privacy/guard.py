# SPDX-License-Identifier: Apache-2.0
"""Guards: what stands between a server's sums and the world, and between a site's steps and them.

Each has a folder with its secret and the file of its charges: what is charged there is on disk
before anything that it pays for leaves.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from fedplan.fit import Examples, Fit
from fedplan.locks import synced
from fedplan.params import Block
from fedplan.privacy.aggregate import Mechanism
from fedplan.privacy.budget import Budget
from fedplan.privacy.clipping import Adaptive
from fedplan.privacy.dpsgd import Privately, Uniform, dp_sgd
from fedplan.privacy.errors import PrivacyError
from fedplan.privacy.events import Spent
from fedplan.privacy.noise import Noise
from fedplan.privacy.promise import COUNT_NOISE, Promise, voted
from fedplan.privacy.sampling import cohort
from fedplan.privacy.secret import derived, secret_of
from fedplan.privacy.vote import Vote, ballot, counted
from fedplan.probe import Look, Probe
from fedplan.sums import ExactSum

T = TypeVar("T", bound=Hashable)
SECRET, CHARGES = "secret", "charges.jsonl"


class Guard:
    """A promise with the secret and the charges that keep it."""

    def __init__(self, promise: Promise, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        synced(folder.parent)
        self.promise, self._secret = promise, secret_of(folder / SECRET)
        self.budget = Budget(
            folder / CHARGES, delta=promise.delta, limit=promise.epsilon, unit=promise.unit
        )

    def after(self, round: int, about: str) -> float:
        """What will have been spent after a round; if it is paid for already, what has been."""
        paid = {charge.about for charge in self.budget.charges}
        bill = self.promise.bill(round, about)
        due = [Spent(event, name) for name, event in bill.items() if name not in paid]
        return self.budget.spent(*due)

    def require_room(self, round: int, about: str) -> None:
        """Refuse a round that the budget no longer pays for, before any work is done for it."""
        after = self.after(round, about)
        if after > self.promise.epsilon:
            raise PrivacyError(
                f"{about} would make epsilon {after:.4g}, and {self.promise.epsilon:g} was "
                f"promised: the run ends here, with epsilon {self.budget.spent():.4g} spent"
            )

    def require_paid(self, count: int) -> None:
        """Refuse to go on with fewer charges than there once were: a file was lost or put back."""
        if (found := len(self.budget.charges)) < count:
            raise PrivacyError(
                f"{self.budget.file} holds {found} charges, and there were {count}: put the last "
                "copy of it back; without it nobody knows what was spent"
            )

    def _count(
        self, vote: Vote, ballots: Iterable[Collection[T]], blocks: Sequence[T], about: str
    ) -> dict[T, float]:
        """The noisy counts of a vote, charged first."""
        counts = counted(ballots, blocks, vote.k)
        self.budget.charge(vote.event, about, digest=vote.digest(counts, self._secret, about))
        return vote.release(counts, self._secret, about)


class Veil(Guard):
    """The server's guard: it hides each client in the sum of a round."""

    def cohort(self, roster: Iterable[str], number: int) -> list[str]:
        """The clients of a round: all, or those drawn with the promised chance."""
        rate = self.promise.rate
        return list(roster) if rate is None else cohort(roster, rate, self._secret, number)

    def mechanism(self, shared: Mapping[str, Tensor], clients: int, clip: float) -> Mechanism:
        """The mechanism of a round over what any client may share in it."""
        promise = self.promise
        public = {key: (tuple(v.shape), v.dtype) for key, v in shared.items()}
        over = clients * (promise.rate or 1.0)
        return Mechanism(public, clip or promise.clip, promise.noise, over, promise.rate)

    def vote(
        self, ballots: Iterable[Collection[T]], blocks: Sequence[T], k: int, about: str
    ) -> dict[T, float]:
        """How many clients named each block, with noise."""
        return self._count(Vote(k, self.promise.vote), ballots, blocks, voted(about))

    def release(
        self, mechanism: Mechanism, total: ExactSum, round: int, about: str
    ) -> dict[str, Tensor]:
        """The mean change with its noise, charged first."""
        digest = mechanism.digest(total, self._secret, about)
        self.budget.charge(self.promise.bill(round, about)[about], about, digest=digest)
        return mechanism.release(total, self._secret, about)

    def moved(self, mechanism: Mechanism, within: int, cohort: int, about: str) -> float:
        """The clip of the next round. What it costs is in the charge of the release."""
        quantile = self.promise.quantile
        if not quantile:
            return 0.0
        moving = Adaptive(mechanism.bound, quantile, noise=COUNT_NOISE)
        after = moving.after(within, cohort, mechanism.over, secret=self._secret, about=about)
        return after.bound


class Cloak(Guard):
    """A site's guard: it hides each example in every step."""

    def vote(
        self, look: Look, probe: Probe, k: int, about: str, content: str
    ) -> dict[Block, float]:
        """How many of the rows drawn named each block by their own scores, with noise.

        `content` tells of all that their scores follow from, as in `fit`.
        """
        rate, about = self.promise.rate or 1.0, voted(about)
        source = Noise.for_release(self._secret, f"{about}: rows", content)
        drawn = self._uniform(source)(len(look.rows))
        rows = [_Row(look.rows, int(i)) for i in (drawn < rate).nonzero().flatten()]
        ballots = [ballot(probe(replace(look, rows=row)), k) for row in rows]
        return self._count(Vote(k, self.promise.vote, rate), ballots, look.blocks, about)

    def fit(self, round: int, about: str, content: str) -> Fit:
        """The fit of one turn, charged first.

        The same turn again draws the same noise; if it starts from other values, or trains other
        params, it is another turn, however the server calls it. `content` tells of both.
        """
        promise = self.promise
        self.require_room(round, about)
        digest = derived(self._secret, "digest", about, content).hex()[:32]
        self.budget.charge(promise.bill(round, about)[about], about, digest=digest)
        noise = Noise.for_release(self._secret, about, content)

        def normal(shape: tuple[int, ...]) -> Tensor:
            return noise.gaussian(shape, 1.0)

        privately = Privately(
            clip=promise.clip,
            noise=promise.noise,
            expected_batch=promise.batch,
            rate=promise.rate or 1.0,
            steps=promise.steps,
        )
        return dp_sgd(privately, normal=normal, uniform=self._uniform(noise))

    @staticmethod
    def _uniform(noise: Noise) -> Uniform:
        def uniform(count: int) -> Tensor:
            return noise.uniform(count) if count else torch.empty(0, dtype=torch.float64)

        return uniform


@dataclass(frozen=True)
class _Row:
    """One row of a client's, alone."""

    rows: Examples
    number: int

    def __len__(self) -> int:
        return 1

    def batch(self, indices: Tensor) -> dict[str, Tensor]:
        return self.rows.batch(torch.full_like(indices, self.number))
