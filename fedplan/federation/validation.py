# SPDX-License-Identifier: Apache-2.0
"""Validation of a client's record of its turn against all that the server knows.

The server knows round, client, phase, traits, transferred bytes, roles, the digests of sent values
and, without compression, of received ones. Everything else is the client's claim; consistency from
turn to turn is checked by `verify`, since a site that lost its state continues as a new client.
"""

from __future__ import annotations

from fedplan.federation.agreement import Agreement
from fedplan.federation.ledger.records import ROLE_BY_LETTER, TurnRecord, split_digests
from fedplan.federation.messages import Request, Update, UpdateRejected, block_scores_to_json
from fedplan.language.plan import Roles
from fedplan.language.predicates import Turn
from fedplan.models.params import Block


def require_planned(agreement: Agreement, record: TurnRecord) -> Roles:
    """Return the role of each param in a record's turn, from the agreement's plan.

    Raises UpdateRejected if the record has other roles, lacks scores for a choice of layers, has
    scores without a choice, or scores a block twice or an unknown block, or if a param without a
    trained role changed. Raises PlanError if a candidate block has no score.
    """
    scores: dict[Block, float] | None = None
    if record.scores is not None:
        scores = {Block(stack, number): score for stack, number, score in record.scores}
        if len(scores) < len(record.scores) or scores.keys() - set(agreement.blocks):
            raise UpdateRejected("its record scores a block twice, or a block that does not exist")
    turn = Turn(record.round, record.client, record.phase, record.traits, scores)
    if agreement.selects_blocks(turn) != (scores is not None):
        raise UpdateRejected("its record has scores in a turn without choice, or lacks them")
    roles = agreement.resolved(turn)
    if len(record.roles) != len(roles):
        raise UpdateRejected(f"its record has {len(record.roles)} roles for {len(roles)} params")
    for param, letter in zip(agreement.params, record.roles, strict=True):
        if ROLE_BY_LETTER[letter] is not roles[param]:
            raise UpdateRejected(
                f"its record says that {param.key} is {ROLE_BY_LETTER[letter].name}, and the plan "
                f"says {roles[param].name}"
            )
    before = split_digests(agreement.params, record.before)
    after = split_digests(agreement.params, record.after)
    for param, role in roles.items():
        if not role.is_trained and before[param.key] != after[param.key]:
            raise UpdateRejected(f"its record says that {param.key} is {role.name} and changed")
    return roles


def validate_record(
    agreement: Agreement,
    request: Request,
    update: Update,
    record: TurnRecord,
    *,
    without_values: bool = False,
) -> Roles:
    """Return the role of each param, if a client's record agrees with all that the server knows.

    Raises UpdateRejected if round, client, phase, traits, weight, uploaded bytes or joint scores
    contradict the request or the update, if a private run's record has a loss or a weight other
    than 1, if clients weigh alike and the weight is not 1, if roles contradict the agreement's
    plan, if a param without a trained role changed, or if a turn in `record.missed` is of another
    client, out of order, or invalid. Digests of trained params are not checked here
    (`rounds.validate_turn`). `without_values`: the update is in a sum of others, so weight and
    uploaded bytes are not compared.
    """
    turn, masked = request.turn, agreement.secagg.active
    fields = {
        "round": (record.round, turn.round),
        "client": (record.client, update.client),
        "phase": (record.phase, turn.phase),
        "traits": (record.traits, dict(turn.traits)),
    }
    if not (masked or without_values):
        fields |= {
            "weight": (record.weight, update.weight),
            "upload_bytes": (record.upload_bytes, update.nbytes),
        }
    for name, (recorded, expected) in fields.items():
        if recorded != expected:
            raise UpdateRejected(
                f"its record's {name} is {str(recorded)[:60]!r}, and {expected!r} is expected"
            )
    private = masked or agreement.guarantee is not None
    if private and (record.weight != 1 or record.loss is not None):
        raise UpdateRejected("its record has a weight or a loss, which are private in this run")
    if agreement.equal_weights and record.weight != 1:
        raise UpdateRejected(f"its weight is {record.weight}, and all clients weigh 1 in this run")
    roles = require_planned(agreement, record)
    if masked:
        upload = sum(map(agreement.upload_bytes, agreement.sent_params(turn, roles)))
        if (sent := record.upload_bytes) != upload:
            raise UpdateRejected(f"its record says that it sends {sent} bytes, not {upload}")
    scores = [list(score) for score in record.scores or ()]
    is_joint = record.scores is not None and agreement.method.joint_choice
    if is_joint and scores != block_scores_to_json(turn.scores or {}):
        raise UpdateRejected("its record has other scores than those of the request")
    last, phases = request.last_update_round, ("", *agreement.method.phase_rule.phases)
    for missed in record.missed:
        if missed.client != record.client or not last < missed.round < record.round:
            raise UpdateRejected("its record has missed turns of another client, or out of order")
        if missed.phase not in phases:
            raise UpdateRejected(f"its record has an unknown phase {missed.phase[:40]!r}")
        last = missed.round
        require_planned(agreement, missed)
    return roles
