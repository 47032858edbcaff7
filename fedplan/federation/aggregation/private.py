# SPDX-License-Identifier: Apache-2.0
"""Aggregation with client-level differential privacy at the server."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedplan.errors import FedplanError
from fedplan.federation.aggregation.protocol import (
    Aggregation,
    AggregationResult,
    Aggregator,
    PollScores,
    TensorsAndJson,
    merge_sums,
    require_no_aux,
    round_charge_name,
    sums_state,
)
from fedplan.federation.global_state import GlobalState
from fedplan.models.params import Block
from fedplan.privacy.guard import ServerGuard
from fedplan.privacy.mechanisms.gaussian import GaussianMechanism
from fedplan.tensors.named import Tensors
from fedplan.tensors.sums import ExactSum

CLIENT_DP_KIND = "client-dp"
"""The "kind" of a partial sum of a ClientDPAggregator."""
_SETTINGS = ("clipping_norm", "noise_multiplier", "divisor", "sampling_rate")
"""Settings of a round's mechanism beside the shapes, in the order of its constructor."""


@dataclass(frozen=True)
class PrivateAggregation(Aggregation):
    """Aggregation with client-level DP at the server: clipped updates, equal weights, noisy sum.

    The guard also has the secret for sampling and noise. The clients of a round are secret.
    """

    guard: ServerGuard

    def sample_clients(self, number: int, roster: Sequence[str]) -> list[str]:
        """Return the clients drawn by Poisson sampling with the guard's secret."""
        self.guard.require_affordable_round(number, round_charge_name(number))
        return self.guard.sample_cohort(roster, number)

    def joint_scores(self, number: int, polled: PollScores) -> dict[Block, float]:
        """Charge the privacy budget for round `number`; return the noisy count of votes by block.

        A client votes for the blocks that have a score other than 0 in `polled`. Raises
        PrivacyError if the budget does not allow the vote.
        """
        ballots = [{b for b, score in scores.items() if score} for scores in polled.values()]
        agreed = self.agreement
        return self.guard.release_votes(
            ballots, agreed.blocks, agreed.max_k, round_charge_name(number)
        )

    def open_round(
        self, global_state: GlobalState, shared: Callable[[], Tensors], roster: int
    ) -> ClientDPAggregator:
        """Return an empty aggregator for round `global_state.round + 1`.

        `shared` is called once, for shapes and dtypes. The sum of changes is divided by `roster`
        times the sampling rate. Clips to `global_state.clipping_norm`, or to the guarantee's norm
        if that is 0. The aggregator's `close` charges the budget.
        """
        mechanism = self.guard.make_mechanism(shared(), roster, global_state.clipping_norm)
        return ClientDPAggregator(
            self.guard, mechanism, global_state.values, global_state.round + 1
        )


@dataclass
class ClientDPAggregator(Aggregator):
    """Aggregator of one round: exact sum of clipped changes, released once with Gaussian noise.

    `guard`: privacy budget; None in a worker's partial sum, which can only be merged.
    `mechanism`: clips and adds noise. `base`: global values before the round. `number`: the round.
    `changes`, `count`, `within`: running sum, number of updates, and number of updates that needed
    no clipping. The result has no drift, since the privacy budget does not cover drift.
    """

    guard: ServerGuard | None
    mechanism: GaussianMechanism
    base: Tensors
    number: int
    changes: ExactSum = field(default_factory=ExactSum)
    count: int = 0
    within: int = 0

    def require(self, values: Tensors, aux: Tensors, weight: int) -> None:
        require_no_aux(aux)

    def add(self, client: str, values: Tensors, aux: Tensors, weight: int) -> None:
        """Add one client's clipped change; the weight is ignored."""
        change = {k: value.double() - self.base[k].double() for k, value in values.items()}
        self.within += self.mechanism.add(self.changes, change)
        self.count += 1

    def describe(self) -> dict[str, Any]:
        mechanism = self.mechanism
        settings = {name: getattr(mechanism, name) for name in _SETTINGS}
        shared = list(mechanism.public_shapes)
        return {"kind": CLIENT_DP_KIND, "shared": shared, "round": self.number, **settings}

    @staticmethod
    def from_description(base: Tensors, description: Mapping[str, Any]) -> ClientDPAggregator:
        """Return an empty partial sum, without a guard, from the result of `describe`."""
        shapes = {key: (tuple(base[key].shape), base[key].dtype) for key in description["shared"]}
        mechanism = GaussianMechanism(shapes, *(description[name] for name in _SETTINGS))
        return ClientDPAggregator(None, mechanism, base, description["round"])

    def empty(self) -> ClientDPAggregator:
        return ClientDPAggregator(self.guard, self.mechanism, self.base, self.number)

    def state(self) -> TensorsAndJson:
        counts = {"count": self.count, "within": self.within}
        return sums_state(CLIENT_DP_KIND, {"changes": self.changes}, counts)

    def merge(self, tensors: Tensors, fields: Mapping[str, Any]) -> None:
        self._require_kind(CLIENT_DP_KIND, fields)
        merge_sums({"changes": self.changes}, tensors, fields)
        self.count, self.within = self.count + fields["count"], self.within + fields["within"]

    def close(self) -> AggregationResult:
        """Charge the privacy budget, then return base + noisy mean change, and the next norm.

        The result has `means` and `clipping_norm` only. Raises PrivacyError if the budget does not
        allow the release, and FedplanError for a partial sum (no guard).
        """
        if self.guard is None:
            raise FedplanError(
                "a partial private sum cannot be released: merge it into the round's sum"
            )
        about, within = round_charge_name(self.number), f"{self.within} of {self.count}"
        mechanism = self.mechanism
        released = self.guard.release_mean(mechanism, self.changes, self.number, about, within)
        norm = self.guard.next_clipping_norm(
            mechanism, self.changes, self.within, self.count, about
        )
        means = {key: self.base[key] + change for key, change in released.items()}
        return AggregationResult(means, clipping_norm=norm)
