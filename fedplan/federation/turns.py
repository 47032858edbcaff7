# SPDX-License-Identifier: Apache-2.0
"""Turns: one client's turn in a round: it obeys its own copy of the plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import isfinite
from typing import Any

from torch import Tensor

from fedplan import seeds
from fedplan.errors import FedplanError
from fedplan.federation.account import Answer
from fedplan.federation.aggregation import contributed
from fedplan.federation.agreement import Agreement
from fedplan.federation.client import (
    Client,
    admit,
    bits_of,
    content_of,
    look_of,
    own_turn,
    receive,
    require_base,
    settled_by,
    start_values,
    world_marks,
)
from fedplan.federation.marks import keyed
from fedplan.federation.messages import Refused, Request, Update, asked_of
from fedplan.federation.origin import Base
from fedplan.federation.record import TurnRecord, joined, spelled
from fedplan.language.plan import Best, Role, Roles
from fedplan.language.resolution import candidates
from fedplan.language.turn import Turn
from fedplan.models.buffers import buffers_of, require_rest
from fedplan.models.params import Block
from fedplan.models.values import take
from fedplan.privacy.mechanisms.vote import ballot
from fedplan.tensors.devices import deterministic
from fedplan.tensors.named import Tensors, all_finite, nbytes, same_bits
from fedplan.tensors.riders import beside, split_riders
from fedplan.training.fit import Done, Job

OWN, BASE, ASKED = "own", "base", "asked"
"""Beside the line of a reply at home, where sums are masked and no line tells it: its weight, the
digests of all that it took from the world, and that of what the server said of the round."""


def local(agreement: Agreement, client: Client, request: Request, *, lent: bool = False) -> Update:
    """A client's turn: it obeys its own copy of the plan, and answers the same request the same.

    What is `lent` may be the model's own values: be done with the update before its next turn.
    """
    with deterministic(client.deterministic):
        return _local(agreement, client, request, lent=lent)


def _local(agreement: Agreement, client: Client, request: Request, *, lent: bool) -> Update:
    answered = client.journal.answered(request.name)
    home, notes = client.journal.home("" if answered else request.name)
    receive(agreement, client, request, notes)
    if answered:
        values, line = answered
        admit(agreement, client, request, Answer("update", request.name, "", nbytes(values)))
    else:
        values, line = _train(agreement, client, request, home, notes, lent=lent)
    coded, riders = split_riders(values, agreement.method.riders)
    line = dict(line)
    agreed, weight = agreement.fingerprint, line.pop(OWN, line["weight"])
    for known in (BASE, ASKED):
        line.pop(known, None)
    return Update(client.name, request.name, agreed, coded, weight, line, riders)


def _train(
    agreement: Agreement,
    client: Client,
    request: Request,
    home: Tensors,
    notes: Mapping[str, Any],
    *,
    lent: bool,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Check, choose, pay, train, check what rested, code what is shared, commit."""
    _require_forward(client, request.turn.round, notes)
    if client.payer is not None:
        client.payer.require_paid(notes.get("charges", 0))
    turn, still = own_turn(client, request), buffers_of(client.model)
    marks = world_marks(agreement, client, turn, home) if agreement.masking.active else {}
    if request.base:
        require_base(client, request, marks)  # before anything is trained, and kept
    before = start_values(agreement, client, turn, home)
    turn = _chosen(agreement, client, request, turn)
    roles = agreement.resolved(turn)
    content = content_of(agreement, client, turn, roles, before, home)
    _require_paid(agreement, client, request, roles, content)
    done = _fit(agreement, client, turn, roles, before, home, content)
    require_rest(client.model, still)
    after = take(client.model, agreement.trainable, lent=lent)
    known = notes.get("marks", {})
    was, now = _require_still(agreement, client, turn.round, roles, before, after, known)
    coded, weight = _coded(agreement, client, turn, roles, before, after, now)
    reply = {**coded, **done.riders}
    line = _line(agreement, client, request, turn, roles, (was, now), done, weight, nbytes(reply))
    own = {p.key: after[p.key] for p in agreement.trainable if roles[p].own}
    kept = {k: v for k, v in home.items() if k not in own and k not in done.memory}
    fresh = _notes(agreement, client, request, turn, notes, line, {k: now[k] for k in own})
    line = line | {"missed": fresh["lines"][:-1]}
    if agreement.masking.active:
        line |= {OWN: weight, BASE: marks, ASKED: asked_of(request.turn)}
    client.journal.commit(request.name, {**kept, **own, **done.memory}, fresh, reply, line)
    return reply, line


