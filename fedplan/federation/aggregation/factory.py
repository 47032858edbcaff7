# SPDX-License-Identifier: Apache-2.0
"""Choice of a run's aggregation by its settings, and of a worker's partial sum by a description."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import fsum
from pathlib import Path
from typing import Any

from fedplan.federation.aggregation.mean import MEAN_KIND, MeanAggregator
from fedplan.federation.aggregation.private import (
    CLIENT_DP_KIND,
    ClientDPAggregator,
    PrivateAggregation,
)
from fedplan.federation.aggregation.protocol import Aggregation, Aggregator, PollScores
from fedplan.federation.aggregation.robust import BUFFERED_KIND, BufferedAggregator
from fedplan.federation.agreement import Agreement
from fedplan.federation.global_state import GlobalState
from fedplan.federation.ledger.records import MAX_SCORE
from fedplan.federation.participation import Participation
from fedplan.models.params import Block
from fedplan.privacy.guard import ServerGuard
from fedplan.tensors.named import Tensors


class PlainAggregation(Aggregation):
    """Aggregation without privacy: the mean of a param over its senders, weighted by examples.

    The agreement's `defence` may replace the mean by a robust rule.
    """

    def joint_scores(self, number: int, polled: PollScores) -> dict[Block, float]:
        """Return the sum of the clients' scores in `polled` by block; `number` is not used.

        A client with any score that is NaN, or above MAX_SCORE in magnitude, is left out entirely;
        {} if no client remains.
        """
        valid = [s for s in polled.values() if all(abs(x) <= MAX_SCORE for x in s.values())]
        blocks = dict.fromkeys(block for scores in valid for block in scores)
        return {block: fsum(s[block] for s in valid if block in s) for block in blocks}

    def open_round(
        self, global_state: GlobalState, shared: Callable[[], Tensors], roster: int
    ) -> Aggregator:
        """Return a MeanAggregator, or a BufferedAggregator if the defence needs all updates."""
        kind = BufferedAggregator if self.agreement.defence.buffers_updates else MeanAggregator
        return kind(self.agreement, global_state.values, roster)


def make_aggregation(
    agreement: Agreement, folder: Path, participation: Participation, saved: Mapping[str, Any]
) -> Aggregation:
    """Return the aggregation strategy that the agreement's privacy and secagg settings select.

    `folder`: where client-level DP keeps a secret and the privacy ledger. `participation`: how
    clients are drawn if DP does not draw clients. `saved`: metadata of the last checkpoint, with
    `charges` under client-level DP; empty for a new run. Raises PrivacyError if the privacy ledger
    in `folder` has fewer entries than `saved` counts: the ledger was rolled back.
    """
    # Secure aggregation is imported where it is used: it needs an optional package.
    guarantee = agreement.guarantee
    if guarantee is None or guarantee.unit != "client":
        if not agreement.secagg.active:
            return PlainAggregation(agreement, participation, None)
        from fedplan.federation.aggregation.secure import SecureAggregation

        return SecureAggregation(agreement, participation, None)
    guard = ServerGuard(guarantee, folder)
    guard.require_charge_count(saved["charges"] if saved else 0)
    if not agreement.secagg.active:
        return PrivateAggregation(agreement, participation, guard)
    from fedplan.federation.aggregation.distributed_dp import DistributedDPAggregation

    return DistributedDPAggregation(agreement, participation, guard)


def open_partial_sum(
    agreement: Agreement, global_state: GlobalState, description: Mapping[str, Any]
) -> Aggregator:
    """Return a worker's empty partial sum from the `Aggregator.describe` of the server.

    Agreement and global state must equal the server's; the global values are not copied.
    """
    base = global_state.values
    openers: dict[str, Callable[[], Aggregator]] = {
        MEAN_KIND: lambda: MeanAggregator(agreement, base, description["roster"]),
        BUFFERED_KIND: lambda: BufferedAggregator(agreement, base, description["roster"]),
        CLIENT_DP_KIND: lambda: ClientDPAggregator.from_description(base, description),
    }
    return openers[description["kind"]]()
