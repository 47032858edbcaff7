# SPDX-License-Identifier: Apache-2.0
"""Aggregation of updates: an `Aggregation` for the run, and its `Aggregator` of each round."""

from typing import TYPE_CHECKING

from fedplan.lazy import lazy_exports

if TYPE_CHECKING:
    from fedplan.federation.aggregation.defence import Defence
    from fedplan.federation.aggregation.factory import (
        PlainAggregation,
        make_aggregation,
        open_partial_sum,
    )
    from fedplan.federation.aggregation.private import PrivateAggregation
    from fedplan.federation.aggregation.protocol import (
        Aggregation,
        AggregationResult,
        Aggregator,
    )

__all__ = [
    "Aggregation",
    "AggregationResult",
    "Aggregator",
    "Defence",
    "PlainAggregation",
    "PrivateAggregation",
    "make_aggregation",
    "open_partial_sum",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "defence": "Defence",
        "factory": "PlainAggregation make_aggregation open_partial_sum",
        "private": "PrivateAggregation",
        "protocol": "Aggregation AggregationResult Aggregator",
    },
)