def _chosen(agreement: Agreement, client: Client, request: Request, turn: Turn) -> Turn:
    """The turn with the scores that it chooses by, if its plan does: its own, or all clients'."""
    if not agreement.chooses(turn):
        return turn
    probe, together = agreement.method.probe, agreement.method.together
    own = None if together else probe(look_of(agreement, client, turn))
    return replace(turn, scores=own or request.turn.scores)


def _require_paid(
    agreement: Agreement, client: Client, request: Request, roles: Roles, content: str
) -> None:
    """Refuse a turn that neither the budget nor the site's own limits pay for."""
    if client.guard is not None:
        client.guard.require_turn(request.turn.round, request.name, content)
    if client.shares is not None:
        client.shares.require_room(request.turn.round, request.name)
    if client.account is None:
        return
    up = sum(map(agreement.up, agreement.sent(request.turn, roles)))
    admit(agreement, client, request, Answer("update", request.name, content, up))


def _coded(
    agreement: Agreement,
    client: Client,
    turn: Turn,
    roles: Roles,
    before: Tensors,
    after: Tensors,
    marks: dict[str, str],
) -> tuple[dict[str, Tensor], int]:
    """What is shared, as it travels, and its weight; `marks` then tells of what was sent."""
    trained = {p.key: after[p.key] for p in agreement.trainable if roles[p] is Role.SHARE}
    changes = (value - before[key] for key, value in trained.items())
    if agreement.in_shares and not all(map(all_finite, changes)):
        # That a change is no number would tell of its rows: it is none at all.
        trained = {key: before[key] for key in trained}
    shared, weight = contributed(agreement, len(client.rows), before, trained)
    stream = seeds.generator(agreement.experiment, "wire", turn.round, client.name)
    base = {key: before[key] for key in shared}
    coded = agreement.method.wire.encode(shared, base, stream)
    sent = agreement.method.wire.decode(coded, base)
    # A digest of more than was sent would tell what the wire, or the weight, left out.
    other = {k: v for k, v in sent.items() if v.data_ptr() != after[k].data_ptr()}
    marks.update({k: client.digests.of(v) for k, v in other.items()})
    return coded, weight


def _notes(
    agreement: Agreement,
    client: Client,
    request: Request,
    turn: Turn,
    notes: Mapping[str, Any],
    line: Mapping[str, Any],
    own: Mapping[str, str],
) -> dict[str, Any]:
    """What a client remembers of a turn beside its values, until the server has heard of it."""
    missed = [each for each in notes.get("lines", []) if each["round"] > request.heard]
    settled = settled_by(request, notes)
    if fresh := agreement.owned(turn) & ~bits_of(settled):
        settled |= {str(turn.round): hex(fresh)}
    marks = {**notes.get("marks", {}), **own}
    said: dict[str, Any] = {"marks": marks, "lines": [*missed, line], "settled": settled}
    if client.payer is not None:
        said["charges"] = len(client.payer.budget.charges)
    return said


def _require_forward(client: Client, number: int, notes: Mapping[str, Any]) -> None:
    """Refuse a turn before the last one: what the client kept since would be lost, or mixed in."""
    last = max((line["round"] for line in notes.get("lines", ())), default=0)
    if last >= number:
        raise Refused(
            f"{client.name} has taken its turn in round {last} of this run, and is asked for round "
            f"{number}: the server has lost its world; put a copy back, or begin another run"
        ).coded("past-round")


def _fit(
    agreement: Agreement,
    client: Client,
    turn: Turn,
    roles: Roles,
    before: Tensors,
    home: Tensors,
    content: str,
) -> Done:
    job = Job(
        model=client.model,
        roles=roles,
        rows=client.rows,
        loss=client.loss,
        pace=agreement.pace,
        seed=seeds.seed(agreement.experiment, "fit", turn.round, client.name),
        start=before,
        riders=beside(client.seen),
        memory=beside(home),
        traits=client.traits,
        round=turn.round,
        features=client.features,
        mark=client.mark() if agreement.pace.reuse else "",
    )
    if client.guard is not None:
        about = agreement.request(turn.round, client.name)
        return client.guard.fit(turn.round, about, content)(job)
    return agreement.method.fit(job)


