# SPDX-License-Identifier: Apache-2.0
"""Layer scoring: a client scores the blocks before all clients choose layers jointly."""

from __future__ import annotations

from collections.abc import Mapping

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
from fedplan.federation.ledger.egress import Answer
from fedplan.federation.messages import Request, RequestRefused
from fedplan.language.resolution import permitted_roles
from fedplan.models.params import Block
from fedplan.privacy.mechanisms.vote import make_ballot
from fedplan.tensors.devices import deterministic
from fedplan.training.probes import is_data_independent, random_probe


def score_layers(agreement: Agreement, client: Client, request: Request) -> Mapping[Block, float]:
    """Return a score of each block for a joint choice of layers, or votes on blocks in a DP vote.

    Scores are those of the agreement's probe. Votes are 1 for the `max_k` blocks of the highest
    scores, else 0; under example-level DP the noisy number of examples that vote for the block.
    Stores the global values of the request at the client, loads start values into the model, and
    charges the client's account; a vote under example-level DP also the privacy budget. Raises
    RequestRefused if this round has no joint choice of layers, if differential privacy covers no
    scores in this round, or for a limit of the account; PrivacyError if the budget does not allow
    the vote; and as `receive_request`.
    """
    guarantee, method = agreement.guarantee, agreement.method
    votes = guarantee is not None and bool(guarantee.vote_noise_multiplier)
    with deterministic(client.deterministic):
        state, notes = client.journal.client_state(request.name)
        receive_request(agreement, client, request, notes)
        turn = client_turn(client, request)
        if guarantee is not None and votes:
            allowed = guarantee.is_voting_round(turn.round)
        else:
            private = guarantee is not None and not is_data_independent(method.probe)
            allowed = agreement.selects_blocks(turn) and not private
        if not method.joint_choice or not allowed:
            raise RequestRefused(
                f"{client.name} was asked for layer scores in round {turn.round}, where its plan "
                "makes no joint choice or no privacy budget covers it"
            ).with_code("no-scoring")
        start = load_start_values(agreement, client, turn, state)
        probe_input = make_probe_input(agreement, client, turn)
        roles = permitted_roles(method.plan, agreement.params, turn)
        content = answer_content(agreement, client, turn, roles, start, state)
        if client.guard is not None and votes:
            client.guard.require_affordable_round(turn.round, request.name)
        answer = Answer("scores", request.name, content, 8 * len(agreement.blocks))
        charge_answer(agreement, client, answer)
        probe, max_k = method.probe, agreement.max_k
        if not votes:
            return probe(probe_input)
        if client.guard is not None:
            return client.guard.release_votes(probe_input, probe, max_k, request.name, content)
        # A client without examples votes at random, so that this is not revealed.
        chosen = make_ballot((probe if len(client.examples) else random_probe)(probe_input), max_k)
        return {block: float(block in chosen) for block in probe_input.blocks}
