# SPDX-License-Identifier: Apache-2.0
"""A client's work in one round: it trains by its own copy of the plan and returns an update."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import isfinite
from typing import Any

from torch import Tensor

from fedplan import seeds
from fedplan.errors import FedplanError
from fedplan.federation.account import Answer
from fedplan.federation.aggregation import make_contribution
from fedplan.federation.agreement import Agreement
from fedplan.federation.client import (
    Client,
    answer_content,
    charge_answer,
    client_turn,
    join_bits,
    known_personal_bits,
    load_start_values,
    make_probe_input,
    receive_request,
    received_digests,
    require_same_start,
)
from fedplan.federation.digests import keyed_digest
from fedplan.federation.initial_model import InitialModel
from fedplan.federation.messages import Request, RequestRefused, Update, turn_digest
from fedplan.federation.record import TurnRecord, join_digests, role_letters
from fedplan.language.plan import Best, Role, Roles
from fedplan.language.resolution import candidate_blocks
from fedplan.language.turn import Turn
from fedplan.models.buffers import copy_buffers, require_unchanged_buffers
from fedplan.models.params import Block
from fedplan.models.values import get_values
from fedplan.privacy.mechanisms.vote import make_ballot
from fedplan.tensors.aux_tensors import only_aux, split_aux
from fedplan.tensors.devices import deterministic
from fedplan.tensors.named import Tensors, all_finite, nbytes, same_bits
from fedplan.training.fit import FitResult, Job

WEIGHT, BASE, TURN = "weight_sent", "base", "turn"
"""Extra keys of a stored reply under secure aggregation, removed from the ledger's line: the
client's weight, digests of the values it started from, and the digest of the request's turn."""

_DigestPair = tuple[dict[str, str], dict[str, str]]
"""Digests of all params by key, before and after a turn."""


def train_round(
    agreement: Agreement, client: Client, request: Request, *, copy: bool = True
) -> Update:
    """Train a client's model for one round by its own copy of the plan, and return the update.

    A request that was answered before gets the stored answer. Otherwise the client's journal gets
    its new state and the answer. With `copy=False` the update may share memory with the model: use
    it before the client's next turn. Raises RequestRefused, ClientStateMissing or FedplanError if
    the request, privacy budget, account or training is not in order; then no state is stored.
    """
    with deterministic(client.deterministic):
        reply = client.journal.reply_for(request.name)
        client_state, notes = client.journal.client_state("" if reply else request.name)
        receive_request(agreement, client, request, notes)
        if reply:
            values, line = reply
            answer = Answer("update", request.name, "", nbytes(values))
            charge_answer(agreement, client, request, answer)
        else:
            values, line = _train(agreement, client, request, client_state, notes, copy=copy)
    compressed, aux = split_aux(values, agreement.method.aux)
    line = dict(line)
    digest, weight = agreement.fingerprint, line.pop(WEIGHT, line["weight"])
    for key in (BASE, TURN):
        line.pop(key, None)
    return Update(client.name, request.name, digest, compressed, weight, line, aux)


def _train(
    agreement: Agreement,
    client: Client,
    request: Request,
    client_state: Tensors,
    notes: Mapping[str, Any],
    *,
    copy: bool,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Train a new round and commit it to the journal.

    Returns the reply's tensors (compressed update and auxiliary tensors) and its ledger line.
    """
    _require_later_round(client, request.turn.round, notes)
    if client.budget_guard is not None:
        client.budget_guard.require_charge_count(notes.get("charges", 0))
    turn, buffers = client_turn(client, request), copy_buffers(client.model)
    secagg = agreement.secagg.active
    base_digests = received_digests(agreement, client, turn, client_state) if secagg else {}
    if request.base_digests:
        require_same_start(client, request, base_digests)  # before training stores anything
    before = load_start_values(agreement, client, turn, client_state)
    turn = _with_scores(agreement, client, request, turn)
    roles = agreement.resolved(turn)
    content = answer_content(agreement, client, turn, roles, before, client_state)
    _require_affordable(agreement, client, request, roles, content)
    result = _fit(agreement, client, turn, roles, before, client_state, content)
    require_unchanged_buffers(client.model, buffers)
    after = get_values(client.model, agreement.trainable, copy=copy)
    stored_digests = notes.get("marks", {})
    digests = _param_digests(agreement, client, turn.round, roles, before, after, stored_digests)
    compressed, weight = _compress(agreement, client, turn, roles, before, after, digests[1])
    reply = {**compressed, **result.aux}
    line = _ledger_line(
        agreement, client, request, turn, roles, digests, result, weight, nbytes(reply)
    )
    personal = {p.key: after[p.key] for p in agreement.trainable if roles[p].is_personal}
    replaced = personal.keys() | result.memory.keys()
    kept = {key: value for key, value in client_state.items() if key not in replaced}
    personal_digests = {key: digests[1][key] for key in personal}
    new_notes = _make_notes(agreement, client, request, turn, notes, line, personal_digests)
    line = line | {"missed": new_notes["lines"][:-1]}
    if secagg:
        line |= {WEIGHT: weight, BASE: base_digests, TURN: turn_digest(request.turn)}
    new_state = {**kept, **personal, **result.memory}
    client.journal.commit(request.name, new_state, new_notes, reply, line)
    return reply, line