def _require_still(
    agreement: Agreement,
    client: Client,
    number: int,
    roles: Roles,
    before: Tensors,
    after: Tensors,
    own_marks: Mapping[str, str],
) -> tuple[dict[str, str], dict[str, str]]:
    """Digests of every param before and after a turn; one that rested and moved is a fault.

    Where the server may not know a client by its rows, what is its own and was trained is told by
    its round too: else one saw whether it moved at all, and who has no rows moves nothing.
    """
    was, now = dict(client.marks), dict(client.marks)
    for p in agreement.trainable:
        key = p.key
        if before[key] is not client.start.get(key):
            was[key] = (
                own_marks[key]
                if roles[p].own and key in own_marks
                else client.digests.of(before[key])
            )
        now[key] = client.digests.of(after[key]) if roles[p].trained else was[key]
        if agreement.in_shares and roles[p].trained and roles[p].own:
            now[key] += f" {number}"
        if not roles[p].trained and not same_bits(before[key], after[key]):
            raise FedplanError(f"{key} is {roles[p].name} and moved: the fit broke the plan").coded(
                "training"
            )
    base = client.base or Base({k: client.digests.whole(v) for k, v in client.start.items()})
    for p in base.moved(client.model, agreement.resting):
        raise FedplanError(f"{p.key} is trained by no turn of the plan, and moved")
    return was, now


def _line(
    agreement: Agreement,
    client: Client,
    request: Request,
    turn: Turn,
    roles: Roles,
    marks: tuple[Mapping[str, str], Mapping[str, str]],
    done: Done,
    weight: int,
    up: int,
) -> dict[str, Any]:
    """One turn of one client, as the ledger says it.

    What is its own is told by keyed digests: whether it moved can be seen, what it is cannot be
    guessed. Under a guarantee no number follows from the rows, and under masks none does either:
    what was made of a shared param is told as what is its own, and of its round alone. Else who
    sends a guess as the next world, from which nothing is learned, saw whether it was right.
    """
    masked = agreement.masking.active
    own = {p for p in roles if roles[p].own}
    made = {p.key for p in roles if masked and roles[p] is Role.SHARE}
    was, now = marks
    now = {key: f"{mark} {turn.round}" if key in made else mark for key, mark in now.items()}
    before, after = (
        {
            p.key: keyed(client.key, p.key, of[p.key]) if p in own or p.key in closed else of[p.key]
            for p in roles
        }
        for of, closed in ((was, set[str]()), (now, made))
    )
    hidden, scores = masked or agreement.guarantee is not None, turn.scores or {}
    if masked:
        scores = _told_choice(agreement, turn, roles)
        up = sum(map(agreement.up, agreement.sent(request.turn, roles)))
    told = isfinite(done.loss) and not hidden and not client.mute
    return TurnRecord(
        round=turn.round,
        client=client.name,
        phase=turn.phase,
        traits=client.traits,
        roles=spelled(roles),
        before=joined(agreement.params, before),
        after=joined(agreement.params, after),
        down=sum(agreement.sizes[key] for key in request.versions),
        up=up,
        weight=1 if masked else weight,
        steps=agreement.pace.steps if hidden else done.steps,
        loss=done.loss if told else None,
        scores=tuple((b.stack, b.number, s) for b, s in scores.items()) if scores else None,
        anew=request.anew,
    ).json()


def _told_choice(agreement: Agreement, turn: Turn, roles: Roles) -> dict[Block, float]:
    """Scores that choose as a client's own did, and tell no more than what was chosen."""
    own = turn.scores or {}
    if not own or agreement.method.together:
        return dict(own)
    steps = [s for s in agreement.method.plan.settle(turn) if isinstance(s, Best)]
    among = [candidates(step, agreement.params) for step in steps]
    named = [
        ballot({block: own[block] for block in blocks}, step.count)
        for step, blocks in zip(steps, among, strict=True)
    ]
    told = {block: float(sum(block in each for each in named)) for block in own}
    if agreement.resolved(replace(turn, scores=told)) != roles:
        raise FedplanError(
            "what was chosen cannot be told without the scores, and masks would hide nothing of "
            "them: take one best(...), or choose together"
        ).coded("plan")
    return told
