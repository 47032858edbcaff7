# SPDX-License-Identifier: Apache-2.0
"""Ways of aggregating: which of them a run takes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedplan.federation.aggregation import Aggregation, Plain, Private
from fedplan.federation.agreement import Agreement
from fedplan.federation.participation import Participation
from fedplan.privacy.guard import ServerGuard


def aggregation_of(
    agreement: Agreement, folder: Path, participation: Participation, saved: Mapping[str, Any]
) -> Aggregation:
    """How a run aggregates; `saved` is what its last world said of it."""
    guarantee = agreement.guarantee
    if guarantee is None or guarantee.unit != "client":
        if agreement.masking.active:
            from fedplan.federation.masked import MaskedMean  # which takes an extra

            return MaskedMean(agreement, participation)
        return Plain(agreement, participation)
    guard = ServerGuard(guarantee, folder)
    guard.require_paid(saved["charges"] if saved else 0)
    if agreement.masking.active:
        from fedplan.federation.noised import NoisedMean  # which takes an extra

        return NoisedMean(agreement, participation, guard)
    return Private(agreement, guard)
