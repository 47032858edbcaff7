# SPDX-License-Identifier: Apache-2.0
"""One round of server and clients, independent of the transport."""

from typing import TYPE_CHECKING

from fedplan.lazy import lazy_exports

if TYPE_CHECKING:
    from fedplan.federation.aggregation.defence import Defence
    from fedplan.federation.aggregation.factory import PlainAggregation
    from fedplan.federation.aggregation.private import PrivateAggregation
    from fedplan.federation.aggregation.protocol import Aggregation
    from fedplan.federation.agreement import Agreement
    from fedplan.federation.client import Client
    from fedplan.federation.client_round import score_layers, train_round
    from fedplan.federation.endpoint import Endpoint
    from fedplan.federation.global_state import GlobalState
    from fedplan.federation.ledger.records import RoundRecord, TurnRecord
    from fedplan.federation.messages import (
        ClientStateMissing,
        Request,
        RequestRefused,
        Update,
        UpdateRejected,
    )
    from fedplan.federation.participation import Participation
    from fedplan.federation.rounds import RoundState, accept_update, close_round, make_request
    from fedplan.federation.server import Server

__all__ = [
    "Aggregation",
    "Agreement",
    "Client",
    "ClientStateMissing",
    "Defence",
    "Endpoint",
    "GlobalState",
    "Participation",
    "PlainAggregation",
    "PrivateAggregation",
    "Request",
    "RequestRefused",
    "RoundRecord",
    "RoundState",
    "Server",
    "TurnRecord",
    "Update",
    "UpdateRejected",
    "accept_update",
    "close_round",
    "make_request",
    "score_layers",
    "train_round",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "aggregation.protocol": "Aggregation",
        "aggregation.factory": "PlainAggregation",
        "agreement": "Agreement",
        "client": "Client",
        "aggregation.private": "PrivateAggregation",
        "client_round": "score_layers train_round",
        "aggregation.defence": "Defence",
        "endpoint": "Endpoint",
        "global_state": "GlobalState",
        "messages": "ClientStateMissing Request RequestRefused Update UpdateRejected",
        "participation": "Participation",
        "ledger.records": "RoundRecord TurnRecord",
        "rounds": "RoundState accept_update close_round make_request",
        "server": "Server",
    },
)
