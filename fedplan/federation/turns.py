# SPDX-License-Identifier: Apache-2.0
"""Turns: one client's turn in a round: it obeys its own copy of the plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from fedplan import seeds
from fedplan.errors import FedplanError
from fedplan.federation.account import Answer
from fedplan.federation.agreement import Agreement
from fedplan.federation.client import (
    Client,
    admit,
    bits_of,
    content_of,
    look_of,
    own_turn,
    receive,
    settled_by,
    start_values,
)
from fedplan.federation.marks import keyed
from fedplan.federation.messages import Refused, Request, Update, listed
from fedplan.federation.record import TURN, VERSION, joined, spelled
from fedplan.language.plan import Role, Roles
from fedplan.language.resolution import resolve
from fedplan.language.turn import Turn
from fedplan.models.buffers import buffers_of, require_rest
from fedplan.models.values import take
from fedplan.privacy.mechanisms.clipping import capped
from fedplan.tensors.named import Tensors, digest, nbytes
from fedplan.training.fit import Done, Job


def local(agreement: Agreement, client: Client, request: Request) -> Update:
    """A client's turn: it obeys its own copy of the plan, and answers the same request the same."""
    answered = client.journal.answered(request.name)
    home, notes = client.journal.home("" if answered else request.name)
    receive(agreement, client, request, notes)
    if answered:
        values, line = answered
        admit(agreement, client, request, Answer("update", request.name, "", nbytes(values)))
    else:
        values, line = _train(agreement, client, request, home, notes)
    return Update(client.name, request.name, agreement.fingerprint, values, line["weight"], line)


def _train(
    agreement: Agreement, client: Client, request: Request, home: Tensors, notes: Mapping[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    _require_forward(client, request.turn.round, notes)
    if client.guard is not None:
        client.guard.require_paid(notes.get("charges", 0))
    turn, still = own_turn(client, request), buffers_of(client.model)
    before = start_values(agreement, client, turn, home)
    if agreement.chooses(turn):
        alone = (
            None
            if agreement.method.together
            else agreement.method.probe(look_of(agreement, client, turn))
        )
        turn = replace(turn, scores=alone or request.turn.scores)
    roles = resolve(agreement.method.plan, agreement.params, turn)
    content = content_of(agreement, client, turn, roles, before, home)
    if client.guard is not None:
        client.guard.require_turn(turn.round, request.name, content)
    up = sum(agreement.up(p) for p in agreement.params if roles[p] is Role.SHARE)
    admit(agreement, client, request, Answer("update", request.name, content, up))
    done = _fit(agreement, client, turn, roles, before, home, content)
    require_rest(client.model, still)
    after = take(client.model, agreement.trainable)
    marks = _require_still(agreement, client, roles, before, after, notes.get("marks", {}))
    shared = {p.key: after[p.key] for p in agreement.trainable if roles[p] is Role.SHARE}
    if agreement.guarantee is not None and agreement.guarantee.cap:
        weight = capped(len(client.rows), agreement.guarantee.cap)
        shared = {k: torch.lerp(before[k], value, weight) for k, value in shared.items()}
    stream = seeds.generator(agreement.experiment, "wire", turn.round, client.name)
    base = {k: before[k] for k in shared}
    coded = agreement.method.wire.encode(shared, base, stream)
    sent = agreement.method.wire.decode(coded, base)
    # A digest of more than was sent would tell what the wire, or the weight, left out.
    other = {k: v for k, v in sent.items() if v.data_ptr() != after[k].data_ptr()}
    marks[1].update({k: digest(v) for k, v in other.items()})
    reply = {**coded, **done.riders}
    own = {p.key: after[p.key] for p in agreement.trainable if roles[p].own}
    line = _line(agreement, client, request, roles, marks, done)
    line |= {"up": nbytes(reply), "scores": listed(turn.scores) if turn.scores else None}
    missed = [each for each in notes.get("lines", []) if each["round"] > request.heard]
    own_marks = notes.get("marks", {}) | {k: marks[1][k] for k in own}
    settled = settled_by(request, notes)
    if fresh := agreement.owned(turn) & ~bits_of(settled):
        settled |= {str(turn.round): hex(fresh)}
    notes = {"marks": own_marks, "lines": [*missed, line], "settled": settled}
    if client.guard is not None:
        notes["charges"] = len(client.guard.budget.charges)
    line = line | {"missed": missed}
    kept = {k: v for k, v in home.items() if k not in own and k not in done.memory}
    client.journal.commit(request.name, {**kept, **own, **done.memory}, notes, reply, line)
    return reply, line


def _require_forward(client: Client, number: int, notes: Mapping[str, Any]) -> None:
    """Refuse a turn before the last one: what the client kept since would be lost, or mixed in."""
    last = max((line["round"] for line in notes.get("lines", ())), default=0)
    if last >= number:
        raise Refused(
            f"{client.name} has taken its turn in round {last} of this run, and is asked for round "
            f"{number}: the server has lost its world; put a copy back, or begin another run"
        )


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
        riders={k: v for k, v in client.seen.items() if "#" in k},
        memory={k: v for k, v in home.items() if "#" in k},
    )
    if client.guard is not None:
        about = agreement.request(turn.round, client.name)
        return client.guard.fit(turn.round, about, content)(job)
    return agreement.method.fit(job)


def _require_still(
    agreement: Agreement,
    client: Client,
    roles: Roles,
    before: Tensors,
    after: Tensors,
    own_marks: Mapping[str, str],
) -> tuple[dict[str, str], dict[str, str]]:
    """Digests of every param before and after a turn; one that rested and moved is a fault."""
    was, now = dict(client.marks), dict(client.marks)
    for p in agreement.trainable:
        key = p.key
        if before[key] is not client.start[key]:
            was[key] = (
                own_marks[key]
                if roles[p].own and key in own_marks
                else client.digests.of(before[key])
            )
        now[key] = digest(after[key]) if roles[p].trained else was[key]
        if not roles[p].trained and not torch.equal(before[key], after[key]):
            raise FedplanError(f"{key} is {roles[p].name} and moved: the fit broke the plan").coded(
                "training"
            )
    resting = [p for p in agreement.params if p.key not in before]
    tensors = dict(client.model.named_parameters())
    for p in resting:
        if not torch.equal(p.view(tensors[p.name]), client.start[p.key]):
            raise FedplanError(f"{p.key} is trained by no turn of the plan, and moved")
    return was, now


def _line(
    agreement: Agreement,
    client: Client,
    request: Request,
    roles: Roles,
    marks: tuple[dict[str, str], dict[str, str]],
    done: Done,
) -> dict[str, Any]:
    """One turn of one client, as the ledger says it.

    What is its own is told by keyed digests: whether it moved can be seen, what it is cannot be
    guessed. Under a promise no number follows from the rows.
    """
    before, after = (
        {p.key: keyed(client.key, p.key, of[p.key]) if roles[p].own else of[p.key] for p in roles}
        for of in marks
    )
    return {
        "kind": TURN,
        "version": VERSION,
        "round": request.turn.round,
        "client": client.name,
        "phase": request.turn.phase,
        "traits": client.traits,
        "roles": spelled(roles),
        "before": joined(agreement.params, before),
        "after": joined(agreement.params, after),
        "down": sum(agreement.sizes[key] for key in request.versions),
        "weight": 1 if agreement.guarantee else len(client.rows),
        "steps": agreement.pace.steps if agreement.guarantee else done.steps,
        "loss": done.loss if isfinite(done.loss) and not agreement.guarantee else None,
        "anew": request.anew,
        "missed": [],
    }
