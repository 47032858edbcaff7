# SPDX-License-Identifier: Apache-2.0
"""Distributed DP: secure aggregation of clipped updates, where each client adds noise itself.

A client clips its change and adds its noise share to every number that any client may send in the
round. So the server never sees a sum without noise. The unmasked sum is exactly that of clipped
changes and noise shares; its clients are public.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from fedplan.errors import FedplanError
from fedplan.federation.aggregation.protocol import (
    AggregationResult,
    PollScores,
    require_no_aux,
    round_charge_name,
)
from fedplan.federation.aggregation.secure import SecureAggregation, SecureAggregator
from fedplan.federation.aggregation.secure_input import (
    VALUE_PREFIX,
    narrow_words,
    sum_from_words,
    sum_words,
)
from fedplan.federation.agreement import Agreement
from fedplan.federation.global_state import GlobalState
from fedplan.federation.ledger.records import WHOLE_SUM
from fedplan.language.predicates import Turn
from fedplan.models.params import Block, Params
from fedplan.privacy.guard import Guard, ServerGuard
from fedplan.privacy.mechanisms.gaussian import Change, GaussianMechanism
from fedplan.secagg.round import ClientInput
from fedplan.secagg.server import UnmaskedSums
from fedplan.tensors.accumulator import GRID
from fedplan.tensors.named import Tensors, all_finite
from fedplan.tensors.ring import Words, widen_words
from fedplan.tensors.sums import ExactSum


@dataclass(frozen=True)
class DistributedDPAggregation(SecureAggregation):
    """Aggregation with client-level DP that also holds against the server: clients add the noise.

    The guard has one entry per round. The server sees only the secure sum of clipped and noised
    changes.
    """

    guard: ServerGuard

    def shared_params(self, turns: Iterable[Turn]) -> Params:
        """Return all params that any client may share: every client sends noise for each."""
        first = next(iter(turns), None)
        return self.agreement.public_params(first) if first is not None else ()

    def joint_scores(self, number: int, polled: PollScores) -> dict[Block, float]:
        """Raise FedplanError: layer scores are not in the privacy budget here."""
        raise FedplanError(
            f"round {number}: client-level DP with secure aggregation does not score layers"
        )

    def open_round(
        self, global_state: GlobalState, shared: Callable[[], Tensors], roster: int
    ) -> DistributedDPAggregator:
        """Return an empty aggregator for round `global_state.round + 1`.

        `shared` is called once, for shapes. The threshold and the noise shares are for a cohort of
        `roster` clients. The aggregator's `close` charges the budget. Raises FedplanError as
        `round_mechanism`.
        """
        return DistributedDPAggregator(
            self.agreement,
            global_state.values,
            roster,
            global_state.round + 1,
            self.agreement.secagg.resolve_threshold(roster),
            guard=self.guard,
            mechanism=round_mechanism(self.guard, self.agreement, shared(), roster),
        )


@dataclass
class DistributedDPAggregator(SecureAggregator):
    """Aggregator of one round: secure sum of clipped changes with noise shares of the clients.

    `guard`: the server's privacy budget, charged by `close`. `mechanism`: clipping norm and noise
    of the round. `add` is for simulations: noise shares are drawn from the server's secret.
    """

    guard: ServerGuard = field(kw_only=True)
    mechanism: GaussianMechanism = field(kw_only=True)

    def require(self, values: Tensors, aux: Tensors, weight: int) -> None:
        require_no_aux(aux)

    def add(self, client: str, values: Tensors, aux: Tensors, weight: int) -> None:
        """Keep one client's clipped and noised input, with weight 1, for the simulated protocol."""
        charge_name = f"{round_charge_name(self.round_number)}/{client}"
        change = client_change(values, self.base)
        share = self.guard.simulate_noisy_share(self.mechanism, change, charge_name)
        words = noised_words(share, wide=self.agreement.secagg.wide_integers)
        self.contributions[client] = ClientInput(words, 1)

    def _aggregate(self, unmasked: UnmaskedSums) -> AggregationResult:
        """Charge the privacy budget; return base + noisy mean change of each value.

        `unmasked`: the secure sums of integers by slot; a value without an unmasked sum is left
        out. Raises PrivacyError if the budget does not allow the release.
        """
        wide, shapes = self.agreement.secagg.wide_integers, self.mechanism.public_shapes
        sums = {
            key: words if wide else widen_words(words)
            for key in shapes
            if (words := unmasked.numbers.get(VALUE_PREFIX + key)) is not None
        }
        like = {
            key: torch.empty(shapes[key][0], dtype=torch.float64, device="meta") for key in sums
        }
        total = sum_from_words(sums, unmasked, like)
        changes = self.guard.release_noisy_sum(
            self.mechanism, total, self.round_number, round_charge_name(self.round_number)
        )
        return AggregationResult({key: self.base[key] + change for key, change in changes.items()})


def round_mechanism(
    guard: Guard, agreement: Agreement, shared: Mapping[str, Tensor], clients: int
) -> GaussianMechanism:
    """Return the Gaussian mechanism of a round; server and clients compute the same one.

    `guard`: has the guarantee with clipping norm and noise multiplier. `shared`: tensors with the
    shapes that clients may share. `clients`: number of clients; each adds a share of the noise, so
    large that the shares of the honest clients (by the agreement's secagg settings) suffice. Raises
    FedplanError if the sum of all clients' clipped and noised changes could overflow a 64-bit word
    (without `wide_integers`), or if the threshold does not allow a sum of so many clients.
    """
    honest = agreement.secagg.honest_noise_shares(clients)
    mechanism = guard.make_mechanism(shared, clients, noise_shares=honest)
    clip, stddev = mechanism.clipping_norm, mechanism.share_stddev
    if not agreement.secagg.wide_integers and clients * (clip + 20 * stddev) / GRID >= 2.0**63:
        raise FedplanError(
            f"changes up to {clip:g} with noise of {stddev:.3g}, summed over {clients} clients, do "
            "not fit one word: set aggregation.wide_integers, or a smaller privacy.clipping_norm"
        )
    return mechanism


def client_change(values: Tensors, base: Tensors) -> Change:
    """Return values minus base in float64; an empty dict if any number is not finite."""
    # Empty, not an error: divergence would else be revealed.
    change = {key: value.double() - base[key].double() for key, value in values.items()}
    return change if all(map(all_finite, change.values())) else {}


def noised_words(share: ExactSum, *, wide: bool) -> dict[str, Words]:
    """Return the integers that a client masks, by slot of the secure sum.

    `share`: exact sum with the client's clipped change and noise share. Slots are the prefixed
    param keys, and WHOLE_SUM without numbers. `wide`: two 64-bit words per number; otherwise one,
    and UpdateRejected is raised if a number does not fit.
    """
    slots = {
        VALUE_PREFIX + key: words if wide else narrow_words(key, words)
        for key, words in sum_words(share).items()
    }
    return {WHOLE_SUM: np.zeros(0, np.uint64), **slots}
