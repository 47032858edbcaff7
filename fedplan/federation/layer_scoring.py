# SPDX-License-Identifier: Apache-2.0
"""Layer scoring: a client scores the blocks before all clients choose layers jointly."""

from __future__ import annotations

from collections.abc import Mapping

from fedplan.federation.account import Answer
from fedplan.federation.agreement import Agreement
from fedplan.federation.client import (
    Client,
    answer_content,
    charge_answer,
    client_turn,
    load_start_values,
    make_probe_input,
    receive_request,
)
from fedplan.federation.messages import Request, RequestRefused
from fedplan.language.resolution import permitted_roles
from fedplan.language.turn import Turn
from fedplan.models.params import Block
from fedplan.privacy.mechanisms.vote import make_ballot
from fedplan.tensors.devices import deterministic
from fedplan.training.probes import is_data_independent, random_probe


def score_layers(agreement: Agreement, client: Client, request: Request) -> Mapping[Block, float]:
    """Return the client's probe score of each block, or its votes (0 or 1) under a DP vote.

    Takes up the values of the request, and charges the client's account and privacy budget. Raises
    RequestRefused if the agreement has no joint choice in this round.
    """
    with deterministic(client.deterministic):
        return _score_layers(agreement, client, request)


def _score_layers(agreement: Agreement, client: Client, request: Request) -> Mapping[Block, float]:
    """Do the work of `score_layers`, within its deterministic mode."""
    state, notes = client.journal.client_state(request.name)
    receive_request(agreement, client, request, notes)
    turn = client_turn(client, request)
    _require_scoring_allowed(agreement, client, turn)
    start = load_start_values(agreement, client, turn, state)
    guarantee, probe_input = agreement.guarantee, make_probe_input(agreement, client, turn)
    roles = permitted_roles(agreement.method.plan, agreement.params, turn)
    content = answer_content(agreement, client, turn, roles, start, state)
    if client.guard is not None and guarantee is not None and guarantee.vote_noise_multiplier:
        client.guard.require_affordable_round(turn.round, request.name)
    charge_answer(
        agreement,
        client,
        request,
        Answer("scores", request.name, content, 8 * len(agreement.blocks)),
    )
    probe, max_k = agreement.method.probe, agreement.max_k
    if guarantee is None or not guarantee.vote_noise_multiplier:
        return probe(probe_input)
    if client.guard is not None:
        return client.guard.release_votes(probe_input, probe, max_k, request.name, content)
    # A client without examples votes at random, so that this is not revealed.
    chosen = make_ballot((probe if len(client.examples) else random_probe)(probe_input), max_k)
    return {block: float(block in chosen) for block in probe_input.blocks}


def _require_scoring_allowed(agreement: Agreement, client: Client, turn: Turn) -> None:
    """Raise RequestRefused unless layers are chosen jointly and privacy allows the scores."""
    guarantee, method = agreement.guarantee, agreement.method
    if guarantee is not None and guarantee.vote_noise_multiplier:
        allowed = guarantee.is_voting_round(turn.round)
    else:
        private = guarantee is not None and not is_data_independent(method.probe)
        allowed = agreement.selects_blocks(turn) and not private
    if not method.joint_choice or not allowed:
        raise RequestRefused(
            f"{client.name} was asked for layer scores in round {turn.round}, where its plan makes "
            "no joint choice or no privacy budget covers it"
        ).with_code("poll")
