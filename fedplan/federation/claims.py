# SPDX-License-Identifier: Apache-2.0
"""Claims: what a client says of its turn, held against what the server knows.

Known are the round, the client, its phase and traits, what came down and went up, the roles that
the plan gives, the digests of what the federation sent, and, where the wire changes no bit, those
of what came back. The rest is the client's own word; whether it holds together from turn to turn
is for `verify`, since a site that has lost its home goes on as a newcomer.
"""

from __future__ import annotations

from collections.abc import Callable

from fedplan.federation.agreement import Agreement
from fedplan.federation.messages import Rejected, Request, Update, listed
from fedplan.federation.record import ROLES, Scores, TurnRecord, parted
from fedplan.language.plan import Role, Roles
from fedplan.language.turn import Turn
from fedplan.models.params import Block
from fedplan.tensors.named import Digests, Tensors

Known = Callable[[str], str | None]
"""The digest of what a client was sent under a key; None where the server does not know it."""


def blocks_of(agreement: Agreement, scores: Scores) -> dict[Block, float]:
    """Scores by block, if they are of the model's blocks, each once."""
    found = {Block(stack, number): score for stack, number, score in scores}
    if len(found) < len(scores) or found.keys() - set(agreement.blocks):
        raise Rejected("its record scores blocks twice, or blocks that are not there")
    return found


def roles_of(agreement: Agreement, record: TurnRecord) -> Roles:
    """The roles of a record, if the plan gives them for the turn that it tells of."""
    said = blocks_of(agreement, record.scores) if record.scores is not None else None
    turn = Turn(record.round, record.client, record.phase, record.traits, said)
    if agreement.chooses(turn) != (said is not None):
        raise Rejected("its record has scores where nothing is chosen, or none where it is")
    roles = agreement.resolved(turn)
    if len(record.roles) != len(roles):
        raise Rejected(f"its record has {len(record.roles)} roles for {len(roles)} params")
    for param, letter in zip(agreement.params, record.roles, strict=True):
        if ROLES[letter] is not roles[param]:
            raise Rejected(
                f"its record says that {param.key} was {ROLES[letter].name}, and the plan says "
                f"{roles[param].name}"
            )
    return roles


def require_turn(
    agreement: Agreement, request: Request, update: Update, record: TurnRecord
) -> Roles:
    """Refuse a record of another turn than the one that was asked for; else its roles."""
    turn, masked = request.turn, agreement.masking.active
    said = {
        "round": (record.round, turn.round),
        "client": (record.client, update.client),
        "phase": (record.phase, turn.phase),
        "traits": (record.traits, dict(turn.traits)),
        **({} if masked else {"weight": (record.weight, update.weight)}),
        **({} if masked else {"up": (record.up, update.nbytes)}),
    }
    for name, (says, known) in said.items():
        if says != known:
            raise Rejected(f"its record's {name} is {str(says)[:60]!r}, and it is {known!r}")
    hidden = masked or agreement.guarantee is not None
    if hidden and (record.weight != 1 or record.loss is not None):
        raise Rejected("its record tells a weight or a loss, which are hidden in this run")
    roles = roles_of(agreement, record)
    up = sum(map(agreement.up, agreement.sent(turn, roles)))
    if masked and record.up != up:
        raise Rejected(f"its record says that {record.up} bytes go up, and {up} would")
    alike = [list(each) for each in record.scores or ()] == listed(turn.scores or {})
    if record.scores is not None and agreement.method.together and not alike:
        raise Rejected("its record chose by other scores than all were given")
    _require_rest(agreement, record, roles)
    _require_missed(agreement, request, record)
    return roles


def require_marks(
    agreement: Agreement,
    record: TurnRecord,
    roles: Roles,
    values: Tensors,
    known: Known,
    digests: Digests,
) -> None:
    """Refuse digests that are not of what was sent and of what came back."""
    before, after = parted(agreement.params, record.before), parted(agreement.params, record.after)
    capped = agreement.guarantee is not None and agreement.guarantee.cap
    told = not capped and not agreement.masking.active
    exact = agreement.method.wire.text == "plain()" and told
    for param, role in roles.items():
        key = param.key
        if not role.own and known(key) not in (None, before[key]):
            raise Rejected(f"its record says that {key} started from what was not sent")
        if role is Role.SHARE and exact and digests.of(values[key]) != after[key]:
            raise Rejected(f"its record says another {key} than came")


def _require_rest(agreement: Agreement, record: TurnRecord, roles: Roles) -> None:
    """Refuse a record in which something rested and moved."""
    before, after = parted(agreement.params, record.before), parted(agreement.params, record.after)
    for param, role in roles.items():
        if not role.trained and before[param.key] != after[param.key]:
            raise Rejected(f"its record says that {param.key} is {role.name} and moved")


def _require_missed(agreement: Agreement, request: Request, record: TurnRecord) -> None:
    """Turns that the server did not hear of are told once each, in order, and fit the plan."""
    last, phases = request.heard, ("", *agreement.method.announce.phases)
    for each in record.missed:
        if each.client != record.client or not last < each.round < record.round:
            raise Rejected("its record tells of missed turns that it cannot have missed")
        if each.phase not in phases:
            raise Rejected(f"its record tells of a phase {each.phase[:40]!r} that is not there")
        last = each.round
        _require_rest(agreement, each, roles_of(agreement, each))
