# SPDX-License-Identifier: Apache-2.0
"""Choice of the aggregation of a run: plain or secure, with or without client-level DP."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedplan.federation.aggregation import Aggregation, PlainAggregation
from fedplan.federation.agreement import Agreement
from fedplan.federation.client_dp import PrivateAggregation
from fedplan.federation.participation import Participation
from fedplan.privacy.guard import ServerGuard


def make_aggregation(
    agreement: Agreement, folder: Path, participation: Participation, saved: Mapping[str, Any]
) -> Aggregation:
    """Return the aggregation strategy that the agreement's privacy and secagg settings select.

    `folder`: where client-level DP keeps a secret and the privacy ledger. `participation`: how
    clients are drawn if DP does not draw clients. `saved`: metadata of the last checkpoint, with
    the fields of `checkpoint_meta`; empty for a new run. Raises PrivacyError if the privacy ledger
    in `folder` has fewer entries than `saved` counts: the ledger was rolled back.
    """
    guarantee = agreement.guarantee
    if guarantee is None or guarantee.unit != "client":
        if agreement.secagg.active:
            # Imported here: it needs an optional package.
            from fedplan.federation.secagg_aggregator import SecureAggregation

            return SecureAggregation(agreement, participation)
        return PlainAggregation(agreement, participation)
    guard = ServerGuard(guarantee, folder)
    guard.require_charge_count(saved["charges"] if saved else 0)
    if agreement.secagg.active:
        from fedplan.federation.distributed_dp import DistributedDPAggregation

        return DistributedDPAggregation(agreement, participation, guard)
    return PrivateAggregation(agreement, guard)
