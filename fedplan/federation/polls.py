# SPDX-License-Identifier: Apache-2.0
"""Polls: what a client would choose, said before all choose together."""

from __future__ import annotations

from collections.abc import Mapping

from fedplan.federation.account import Answer
from fedplan.federation.agreement import Agreement
from fedplan.federation.client import (
    Client,
    admit,
    content_of,
    look_of,
    own_turn,
    receive,
    start_values,
)
from fedplan.federation.messages import Refused, Request
from fedplan.language.resolution import permitted
from fedplan.language.turn import Turn
from fedplan.models.params import Block
from fedplan.privacy.mechanisms.vote import ballot
from fedplan.tensors.devices import deterministic
from fedplan.training.probes import at_random, is_public


def poll(agreement: Agreement, client: Client, request: Request) -> Mapping[Block, float]:
    """What a client's probe says of each block, for a choice that all make together."""
    with deterministic(client.deterministic):
        return _poll(agreement, client, request)


def _poll(agreement: Agreement, client: Client, request: Request) -> Mapping[Block, float]:
    home, notes = client.journal.home(request.name)
    receive(agreement, client, request, notes)
    turn = own_turn(client, request)
    _require_poll(agreement, client, turn)
    before = start_values(agreement, client, turn, home)
    guarantee, look = agreement.guarantee, look_of(agreement, client, turn)
    roles = permitted(agreement.method.plan, agreement.params, turn)
    content = content_of(agreement, client, turn, roles, before, home)
    if client.guard is not None and guarantee is not None and guarantee.vote:
        client.guard.require_room(turn.round, request.name)
    admit(
        agreement,
        client,
        request,
        Answer("scores", request.name, content, 8 * len(agreement.blocks)),
    )
    if guarantee is None or not guarantee.vote:
        return agreement.method.probe(look)
    if client.guard is not None:
        said = request.name, content
        return client.guard.vote(look, agreement.method.probe, agreement.most, *said)
    # Who has no rows votes too, by chance: that it has none is not told.
    named = ballot(
        (agreement.method.probe if len(client.rows) else at_random)(look), agreement.most
    )
    return {block: float(block in named) for block in look.blocks}


def _require_poll(agreement: Agreement, client: Client, turn: Turn) -> None:
    """Refuse a poll where nothing is chosen together, or where nobody pays for what it tells."""
    guarantee, method = agreement.guarantee, agreement.method
    if guarantee is not None and guarantee.vote:
        asked = guarantee.votes(turn.round)
    else:
        asked = agreement.chooses(turn) and (guarantee is None or is_public(method.probe))
    if not method.together or not asked:
        raise Refused(
            f"{client.name} is polled in round {turn.round}, where its plan chooses nothing "
            "together or nobody pays for the choice"
        ).coded("poll")