def _with_scores(agreement: Agreement, client: Client, request: Request, turn: Turn) -> Turn:
    """Return the turn with the scores for its choice of blocks: joint ones, or the client's own.

    A turn without a choice of blocks is returned as it is.
    """
    if not agreement.selects_blocks(turn):
        return turn
    if agreement.method.joint_choice:
        return replace(turn, scores=request.turn.scores)
    scores = agreement.method.probe(make_probe_input(agreement, client, turn))
    return replace(turn, scores=scores or request.turn.scores)


def _require_affordable(
    agreement: Agreement, client: Client, request: Request, roles: Roles, content: str
) -> None:
    """Raise an error if the privacy budget or the site's limits do not allow a turn.

    Charges the site's account, if it has one.
    """
    if client.guard is not None:
        client.guard.require_affordable_turn(request.turn.round, request.name, content)
    if client.noise_guard is not None:
        client.noise_guard.require_affordable_round(request.turn.round, request.name)
    if client.account is None:
        return
    upload = sum(map(agreement.upload_bytes, agreement.sent_params(request.turn, roles)))
    charge_answer(agreement, client, request, Answer("update", request.name, content, upload))


def _compress(
    agreement: Agreement,
    client: Client,
    turn: Turn,
    roles: Roles,
    before: Tensors,
    after: Tensors,
    digests: dict[str, str],
) -> tuple[dict[str, Tensor], int]:
    """Return the compressed values of the SHARE params, and the client's weight.

    Replaces the `digests` of params whose sent value differs from the trained one.
    """
    trained = {p.key: after[p.key] for p in agreement.trainable if roles[p] is Role.SHARE}
    changes = (value - before[key] for key, value in trained.items())
    if agreement.distributed_dp and not all(map(all_finite, changes)):
        # A non-finite update becomes an empty one, so that divergence is not revealed.
        trained = {key: before[key] for key in trained}
    shared, weight = make_contribution(agreement, len(client.examples), before, trained)
    generator = seeds.generator(agreement.experiment, "wire", turn.round, client.name)
    base = {key: before[key] for key in shared}
    compressed = agreement.method.compression.encode(shared, base, generator)
    sent = agreement.method.compression.decode(compressed, base)
    # Digests of the trained values would reveal what compression or the weight removed.
    changed = {k: v for k, v in sent.items() if v.data_ptr() != after[k].data_ptr()}
    digests.update({k: client.digests.short_digest(v) for k, v in changed.items()})
    return compressed, weight


def _make_notes(
    agreement: Agreement,
    client: Client,
    request: Request,
    turn: Turn,
    notes: Mapping[str, Any],
    line: Mapping[str, Any],
    personal_digests: Mapping[str, str],
) -> dict[str, Any]:
    """Return the new notes of the client's journal.

    `marks`: digests of personal values. `lines`: this turn's ledger line, after those that the
    server has not seen yet. `settled`: params that became personal, by round. `charges`: number of
    privacy charges.
    """
    missed = [each for each in notes.get("lines", []) if each["round"] > request.last_update_round]
    personal = known_personal_bits(request, notes)
    if new_bits := agreement.personal_bits(turn) & ~join_bits(personal):
        personal |= {str(turn.round): hex(new_bits)}
    digests = {**notes.get("marks", {}), **personal_digests}
    fields: dict[str, Any] = {"marks": digests, "lines": [*missed, line], "settled": personal}
    if client.budget_guard is not None:
        fields["charges"] = len(client.budget_guard.budget.charges)
    return fields


def _require_later_round(client: Client, number: int, notes: Mapping[str, Any]) -> None:
    """Raise RequestRefused if the client has trained this round or a later one of the run."""
    last = max((line["round"] for line in notes.get("lines", ())), default=0)
    if last >= number:
        raise RequestRefused(
            f"{client.name} has trained round {last} of this run, and the request is for round "
            f"{number}: the server has lost its state; restore a copy, or start another run"
        ).with_code("past-round")


def _fit(
    agreement: Agreement,
    client: Client,
    turn: Turn,
    roles: Roles,
    before: Tensors,
    client_state: Tensors,
    content: str,
) -> FitResult:
    """Train the client's model in place, by DP-SGD under example-level DP, else by the method."""
    job = Job(
        model=client.model,
        roles=roles,
        examples=client.examples,
        loss=client.loss,
        train_config=agreement.train_config,
        seed=seeds.seed(agreement.experiment, "fit", turn.round, client.name),
        start=before,
        aux=only_aux(client.received),
        memory=only_aux(client_state),
        traits=client.traits,
        round=turn.round,
        activation_cache=client.activation_cache,
        examples_digest=client.examples_digest()
        if agreement.train_config.cache_activations
        else "",
    )
    if client.guard is not None:
        about = agreement.request_name(turn.round, client.name)
        return client.guard.make_fit(turn.round, about, content)(job)
    return agreement.method.fit(job)


