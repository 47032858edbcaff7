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

from fedplan.data.examples import Examples
from fedplan.models.params import Block
from fedplan.privacy.accounting.budget import Budget, Cap
from fedplan.privacy.accounting.events import Spent
from fedplan.privacy.dpsgd.fit import DPSGD, Uniform, dp_sgd
from fedplan.privacy.errors import PrivacyError
from fedplan.privacy.guarantee import COUNT_NOISE, Guarantee, voted
from fedplan.privacy.mechanisms.clipping import Adaptive
from fedplan.privacy.mechanisms.gaussian import Change, Mechanism
from fedplan.privacy.mechanisms.noise import Noise
from fedplan.privacy.mechanisms.sampling import cohort
from fedplan.privacy.mechanisms.secret import derived, secret_of
from fedplan.privacy.mechanisms.vote import Vote, ballot, counted
from fedplan.storage.encryption import Encryption
from fedplan.storage.locks import synced
from fedplan.tensors.named import Tensors
from fedplan.tensors.sums import ExactSum
from fedplan.training.fit import Fit
from fedplan.training.probes import Look, Probe

T = TypeVar("T", bound=Hashable)
SECRET, CHARGES = "secret", "charges.jsonl"


class Guard:
    """A guarantee with the secret and the charges that keep it.

    A folder may hold the charges of many runs: those of this one have names that begin with `run`.
    All of them together stay within the `limit`, of the `delta`, that the folder's owner has set.
    """

    def __init__(
        self,
        guarantee: Guarantee,
        folder: Path,
        *,
        run: str = "",
        limit: float = 0.0,
        delta: float = 0.0,
        seal: Encryption | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        synced(folder.parent)
        self.guarantee, self._secret = guarantee, secret_of(folder / SECRET, seal)
        self._cap = Cap(guarantee.epsilon, guarantee.delta, run)
        self.budget = Budget(
            folder / CHARGES,
            delta=delta or guarantee.delta,
            limit=limit or None,
            unit=guarantee.unit,
            cap=self._cap,
        )

    @property
    def spent(self) -> float:
        """The epsilon that this run has spent."""
        return self.budget.spent_of(self._cap)

    def require_room(self, round: int, about: str) -> None:
        """Refuse a round that the budget no longer pays for, before any work is done for it.

        What was charged under its names counts as paid: if it is another content then, its charge
        is refused when it comes.
        """
        paid = {charge.about for charge in self.budget.charges}
        bill = self.guarantee.bill(round, about)
        self.budget.require_room(*(Spent(e, name) for name, e in bill.items() if name not in paid))

    def require_paid(self, count: int) -> None:
        """Refuse to go on with fewer charges than there once were: a file was lost or put back."""
        if (found := len(self.budget.charges)) < count:
            raise PrivacyError(
                f"{self.budget.file} holds {found} charges, and there were {count}: put the last "
                "copy of it back; without it nobody knows what was spent"
            )

    def mechanism(
        self, shared: Mapping[str, Tensor], clients: int, clip: float = 0.0, parts: int = 0
    ) -> Mechanism:
        """The mechanism of a round that hides clients, over what any of them may share in it.

        With `parts` its noise is added in shares, and so many have all of it.
        """
        guarantee = self.guarantee
        public = {key: (tuple(v.shape), v.dtype) for key, v in shared.items()}
        over = clients * (guarantee.rate or 1.0)
        clip, rate = clip or guarantee.clip, guarantee.rate
        return Mechanism(public, clip, guarantee.noise, over, rate, parts)

    def _count(
        self, vote: Vote, ballots: Iterable[Collection[T]], blocks: Sequence[T], about: str, of: str
    ) -> dict[T, float]:
        """The noisy counts of a vote, charged first; `of` is all that the ballots follow from."""
        counts = counted(ballots, blocks, vote.k)
        digest = vote.digest(counts, self._secret, about, of)
        self.budget.charge(vote.event, about, digest=digest)
        return vote.release(counts, self._secret, about, of)


class ServerGuard(Guard):
    """The server's guard: it hides each client in the sum of a round."""

    def cohort(self, roster: Iterable[str], number: int) -> list[str]:
        """The clients of a round: all, or those drawn with the promised chance."""
        rate = self.guarantee.rate
        return list(roster) if rate is None else cohort(roster, rate, self._secret, number)

    def vote(
        self, ballots: Iterable[Collection[T]], blocks: Sequence[T], k: int, about: str
    ) -> dict[T, float]:
        """How many clients named each block, with noise."""
        return self._count(Vote(k, self.guarantee.vote), ballots, blocks, voted(about), "")

    def release(
        self, mechanism: Mechanism, total: ExactSum, round: int, about: str, within: str = ""
    ) -> dict[str, Tensor]:
        """The mean change with its noise, charged first.

        One charge pays for the sum and for the count that a clip follows: `within` tells of that.
        """
        digest = mechanism.digest(total, self._secret, about)
        if self.guarantee.quantile:
            digest = derived(self._secret, "digest", digest, within).hex()[:32]
        self.budget.charge(self.guarantee.bill(round, about)[about], about, digest=digest)
        return mechanism.release(total, self._secret, about)

    def share(self, mechanism: Mechanism, change: Change, about: str) -> ExactSum:
        """Of a rehearsal: what one client would hand to a masked sum, with its share of noise."""
        return mechanism.noised(mechanism.clipped(change), self._secret, about)

    def opened(self, mechanism: Mechanism, total: ExactSum, round: int, about: str) -> Tensors:
        """The mean change of a sum that came with its noise; charged before it is made of it."""
        digest = mechanism.digest(total, self._secret, about)
        self.budget.charge(self.guarantee.bill(round, about)[about], about, digest=digest)
        return mechanism.divided(total)

    def moved(self, mechanism: Mechanism, within: int, cohort: int, about: str) -> float:
        """The clip of the next round. What it costs is in the charge of the release."""
        quantile = self.guarantee.quantile
        if not quantile:
            return 0.0
        moving = Adaptive(mechanism.bound, quantile, noise=COUNT_NOISE)
        after = moving.after(within, cohort, mechanism.over, secret=self._secret, about=about)
        return after.bound


class ClientGuard(Guard):
    """A site's guard: it hides each example in every step."""

    def vote(
        self, look: Look, probe: Probe, k: int, about: str, content: str
    ) -> dict[Block, float]:
        """How many of the rows drawn named each block by their own scores, with noise.

        `content` tells of all that their scores follow from, as in `fit`. The noise follows from it
        too: if it followed from the counts alone, the same bytes would tell that two are the same.
        Which rows are drawn follows from the name, since votes of one name are charged as sums over
        one draw: of a row that is rarely drawn, many draws would cost more than that.
        """
        rate, about = self.guarantee.rate or 1.0, voted(about)
        source = Noise.for_release(self._secret, "rows of a vote", about)
        drawn = self._uniform(source)(len(look.rows))
        rows = [_Row(look.rows, int(i)) for i in (drawn < rate).nonzero().flatten()]
        ballots = [ballot(probe(replace(look, rows=row)), k) for row in rows]
        return self._count(Vote(k, self.guarantee.vote, rate), ballots, look.blocks, about, content)

    def require_turn(self, round: int, about: str, content: str) -> None:
        """Refuse a turn that is not paid for by its content, and that nothing is left to pay."""
        self.budget.require_room(self._charge(round, about, content))

    def _charge(self, round: int, about: str, content: str) -> Spent:
        digest = derived(self._secret, "digest", about, content).hex()[:32]
        return Spent(self.guarantee.bill(round, about)[about], about, digest)

    def fit(self, round: int, about: str, content: str) -> Fit:
        """The fit of one turn, charged first.

        The same turn again draws the same noise. `content` tells of all that it is made of: if one
        of its rows, values or settings is another, it is another turn, whatever it is called. What
        it is called decides who pays, and not what is drawn.
        """
        guarantee = self.guarantee
        charge = self._charge(round, about, content)
        self.budget.charge(charge.event, about, digest=charge.digest)
        noise = Noise.for_release(self._secret, "turn", content)

        def normal(shape: tuple[int, ...]) -> Tensor:
            return noise.gaussian(shape, 1.0)

        privately = DPSGD(
            clip=guarantee.clip,
            noise=guarantee.noise,
            expected_batch=guarantee.batch,
            rate=guarantee.rate or 1.0,
            steps=guarantee.steps,
        )
        return dp_sgd(privately, normal=normal, uniform=self._uniform(noise))

    @staticmethod
    def _uniform(noise: Noise) -> Uniform:
        def uniform(count: int) -> Tensor:
            return noise.uniform(count) if count else torch.empty(0, dtype=torch.float64)

        return uniform


class ShareGuard(Guard):
    """A site's guard where not even the server may see a sum without noise: it adds a share."""

    def require_charged(self, about: str) -> None:
        """Refuse to go on without the charge of what has left."""
        if about not in {charge.about for charge in self.budget.charges}:
            raise PrivacyError(
                f"{self.budget.file} has no charge of {about}, and its words have left: put the "
                "last copy of it back; without it nobody knows what was spent"
            )

    def share(
        self, mechanism: Mechanism, change: Change, round: int, about: str, terms: bytes
    ) -> ExactSum:
        """The site's clipped change with its share of the noise, charged before it is made.

        The charge is by what was clipped: a round that is begun anew, under other `terms`, costs
        nothing more, since one of its sums is opened at most. The noise is by both: it is never
        on other numbers, and after a kill it is the same.
        """
        own = mechanism.clipped(change)
        digest = mechanism.digest(own, self._secret, about)
        self.budget.charge(self.guarantee.bill(round, about)[about], about, digest=digest)
        return mechanism.noised(own, self._secret, about, terms)


@dataclass(frozen=True)
class _Row:
    """One row of a client's, alone."""

    rows: Examples
    number: int

    def __len__(self) -> int:
        return 1

    def batch(self, indices: Tensor) -> dict[str, Tensor]:
        return self.rows.batch(torch.full_like(indices, self.number))
