# SPDX-License-Identifier: Apache-2.0
"""Aggregation with client-level differential privacy at the server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from fedplan.errors import FedplanError
from fedplan.federation.aggregation import AggregationResult, PollScores
from fedplan.federation.agreement import Agreement
from fedplan.federation.global_state import GlobalState
from fedplan.federation.messages import UpdateRejected
from fedplan.models.params import Block
from fedplan.privacy.guard import ServerGuard
from fedplan.privacy.mechanisms.gaussian import GaussianMechanism
from fedplan.tensors.named import Tensors
from fedplan.tensors.sums import ExactSum


@dataclass(frozen=True)
class PrivateAggregation:
    """Client-level DP at the server: clipped updates, equal weights, and noise on the sum."""

    agreement: Agreement
    guard: ServerGuard
    hides_clients: ClassVar[bool] = True

    def checkpoint_meta(self) -> dict[str, Any]:
        """Return the number of privacy charges, so that a shortened budget file is detected."""
        return {"charges": len(self.guard.budget.charges)}

    def sample_clients(self, number: int, roster: Sequence[str]) -> list[str]:
        """Return the clients drawn by Poisson sampling with the guard's secret.

        Raises PrivacyError if the privacy budget does not suffice for the round.
        """
        self.guard.require_affordable_round(number, round_charge_name(number))
        return self.guard.sample_cohort(roster, number)

    def joint_scores(self, number: int, polled: PollScores) -> dict[Block, float]:
        """Return the noisy counts of a vote; a ballot names the blocks with scores other than 0."""
        ballots = [{b for b, score in scores.items() if score} for scores in polled.values()]
        agreed = self.agreement
        return self.guard.release_votes(
            ballots, agreed.blocks, agreed.max_k, round_charge_name(number)
        )

    def open_round(
        self, global_state: GlobalState, shared: Callable[[], Tensors], roster: int
    ) -> ClientDPAggregator:
        """Return the aggregator of the next round."""
        mechanism = self.guard.make_mechanism(shared(), roster, global_state.clipping_norm)
        return ClientDPAggregator(
            self.guard, mechanism, global_state.values, global_state.round + 1
        )


@dataclass
class ClientDPAggregator:
    """Exact sum of clipped updates, released with noise.

    `guard`: None in a worker's partial sum, which is merged and never released. `base`: global
    values before the round. `number`: the round. `count`: updates. `within`: updates that needed no
    clipping. Drift is not computed, since the privacy budget does not cover it.
    """

    guard: ServerGuard | None
    mechanism: GaussianMechanism
    base: Tensors
    number: int
    changes: ExactSum = field(default_factory=ExactSum)
    count: int = 0
    within: int = 0

    def require(self, values: Tensors, aux: Tensors, weight: int) -> None:
        """Raise UpdateRejected if there are auxiliary tensors, which are not clipped."""
        require_no_aux(aux)

    def add(self, client: str, values: Tensors, aux: Tensors, weight: int) -> None:
        """Add one client's clipped change; the weight is ignored."""
        change = {k: value.double() - self.base[k].double() for k, value in values.items()}
        self.within += self.mechanism.add(self.changes, change)
        self.count += 1

    def merge(self, other: ClientDPAggregator) -> None:
        """Add all updates of another aggregator of the same round."""
        self.changes.merge(other.changes)
        self.count, self.within = self.count + other.count, self.within + other.within

    def close(self) -> AggregationResult:
        """Charge the budget, then return the base plus the noisy mean change.

        Raises FedplanError without a guard.
        """
        if self.guard is None:
            raise FedplanError(
                "a partial private sum cannot be released: merge it into the round's sum"
            )
        about, within = round_charge_name(self.number), f"{self.within} of {self.count}"
        mechanism = self.mechanism
        released = self.guard.release_mean(mechanism, self.changes, self.number, about, within)
        norm = self.guard.next_clipping_norm(mechanism, self.within, self.count, about)
        means = {key: self.base[key] + change for key, change in released.items()}
        return AggregationResult(means, clipping_norm=norm)


def require_no_aux(aux: Tensors) -> None:
    """Raise UpdateRejected if an update has auxiliary tensors."""
    if aux:
        raise UpdateRejected(f"{min(aux)!r} is not covered by differential privacy")


def round_charge_name(number: int) -> str:
    """Return the name of a round's charge to the privacy budget."""
    return f"round {number}"
