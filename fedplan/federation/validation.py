# SPDX-License-Identifier: Apache-2.0
"""Validation of a client's record of its turn against all that the server knows.

The server knows round, client, phase, traits, transferred bytes, roles, the digests of sent values
and, without compression, of received ones. Everything else is the client's claim; consistency from
turn to turn is checked by `verify`, since a site that lost its state continues as a new client.
"""

from __future__ import annotations

from collections.abc import Callable

from fedplan.federation.agreement import Agreement
from fedplan.federation.messages import Request, Update, UpdateRejected, block_scores_to_json
from fedplan.federation.record import ROLE_BY_LETTER, Scores, TurnRecord, split_digests
from fedplan.language.plan import Role, Roles
from fedplan.language.turn import Turn
from fedplan.models.params import Block
from fedplan.tensors.named import DigestCache, Tensors

SentDigest = Callable[[str], str | None]
"""Returns the digest of the value that a client received under a key; None if it is unknown."""


def scores_by_block(agreement: Agreement, scores: Scores) -> dict[Block, float]:
    """Return a record's scores by block; raise UpdateRejected for duplicate or unknown blocks."""
    by_block = {Block(stack, number): score for stack, number, score in scores}
    if len(by_block) < len(scores) or by_block.keys() - set(agreement.blocks):
        raise UpdateRejected("its record scores a block twice, or a block that does not exist")
    return by_block


def require_plan_roles(agreement: Agreement, record: TurnRecord) -> Roles:
    """Return the roles of a record's turn; raise UpdateRejected if the plan gives other roles."""
    scores = scores_by_block(agreement, record.scores) if record.scores is not None else None
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
    return roles


def validate_record(
    agreement: Agreement, request: Request, update: Update, record: TurnRecord
) -> Roles:
    """Return the roles of a record; raise UpdateRejected if it contradicts the request or plan.

    Checks round, client, phase, traits, weight, bytes, roles, joint scores, that frozen params did
    not change, and turns that the server missed.
    """
    turn, masked = request.turn, agreement.secagg.active
    fields = {
        "round": (record.round, turn.round),
        "client": (record.client, update.client),
        "phase": (record.phase, turn.phase),
        "traits": (record.traits, dict(turn.traits)),
        **({} if masked else {"weight": (record.weight, update.weight)}),
        **({} if masked else {"up": (record.up, update.nbytes)}),
    }
    for name, (recorded, expected) in fields.items():
        if recorded != expected:
            raise UpdateRejected(
                f"its record's {name} is {str(recorded)[:60]!r}, and {expected!r} is expected"
            )
    private = masked or agreement.guarantee is not None
    if private and (record.weight != 1 or record.loss is not None):
        raise UpdateRejected("its record has a weight or a loss, which are private in this run")
    roles = require_plan_roles(agreement, record)
    upload = sum(map(agreement.upload_bytes, agreement.sent_params(turn, roles)))
    if masked and record.up != upload:
        raise UpdateRejected(f"its record says that it sends {record.up} bytes, not {upload}")
    scores = [list(score) for score in record.scores or ()]
    is_joint = record.scores is not None and agreement.method.joint_choice
    if is_joint and scores != block_scores_to_json(turn.scores or {}):
        raise UpdateRejected("its record has other scores than those of the request")
    _require_frozen(agreement, record, roles)
    _validate_missed_turns(agreement, request, record)
    return roles


def validate_digests(
    agreement: Agreement,
    record: TurnRecord,
    roles: Roles,
    values: Tensors,
    sent_digest: SentDigest,
    digests: DigestCache,
) -> None:
    """Raise UpdateRejected if a record's digests contradict the values sent and received.

    `values`: the client's decoded update. Its digests are only compared if the update is
    uncompressed, unscaled and not masked.
    """
    before = split_digests(agreement.params, record.before)
    after = split_digests(agreement.params, record.after)
    scaled = agreement.guarantee is not None and agreement.guarantee.max_weight
    uncompressed = agreement.method.compression.text == "plain()"
    exact = uncompressed and not scaled and not agreement.secagg.active
    for param, role in roles.items():
        key = param.key
        if not role.is_personal and sent_digest(key) not in (None, before[key]):
            raise UpdateRejected(f"its record says that {key} started from a value not sent to it")
        if role is Role.SHARE and exact and digests.short_digest(values[key]) != after[key]:
            raise UpdateRejected(f"its record has another digest of {key} than its update")


def _require_frozen(agreement: Agreement, record: TurnRecord, roles: Roles) -> None:
    """Raise UpdateRejected if a record says that a param changed that was not trained."""
    before = split_digests(agreement.params, record.before)
    after = split_digests(agreement.params, record.after)
    for param, role in roles.items():
        if not role.is_trained and before[param.key] != after[param.key]:
            raise UpdateRejected(f"its record says that {param.key} is {role.name} and changed")


def _validate_missed_turns(agreement: Agreement, request: Request, record: TurnRecord) -> None:
    """Raise UpdateRejected if records of turns that the server missed are invalid."""
    last, phases = request.last_update_round, ("", *agreement.method.phase_rule.phases)
    for missed in record.missed:
        if missed.client != record.client or not last < missed.round < record.round:
            raise UpdateRejected("its record has missed turns of another client, or out of order")
        if missed.phase not in phases:
            raise UpdateRejected(f"its record has an unknown phase {missed.phase[:40]!r}")
        last = missed.round
        _require_frozen(agreement, missed, require_plan_roles(agreement, missed))
