# SPDX-License-Identifier: Apache-2.0
"""One round between a server and its clients, and no transport."""

from typing import TYPE_CHECKING

from fedplan.faces import face

if TYPE_CHECKING:
    from fedplan.federation.aggregation import Aggregation, Plain, Private
    from fedplan.federation.agreement import Agreement
    from fedplan.federation.client import Client
    from fedplan.federation.defence import Defence
    from fedplan.federation.endpoint import Endpoint
    from fedplan.federation.masking import Masking
    from fedplan.federation.messages import Lacking, Refused, Rejected, Request, Update
    from fedplan.federation.participation import Participation
    from fedplan.federation.polls import poll
    from fedplan.federation.record import RoundRecord, TurnRecord
    from fedplan.federation.rounds import Tally, close, pull, push
    from fedplan.federation.server import Server
    from fedplan.federation.turns import local
    from fedplan.federation.world import World

__all__ = [
    "Aggregation",
    "Agreement",
    "Client",
    "Defence",
    "Endpoint",
    "Lacking",
    "Masking",
    "Participation",
    "Plain",
    "Private",
    "Refused",
    "Rejected",
    "Request",
    "RoundRecord",
    "Server",
    "Tally",
    "TurnRecord",
    "Update",
    "World",
    "close",
    "local",
    "poll",
    "pull",
    "push",
]

__getattr__, __dir__ = face(
    __name__,
    {
        "aggregation": "Aggregation Plain Private",
        "agreement": "Agreement",
        "client": "Client",
        "defence": "Defence",
        "endpoint": "Endpoint",
        "masking": "Masking",
        "messages": "Lacking Refused Rejected Request Update",
        "participation": "Participation",
        "polls": "poll",
        "record": "RoundRecord TurnRecord",
        "rounds": "Tally close pull push",
        "server": "Server",
        "turns": "local",
        "world": "World",
    },
)