def _param_digests(
    agreement: Agreement,
    client: Client,
    number: int,
    roles: Roles,
    before: Tensors,
    after: Tensors,
    stored_digests: Mapping[str, str],
) -> _DigestPair:
    """Return the digests of all params before and after a turn.

    `stored_digests`: digests of personal values from the journal. Raises FedplanError if a param
    changed that was not trained. Under distributed DP the digest of a trained personal param has
    the round's number, so that it always changes: an unchanged one would reveal a client without
    examples.
    """
    old, new = dict(client.start_digests), dict(client.start_digests)
    for p in agreement.trainable:
        key, role = p.key, roles[p]
        if before[key] is not client.start.get(key):
            stored = role.is_personal and key in stored_digests
            digest = client.digests.short_digest
            old[key] = stored_digests[key] if stored else digest(before[key])
        new[key] = client.digests.short_digest(after[key]) if role.is_trained else old[key]
        if agreement.distributed_dp and role.is_trained and role.is_personal:
            new[key] += f" {number}"
        if not role.is_trained and not same_bits(before[key], after[key]):
            raise FedplanError(
                f"{key} is {role.name} and changed: the fit broke the plan"
            ).with_code("training")
    initial = client.initial_model or InitialModel(
        {key: client.digests.full_digest(value) for key, value in client.start.items()}
    )
    for p in initial.changed_params(client.model, agreement.frozen):
        raise FedplanError(f"{p.key} is trained by no turn of the plan, and changed")
    return old, new


def _ledger_line(
    agreement: Agreement,
    client: Client,
    request: Request,
    turn: Turn,
    roles: Roles,
    digests: _DigestPair,
    result: FitResult,
    weight: int,
    upload: int,
) -> dict[str, Any]:
    """Return the ledger's line of a turn.

    Digests of personal params are keyed: a change shows, but a value cannot be guessed. Under
    differential privacy or secure aggregation no number depends on the examples. Under secure
    aggregation the digests of trained shared params are keyed too, with the round's number: a
    server could otherwise test a guess of a value by sending it as the next global value.
    """
    masked = agreement.secagg.active
    personal = {p.key for p in roles if roles[p].is_personal}
    shared = {p.key for p in roles if masked and roles[p] is Role.SHARE}
    old, new = digests
    new = {k: f"{digest} {turn.round}" if k in shared else digest for k, digest in new.items()}
    before, after = (
        {
            p.key: keyed_digest(client.digest_key, p.key, by_key[p.key])
            if p.key in keyed
            else by_key[p.key]
            for p in roles
        }
        for by_key, keyed in ((old, personal), (new, personal | shared))
    )
    private, scores = masked or agreement.guarantee is not None, turn.scores or {}
    if masked:
        scores = _scores_of_choice(agreement, turn, roles)
        upload = sum(map(agreement.upload_bytes, agreement.sent_params(request.turn, roles)))
    shows_loss = isfinite(result.loss) and not private and not client.hide_loss
    return TurnRecord(
        round=turn.round,
        client=client.name,
        phase=turn.phase,
        traits=client.traits,
        roles=role_letters(roles),
        before=join_digests(agreement.params, before),
        after=join_digests(agreement.params, after),
        down=sum(agreement.download_bytes[key] for key in request.versions),
        up=upload,
        weight=1 if masked else weight,
        steps=agreement.train_config.steps if private else result.steps,
        loss=result.loss if shows_loss else None,
        scores=tuple((b.stack, b.number, s) for b, s in scores.items()) if scores else None,
        full=request.full,
    ).json()


def _scores_of_choice(agreement: Agreement, turn: Turn, roles: Roles) -> dict[Block, float]:
    """Return scores that choose the same blocks as the turn's, and reveal only that choice.

    Joint scores are returned as they are. Raises FedplanError if no such scores exist.
    """
    scores = turn.scores or {}
    if not scores or agreement.method.joint_choice:
        return dict(scores)
    steps = [s for s in agreement.method.plan.active_steps(turn) if isinstance(s, Best)]
    candidates = [candidate_blocks(step, agreement.params) for step in steps]
    ballots = [
        make_ballot({block: scores[block] for block in blocks}, step.count)
        for step, blocks in zip(steps, candidates, strict=True)
    ]
    counts = {block: float(sum(block in ballot for ballot in ballots)) for block in scores}
    if agreement.resolved(replace(turn, scores=counts)) != roles:
        raise FedplanError(
            "the chosen blocks cannot be reported without their scores, which secure aggregation "
            "must not reveal: use one best(...), or choose together"
        ).with_code("plan")
    return counts
